"""CPM-Bee's checkpoints: rules and config of CPM-Live's. Files on the Hub have the prefix "cpmbee.", and may repeat the
embedding as `lm_head`."""

from modelcenter.convert.cpm import cpm_arch
from modelcenter.convert.rules import Rename, Split, Tied

ARCH = cpm_arch(
    "CpmBee",
    body=(
        Rename("input_embedding.weight", "embed.weight"),
        Tied("lm_head.weight", to="input_embedding.weight"),
        Split("position_bias.relative_attention_bias", ("relative.weight", "relative.pairs")),
    ),
    fields={"position_bias_num_segment_buckets": "num_relations"},
)

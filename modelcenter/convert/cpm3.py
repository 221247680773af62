"""CPM-3's checkpoints: rules and config of ModelCenter's. Prompts have a table of their own, besides the words'."""

from modelcenter.convert.cpm import cpm_arch
from modelcenter.convert.cpm1 import SCALES
from modelcenter.convert.cpmant import PROMPTS
from modelcenter.convert.rules import Rename, Split

ARCH = cpm_arch(
    "CPM3",
    body=(
        Rename("input_embedding.weight", "embed.weight"),
        Rename("prompt_embedding.weight", "prompt.weight"),
        Split("position_bias.relative_attention_bias", ("relative.weight", "relative.pairs")),
    ),
    fields=SCALES | PROMPTS | {"prompt": "prompt"},
    head=(Rename("output_projection.weight", "weight"),),
)

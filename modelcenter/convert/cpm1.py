"""CPM-1's checkpoints: rules and config of ModelCenter's. The head has its own matrix, or the embedding's."""

from modelcenter.convert.cpm import cpm_arch
from modelcenter.convert.rules import Rename

SCALES = {"attn_scale": "attn_scale", "length_scale": "length_scale"}

ARCH = cpm_arch(
    "CPM1",
    body=(
        Rename("input_embedding.weight", "embed.weight"),
        Rename("position_bias.relative_attention_bias", "relative.weight"),
    ),
    fields=SCALES,
    head=(Rename("output_projection.weight", "weight"),),
)

"""CPM-Ant's checkpoints: rules and config of transformers' `cpmant` models.

Prompts are below the words in the same embedding table. The head has its own matrix in every file, although
`tie_word_embeddings` is on. The published config spells the class `CPMAntForCausalLM`.
"""

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.cpm import FIELDS, LAYERS
from modelcenter.convert.rules import ArchMap, Part, Rename, Split, Task

PROMPTS = {"prompt_types": "prompt_types", "prompt_length": "prompt_length", "segment_types": "segment_types"}

ARCH = ArchMap(
    model_type="cpmant",
    prefix="cpmant.",
    body=(
        Rename("input_embedding.weight", "embed.weight"),
        Rename("segment_embedding.weight", "segment.weight"),
        Split("position_bias.relative_attention_bias", ("relative.weight", "relative.pairs")),
        *LAYERS,
    ),
    parts={"lm": Part((Rename("lm_head.weight", "weight"),))},
    tasks={
        "base": Task("CpmAntModel", prefix=""),
        "causal-lm": Task("CpmAntForCausalLM", {"lm": "head."}, class_aliases=("CPMAntForCausalLM",)),
    },
    config=ConfigMap(fields=FIELDS | PROMPTS, ignored=frozenset({"pad_token_id"})),
)

"""Checkpoints of PEGASUS: rules and config of transformers' `pegasus` models. Tensors have mBART's names, without a
norm of the embeddings. Google's files lack the position tables; those that transformers 5 writes hold them.
"""

from modelcenter.convert.bart import (
    FIELDS,
    IGNORED,
    PARTS,
    SAME,
    SHARED,
    SIDES,
    ForcedTokensConfigMap,
    final_norm,
    layers,
)
from modelcenter.convert.rules import ArchMap, Rename, Rule, Task

TASKS = {
    "base": Task("PegasusModel", prefix=""),
    "seq2seq-lm": Task("PegasusForConditionalGeneration", {"lm": "head."}),
}


def positions(side: str) -> list[Rule]:
    """The position table of a side."""
    return [Rename(f"{side}.embed_positions.weight", f"{side}.position.weight", optional=True)]


CONFIG = ForcedTokensConfigMap(
    fields=FIELDS,
    required={
        **SAME,
        # From when one class implemented BART, mBART, Marian and PEGASUS.
        "add_final_layer_norm": (True,),
        "normalize_before": (True,),
        "normalize_embedding": (False,),
        "static_position_embeddings": (True,),
    },
    # init_metadata: the layers of its teacher from which a distilled model was initialised.
    ignored=IGNORED | {"classifier_dropout", "init_metadata"},
    tokens={"eos_token_id": 1, "forced_eos_token_id": 1},
)

ARCH = ArchMap(
    model_type="pegasus",
    prefix="model.",
    body=(SHARED, *(rule for side in SIDES for rule in layers(side) + positions(side) + final_norm(side))),
    parts={"lm": PARTS["lm"]},
    tasks=TASKS,
    config=CONFIG,
    ignore=(r"(encoder|decoder)\.version",),
)

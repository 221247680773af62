"""mBART's checkpoints: rules and config of transformers' `mbart` models. Tensors have BART's names, with a norm after
the layers of each side.
"""

from modelcenter.convert.bart import (
    FIELDS,
    IGNORED,
    PARTS,
    SAME,
    SHARED,
    SIDES,
    BartConfigMap,
    embeddings,
    final_norm,
    layers,
)
from modelcenter.convert.rules import ArchMap, Task

TASKS = {
    "base": Task("MBartModel", prefix=""),
    "seq2seq-lm": Task("MBartForConditionalGeneration", {"lm": "head."}),
    "sequence-classification": Task("MBartForSequenceClassification", {"classifier": "head."}),
    "question-answering": Task("MBartForQuestionAnswering", {"qa": "head."}, labels=2),
}

CONFIG = BartConfigMap(
    fields={**FIELDS, "classifier_dropout": "classifier_dropout"},
    required={
        **SAME,
        # From when one class implemented BART, mBART and Marian.
        "add_final_layer_norm": (True,),
        "do_blenderbot_90_layernorm": (False,),
        "normalize_before": (True,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
    },
    ignored=IGNORED,
    labels=2,
)

ARCH = ArchMap(
    model_type="mbart",
    prefix="model.",
    body=(SHARED, *(rule for side in SIDES for rule in layers(side) + embeddings(side) + final_norm(side))),
    parts=PARTS,
    tasks=TASKS,
    config=CONFIG,
    ignore=(r"(encoder|decoder)\.version",),
)

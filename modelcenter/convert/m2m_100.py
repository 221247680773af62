"""Checkpoints of M2M100 and NLLB: rules and config of transformers' `m2m_100` models. Tensors have mBART's names,
without the position table and the norm of the embeddings; old files hold the sinusoidal positions.
"""

from modelcenter.convert.bart import FIELDS, SHARED, SIDES, BartStyleConfigMap, final_norm, layers
from modelcenter.convert.config_map import BOTH_SIDES
from modelcenter.convert.rules import ArchMap, Part, Rename, Task, Tied, tied, untied

PARTS = {
    "lm": Part((Tied("lm_head.weight", to="shared.weight", when=tied), Rename("lm_head.weight", "weight", when=untied)))
}

TASKS = {
    "base": Task("M2M100Model", prefix=""),
    "seq2seq-lm": Task("M2M100ForConditionalGeneration", {"lm": "head."}),
}

CONFIG = BartStyleConfigMap(
    fields={**FIELDS, "encoder_layerdrop": "encoder_layerdrop", "decoder_layerdrop": "decoder_layerdrop"},
    required={**BOTH_SIDES, "is_encoder_decoder": (True,)},
    ignored=frozenset(("num_hidden_layers",)),
)

ARCH = ArchMap(
    model_type="m2m_100",
    prefix="model.",
    body=(SHARED, *(rule for side in SIDES for rule in layers(side) + final_norm(side))),
    parts=PARTS,
    tasks=TASKS,
    config=CONFIG,
    ignore=(r"(encoder|decoder)\.(version|embed_positions\.weights)",),
)

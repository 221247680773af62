"""Checkpoints of Gemma 2: rules and config of transformers' `gemma2`, with the names of Gemma 3's body. Early files
have a second field for the window, and also the activation under Llama's name."""

from modelcenter.convert import llama
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.gemma import FIELDS, ROPE_THETA, SANDWICH_BODY, GemmaFields
from modelcenter.convert.rules import ArchMap, with_embedding

CAPS = {"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logit_cap"}
WINDOWS = {name: name for name in ("layer_types", "sliding_window", "query_pre_attn_scalar")}

ARCH = ArchMap(
    model_type="gemma2",
    prefix="model.",
    body=SANDWICH_BODY,
    parts=llama.PARTS,
    tasks=with_embedding({name: task for name, task in llama.tasks("Gemma2").items() if name != "question-answering"}),
    config=ConfigMap(
        {**FIELDS, **WINDOWS, **CAPS},
        required={"use_bidirectional_attention": (False, None)},
        ignored=frozenset(("sliding_window_size",)),
        translation=GemmaFields(ROPE_THETA),
    ),
    ignore=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)

"""Checkpoints of T5Gemma: rules and config of transformers' `t5gemma`, whose config.json contains two of Gemma 2.

Dropouts are in the outer config, and transformers copies them to the sides. Classes without a decoder need
`is_encoder_decoder` false: if it is true, transformers' token classifiers have a decoder, unlike ours; if it is false,
its text classifiers have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert import gemma2
from modelcenter.convert.config_map import BOTH_SIDES, ConfigMap
from modelcenter.convert.gemma import FIELDS, ROPE_THETA, GemmaFields
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, embedding_task, tied, untied
from modelcenter.convert.two_configs import TwoConfigsMap

_NORMS = {
    "pre_self_attn": "attn",
    "post_self_attn": "attn_post",
    "pre_cross_attn": "cross",
    "post_cross_attn": "cross_post",
    "pre_feedforward": "mlp",
    "post_feedforward": "mlp_post",
}


def _side(side: str) -> list[Rule]:
    layer = f"{side}.layers.{{i}}"
    parts = [("self_attn", "attn")] + ([("cross_attn", "cross")] if side == "decoder" else [])
    return [
        Rename(f"{side}.embed_tokens.weight", f"{side}.embed.weight"),
        *(
            Rename(f"{layer}.{theirs}.{name}_proj.*", f"{layer}.{ours}.{own}.*")
            for theirs, ours in parts
            for name, own in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))
        ),
        *(Rename(f"{layer}.mlp.{name}_proj.*", f"{layer}.mlp.{name}.*") for name in ("gate", "up", "down")),
        *(
            Rename(f"{layer}.{theirs}_layernorm.weight", f"{layer}.{ours}_norm.weight")
            for theirs, ours in _NORMS.items()
            if side == "decoder" or "cross" not in theirs
        ),
        Rename(f"{side}.norm.weight", f"{side}.final_norm.weight"),
    ]


_ENCODER = Task("T5GemmaEncoderModel", prefix="", without=r"decoder\..*")
TASKS = {
    "base": Task("T5GemmaModel", prefix=""),
    "text-encoding": _ENCODER,
    "embedding": embedding_task(_ENCODER),
    "seq2seq-lm": Task("T5GemmaForConditionalGeneration", {"lm": "head."}),
    "sequence-classification": Task("T5GemmaForSequenceClassification", {"score": "head."}),
    "token-classification": Task("T5GemmaForTokenClassification", {"token score": "head."}, without=r"decoder\..*"),
}
_WITHOUT_DECODER = tuple(task.hf_class for task in TASKS.values() if task.without is not None)
_OF_THE_WHOLE = ("attention_dropout", "classifier_dropout_rate", "dropout_rate")

SIDE = ArchMap(
    model_type="t5_gemma_module",
    prefix="",
    body=(),
    parts={},
    tasks={},
    config=ConfigMap(
        {
            **{hub: ours for hub, ours in FIELDS.items() if "dropout" not in hub},
            **gemma2.WINDOWS,
            **gemma2.CAPS,
            "bos_token_id": "bos_token_id",
            "eos_token_id": "eos_token_id",
        },
        required={**BOTH_SIDES, "is_decoder": (False, True)},
        translation=GemmaFields(ROPE_THETA),
    ),
)


@dataclass(frozen=True)
class T5GemmaMap(TwoConfigsMap):
    """T5Gemma's config.json. The decoder's cross-attention reads the encoder's width, whatever the file says."""

    not_of_sides: tuple[str, ...] = (*_OF_THE_WHOLE, "cross_attention_hidden_size")

    def side_rules(self, side: str, values: Any) -> ArchMap:
        if not isinstance(values, Mapping):
            raise ValueError(f"config field {side!r}: got {values!r:.80}, expected an object with Gemma 2's fields")
        return SIDE

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """
        Raises:
            ValueError: as ConfigMap.read; is_encoder_decoder does not fit the class.
        """
        decodes = values.get("is_encoder_decoder", True)
        for name in values.get("architectures") or ():
            has = name not in _WITHOUT_DECODER
            if name != "T5GemmaModel" and decodes is not has:
                raise ValueError(
                    f"config field 'is_encoder_decoder': got {decodes!r} with {name}, which here "
                    f"{'has a' if has else 'has no'} decoder; expected {str(has).lower()}"
                )
        return super().read(values, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        c: Any = config
        for side in ("encoder", "decoder"):
            own = getattr(c, side)
            written = SIDE.config.write(own, "", dtype)
            written |= {name: out[name] for name in _OF_THE_WHOLE} | {"is_decoder": side == "decoder"}
            without = {"architectures"} if own.dtype else {"architectures", "dtype"}
            out[side] = {name: value for name, value in written.items() if name not in without}
        out["decoder"] |= {
            "bos_token_id": c.decoder_start_token_id,
            "cross_attention_hidden_size": c.encoder.hidden_size,
        }
        return dict(sorted({**out, "is_encoder_decoder": hf_class not in _WITHOUT_DECODER}.items()))


CONFIG = T5GemmaMap(
    fields={
        "encoder": "encoder",
        "decoder": "decoder",
        "dropout_rate": "dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout_rate": "classifier_dropout",
        "pad_token_id": "pad_token_id",
        "eos_token_id": "eos_token_id",
        "initializer_range": "initializer_range",
    },
    required={**BOTH_SIDES, "is_encoder_decoder": (True, False)},
)

ARCH = ArchMap(
    model_type="t5gemma",
    prefix="model.",
    body=(*_side("encoder"), *_side("decoder")),
    parts={
        "lm": Part(
            (
                Tied("lm_head.out_proj.weight", to="decoder.embed_tokens.weight", when=tied),
                Rename("lm_head.out_proj.weight", "weight", when=untied),
            )
        ),
        "score": Part((Rename("score.out_proj.*", "*"),)),
        "token score": Part((Rename("score.out_proj.*", "*"),)),
    },
    tasks=TASKS,
    config=CONFIG,
)

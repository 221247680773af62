"""T5's checkpoints: rules and config of transformers' `t5`, `mt5` and `umt5` models.

Two properties are independent: whether the vocabulary's matrix is the embedding, and whether the decoder's outputs are
scaled. Version 4 wrote false as `tie_word_embeddings` if neither holds. Version 5 always writes true, together with
`scale_decoder_outputs`; `lm_head.weight` is then in the file if it is not the embedding. If it is not, we write false
and both tensors, which both versions read.

Old files repeat the embedding on each side, and hold an unused bias of cross-attention.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import BOTH_SIDES, ConfigMap
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Task, Tied, embedding_task, tied, untied


def _attention(hub: str, native: str) -> list[Rule]:
    names = (*((name, name) for name in "qkv"), ("o", "out"))
    return [Rename(f"{hub}.{theirs}.weight", f"{native}.{ours}.weight") for theirs, ours in names]


def _side(side: str, per_layer: bool) -> list[Rule]:
    block, layer = f"{side}.block.{{i}}.layer", f"{side}.layers.{{i}}"
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    last = 2 if side == "decoder" else 1
    rules: list[Rule] = [
        Rename(f"{side}.block.{{i}}.{bias}", f"{layer}.position.weight")
        if per_layer
        else Rename(f"{side}.block.0.{bias}", f"{side}.position.weight"),
        Rename(f"{block}.0.layer_norm.weight", f"{layer}.attn_norm.weight"),
        *_attention(f"{block}.0.SelfAttention", f"{layer}.attn"),
    ]
    if side == "decoder":
        rules += [
            Rename(f"{block}.1.layer_norm.weight", f"{layer}.cross_norm.weight"),
            *_attention(f"{block}.1.EncDecAttention", f"{layer}.cross"),
        ]
    return [
        *rules,
        Rename(f"{block}.{last}.layer_norm.weight", f"{layer}.mlp_norm.weight"),
        Rename(f"{block}.{last}.DenseReluDense.wi.weight", f"{layer}.mlp.up.weight", when=lambda c: not c.gated),
        Rename(f"{block}.{last}.DenseReluDense.wi_0.weight", f"{layer}.mlp.gate.weight"),
        Rename(f"{block}.{last}.DenseReluDense.wi_1.weight", f"{layer}.mlp.up.weight", when=lambda c: c.gated),
        Rename(f"{block}.{last}.DenseReluDense.wo.weight", f"{layer}.mlp.down.weight"),
        Rename(f"{side}.final_layer_norm.weight", f"{side}.final_norm.weight"),
    ]


def _body(per_layer: bool) -> tuple[Rule, ...]:
    return (
        Rename("shared.weight", "embed.weight"),
        Tied("encoder.embed_tokens.weight", to="shared.weight"),
        Tied("decoder.embed_tokens.weight", to="shared.weight"),
        *_side("encoder", per_layer),
        *_side("decoder", per_layer),
    )


PARTS = {
    "lm": Part(
        (
            Tied("lm_head.weight", to="shared.weight", when=tied),
            Rename("lm_head.weight", "weight", when=untied),
        )
    ),
    "classifier": Part(
        (Rename("classification_head.dense.*", "dense.*"), Rename("classification_head.out_proj.*", "*"))
    ),
    "token classifier": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("qa_outputs.*", "*"),)),
}


def _tasks(family: str, aliases: tuple[str, ...] = ()) -> dict[str, Task]:
    encoder = Task(f"{family}EncoderModel", prefix="", without=r"decoder\..*")
    return {
        "base": Task(f"{family}Model", prefix=""),
        "text-encoding": encoder,
        "embedding": embedding_task(encoder),
        "seq2seq-lm": Task(f"{family}ForConditionalGeneration", {"lm": "head."}, prefix="", class_aliases=aliases),
        "sequence-classification": Task(f"{family}ForSequenceClassification", {"classifier": "head."}),
        "token-classification": Task(
            f"{family}ForTokenClassification", {"token classifier": "head."}, without=r"decoder\..*"
        ),
        "question-answering": Task(f"{family}ForQuestionAnswering", {"qa": "head."}, prefix="", labels=2),
    }


@dataclass(frozen=True)
class T5ConfigMap(ConfigMap):
    """T5's config.json, in which `feed_forward_proj` determines `dense_act_fn` and `is_gated_act`.

    Attributes:
        scaled: tie_word_embeddings -> scale_decoder_outputs, for a file without the latter.
    """

    scaled: Callable[[bool], bool] = bool

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = self._translated(values)
        tied = given.get("tie_word_embeddings", given.get("tie_embeddings", config_class.tie_embeddings))
        given.setdefault("scale_decoder_outputs", self.scaled(tied is not False))
        return super().read(given, config_class, self._translated(overrides or {}))

    @staticmethod
    def _translated(values: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(values)
        if (kind := given.pop("feed_forward_proj", None)) is not None:
            *gate, act = str(kind).split("-")
            if gate not in ([], ["gated"]):
                raise ValueError(f"config field 'feed_forward_proj': got {kind!r}, expected an activation or gated-...")
            given.setdefault("is_gated_act", bool(gate))
            given.setdefault("dense_act_fn", "gelu_new" if kind == "gated-gelu" else act)
        return given

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        act = out["dense_act_fn"]
        out["feed_forward_proj"] = f"gated-{'gelu' if act == 'gelu_new' else act}" if out["is_gated_act"] else act
        out["is_encoder_decoder"] = not hf_class.endswith(("ForTokenClassification", "EncoderModel"))
        return dict(sorted(out.items()))


CONFIG = T5ConfigMap(
    fields={
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "num_heads": "num_heads",
        "d_kv": "head_dim",
        "d_ff": "intermediate_size",
        "dense_act_fn": "hidden_act",
        "is_gated_act": "gated",
        "relative_attention_num_buckets": "num_buckets",
        "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_eps",
        "dropout_rate": "dropout",
        "classifier_dropout": "classifier_dropout",
        "scale_decoder_outputs": "scale_decoder_outputs",
        "pad_token_id": "pad_token_id",
        "eos_token_id": "eos_token_id",
        "decoder_start_token_id": "decoder_start_token_id",
        "initializer_factor": "initializer_factor",
    },
    required={**BOTH_SIDES, "is_encoder_decoder": (True, False)},
    # scalable_attention belongs to the code that umT5 was trained with.
    ignored=frozenset(("n_positions", "scalable_attention")),
)


def _infer_tie(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Detect a separate lm_head in a file of version 5, whose config.json always says that embeddings are tied."""
    # If outputs are scaled, T5's lm_head is the embedding, which files of version 4 repeat.
    forced = config.get("tie_word_embeddings") is True and (
        config.get("model_type") != "t5" or config.get("scale_decoder_outputs") is False
    )
    return {"tie_embeddings": False} if forced and "lm_head.weight" in names else {}


ARCH = ArchMap(
    model_type="t5",
    prefix="transformer.",
    body=_body(per_layer=False),
    parts=PARTS,
    tasks=_tasks("T5", aliases=("T5WithLMHeadModel",)),  # its original name
    config=CONFIG,
    ignore=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    infer_config=_infer_tie,
)
# mT5 is never scaled. umT5 is like T5 in transformers 4 and from 5.24 on; versions in between scaled every umT5.
MT5 = replace(ARCH, model_type="mt5", tasks=_tasks("MT5"), config=replace(CONFIG, scaled=lambda tied: False))
UMT5 = replace(ARCH, model_type="umt5", tasks=_tasks("UMT5"), body=_body(per_layer=True))

"""ModernBERT's checkpoints: rules and config of transformers' `modernbert` models.

Query, key and value are one tensor, and so are gate and up. Version 4 of transformers wrote the period of layers with
full attention (`global_attn_every_n_layers`) and two bases of rotary angles (`global_rope_theta`, `local_rope_theta`);
version 5 writes `layer_types` and, inside `rope_parameters`, a base for each type.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert.config_map import BIDIRECTIONAL, ConfigMap, set_once
from modelcenter.convert.rules import ArchMap, Part, Rename, Rule, Split, Task, Tied, tied, untied, with_embedding

BODY: tuple[Rule, ...] = (
    Rename("embeddings.tok_embeddings.weight", "embed.weight"),
    Rename("embeddings.norm.*", "embed_norm.*"),
    Rename("layers.{i}.attn_norm.*", "layers.{i}.attn_norm.*"),
    Split("layers.{i}.attn.Wqkv.*", ("layers.{i}.attn.q.*", "layers.{i}.attn.k.*", "layers.{i}.attn.v.*")),
    Rename("layers.{i}.attn.Wo.*", "layers.{i}.attn.out.*"),
    Rename("layers.{i}.mlp_norm.*", "layers.{i}.mlp_norm.*"),
    Split("layers.{i}.mlp.Wi.*", ("layers.{i}.mlp.gate.*", "layers.{i}.mlp.up.*")),
    Rename("layers.{i}.mlp.Wo.*", "layers.{i}.mlp.down.*"),
    Rename("final_norm.*", "final_norm.*"),
)

PARTS = {
    # Precedes every head, and is pretrained with that of the vocabulary.
    "transform": Part((Rename("head.dense.*", "dense.*"), Rename("head.norm.*", "norm.*"))),
    "lm": Part(
        (
            Tied("decoder.weight", to="embeddings.tok_embeddings.weight", when=tied),
            Rename("decoder.weight", "weight", when=untied),
            Rename("decoder.bias", "bias"),
        )
    ),
    # Four heads with the same name; `architectures` tells which one a file holds.
    "classifier": Part((Rename("classifier.*", "*"),)),
    "token classifier": Part((Rename("classifier.*", "*"),)),
    "choice": Part((Rename("classifier.*", "*"),)),
    "qa": Part((Rename("classifier.*", "*"),)),
}


def _task(name: str, part: str, labels: int | None = None) -> Task:
    return Task(f"ModernBertFor{name}", {"transform": "transform.", part: "head."}, labels=labels)


TASKS = {
    "base": Task("ModernBertModel", prefix=""),
    "masked-lm": Task("ModernBertForMaskedLM", {"transform": "head.", "lm": "head."}),
    "sequence-classification": _task("SequenceClassification", "classifier"),
    "token-classification": _task("TokenClassification", "token classifier"),
    "question-answering": _task("QuestionAnswering", "qa", labels=2),
    "multiple-choice": _task("MultipleChoice", "choice"),
}

_EVERY = "global_attn_every_n_layers"
_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def _layer_types(every: int, layers: int) -> list[str]:
    return ["sliding_attention" if i % every else "full_attention" for i in range(layers)]


class ModernBertFields:
    """Both versions' forms of which layers have full attention, and of the bases of their rotary angles."""

    handles = frozenset({"rope_parameters", "rope_scaling"})

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The form of version 4, except for types of layers that it cannot express.

        Raises:
            ValueError: a field has an unknown form, angles are scaled, or two bases differ.
        """
        values = dict(values)
        types, every = values.get("layer_types"), values.get(_EVERY)
        if isinstance(types, list) and (found := _period(types, every)) is not None:
            values |= {_EVERY: found, "layer_types": None}
        parameters, scaling = values.pop("rope_parameters", None) or {}, values.pop("rope_scaling", None)
        for kind in (parameters, *parameters.values()) if isinstance(parameters, Mapping) else (parameters,):
            if not isinstance(kind, Mapping | None):
                raise ValueError(f"rope_parameters: got {parameters!r:.80}, expected an object for each layer type")
        for kind in (scaling, *parameters.values()):
            if kind and kind.get("rope_type", kind.get("type", "default")) != "default":
                raise ValueError(f"rope_parameters: got {kind!r:.80}, but angles of modernbert are not scaled here")
        for kind, name in _THETAS.items():
            theta = (parameters.get(kind) or {}).get("rope_theta")
            set_once(values, name, theta, f"rope_parameters.{kind}.rope_theta")
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in both versions' forms, if version 4 has one."""
        values = dict(values)
        if values["layer_types"] is None:
            values["layer_types"] = _layer_types(values[_EVERY], values["num_hidden_layers"])
        else:
            del values[_EVERY]
        parameters = {kind: {"rope_type": "default", "rope_theta": values[name]} for kind, name in _THETAS.items()}
        return values | {"rope_parameters": parameters}


def _period(types: list[Any], likely: Any) -> int | None:
    """The period of layers with full attention, if one describes all layers; `likely` is tried first."""
    tried = (likely if isinstance(likely, int) and likely > 0 else 3, *range(1, len(types) + 1))
    return next((n for n in tried if _layer_types(n, len(types)) == types), None)


FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "hidden_activation": "hidden_act",
    "max_position_embeddings": "max_positions",
    "layer_types": "layer_types",
    _EVERY: "global_every",
    "local_attention": "local_attention",
    "global_rope_theta": "rope_theta",
    "local_rope_theta": "local_rope_theta",
    "norm_eps": "norm_eps",
    "norm_bias": "norm_bias",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "decoder_bias": "decoder_bias",
    "embedding_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "mlp_dropout": "mlp_dropout",
    "classifier_dropout": "classifier_dropout",
    "classifier_bias": "classifier_bias",
    "classifier_activation": "classifier_act",
    "pad_token_id": "pad_token_id",
    "initializer_range": "initializer_range",
    "initializer_cutoff_factor": "initializer_cutoff",
}

# How transformers computes, or Ettin's training code; and two of BERT's fields, which never had an effect.
IGNORED = frozenset(
    """deterministic_flash_attn masked_prediction reference_compile repad_logits_with_grad sparse_prediction
    sparse_pred_ignore_index layer_norm_eps position_embedding_type""".split()
)

ARCH = ArchMap(
    model_type="modernbert",
    prefix="model.",
    body=BODY,
    parts=PARTS,
    tasks=with_embedding(TASKS),
    config=ConfigMap(
        {**FIELDS, "classifier_pooling": "pooling"},
        required={**BIDIRECTIONAL, "causal_mask": (False,)},
        ignored=IGNORED,
        translation=ModernBertFields(),
    ),
)

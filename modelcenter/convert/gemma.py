"""Checkpoints of Gemma 1 and of Gemma 3's text models: rules and config of transformers' `gemma` and `gemma3_text`.

Tensors have Llama's names. Gemma 3's `post_attention_layernorm` is where its name says, unlike in Llama and Gemma 1.
Version 4 of transformers wrote two bases of rotary angles into Gemma 3's config.json (`rope_theta`, and
`rope_local_base_freq` for layers with a window) and a scaling of the first; version 5 writes both into
`rope_parameters`, by type of layer.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert import llama
from modelcenter.convert.config_map import ConfigMap, set_once
from modelcenter.convert.rules import ArchMap, Rename, Rule, Task, with_embedding

_EVERY, _FULL, _SLIDING = "sliding_window_pattern", "full_attention", "sliding_attention"
_THETAS = {_FULL: "rope_theta", _SLIDING: "rope_local_base_freq"}

SANDWICH_BODY: tuple[Rule, ...] = (
    *(rule for rule in llama.BODY if "post_attention_layernorm" not in rule.hub_templates()[0]),
    Rename("layers.{i}.post_attention_layernorm.weight", "layers.{i}.attn_post_norm.weight"),
    Rename("layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Rename("layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.mlp_post_norm.weight"),
)


class GemmaFields(llama.LlamaFields):
    """Rotary fields, and two names of the activation. The first files say "gelu" but mean its approximation."""

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | {"hidden_activation"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(values)
        if values.get("hidden_act") == "gelu":
            values["hidden_act"] = "gelu_pytorch_tanh"
        set_once(values, "hidden_act", values.pop("hidden_activation", None), "hidden_activation")
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().write(values)
        return values | {"hidden_activation": values["hidden_act"]}


class _Gemma3Fields(llama.LlamaFields):
    """Both versions' forms of which layers have full attention, and of their rotary angles."""

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | set(_THETAS.values())

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The form of version 4, except for types of layers that it cannot express.

        Raises:
            ValueError: as `RopeFields.read`; or angles of layers with a window are scaled, or yarn's range is exact.
        """
        values = dict(values)
        types, every = values.get("layer_types"), values.get(_EVERY)
        # If their number differs from that of the file's layers, the config is wrong.
        if isinstance(types, list) and len(types) == values.get("num_hidden_layers", len(types)):
            found = _period(types, every)
            values |= {} if found is None else {_EVERY: found, "layer_types": None}
        kinds = values.pop("rope_parameters", None) or {}
        if not isinstance(kinds, Mapping) or not all(isinstance(kinds.get(name), Mapping | None) for name in _THETAS):
            raise ValueError(f"rope_parameters: got {kinds!r:.80}, expected an object for each type of layer")
        if unknown := sorted(set(kinds) - set(_THETAS)):
            raise ValueError(
                f"rope_parameters: got {', '.join(unknown)}, expected types of layers: {', '.join(_THETAS)}"
            )
        local = dict(kinds.get(_SLIDING) or {})
        if local.get("rope_type", "default") != "default":
            raise ValueError(
                f"rope_parameters: got {local!r:.80}, but angles of layers with a window are not scaled here"
            )
        for kind, name in _THETAS.items():
            theta = (kinds.get(kind) or {}).get("rope_theta")
            set_once(values, name, theta, f"rope_parameters.{kind}.rope_theta")
        values = super().read(values | {"rope_parameters": kinds.get(_FULL)})
        if not (values.get("rope_scaling") or {}).get("truncate", True):
            raise ValueError(
                "rope_parameters: got truncate=False, which transformers does not read in a config with rotary "
                "parameters for each type of layer; leave it out to compute what transformers does"
            )
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in both versions' forms, if version 4 has one."""
        values = super().write(values)
        if values["layer_types"] is None:
            values["layer_types"] = _layer_types(values[_EVERY], values["num_hidden_layers"])
        else:
            del values[_EVERY]
        local = {"rope_type": "default", "rope_theta": values[_THETAS[_SLIDING]]}
        return values | {"rope_parameters": {_FULL: values["rope_parameters"], _SLIDING: local}}


def _layer_types(every: int, layers: int) -> list[str]:
    return [_SLIDING if (i + 1) % every else _FULL for i in range(layers)]


def _period(types: list[Any], likely: Any) -> int | None:
    """The period of layers with full attention, if one describes all layers; `likely` is tried first."""
    tried = (likely if isinstance(likely, int) and likely > 0 else 6, *range(1, len(types) + 2))
    return next((n for n in tried if _layer_types(n, len(types)) == types), None)


ROPE_THETA = {"rope_theta": "rope_theta"}
FIELDS = {**llama.FIELDS, **llama.HEAD_DIM, "attention_bias": "attention_bias"}

ARCH = ArchMap(
    model_type="gemma",
    prefix="model.",
    body=llama.BODY,
    parts=llama.PARTS,
    tasks=with_embedding({name: task for name, task in llama.tasks("Gemma").items() if name != "question-answering"}),
    config=ConfigMap(
        FIELDS,
        required={"use_bidirectional_attention": (False, None)},
        translation=GemmaFields(ROPE_THETA),
    ),
    ignore=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)

GEMMA3 = ArchMap(
    model_type="gemma3_text",
    prefix="model.",
    body=SANDWICH_BODY,
    parts=llama.PARTS,
    tasks=with_embedding(
        {
            "base": Task("Gemma3TextModel", prefix=""),
            "causal-lm": Task("Gemma3ForCausalLM", {"lm": "head."}),
            "sequence-classification": Task("Gemma3TextForSequenceClassification", {"score": "head."}),
        }
    ),
    config=ConfigMap(
        {
            **{hub: ours for hub, ours in FIELDS.items() if hub != "hidden_act"},
            "hidden_activation": "hidden_act",
            "rope_local_base_freq": "local_rope_theta",
            "layer_types": "layer_types",
            _EVERY: "full_every",
            "sliding_window": "sliding_window",
            "query_pre_attn_scalar": "query_pre_attn_scalar",
            "use_bidirectional_attention": "use_bidirectional_attention",
        },
        # transformers does not cap attention scores whatever the config says, but other programs may.
        required={"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        translation=_Gemma3Fields(ROPE_THETA),
    ),
)

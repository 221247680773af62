"""Checkpoints of Phi-3 and Phi-4: rules and config of transformers' `phi3`.

Tensors have Llama's names, but q, k and v are one matrix, and so are gate and up. The length from which longrope's long
factors apply is a field of config.json itself; transformers also writes it into `rope_parameters`.
The published config.json names its authors' code (`auto_map`), which computes the same; it is not written.
"""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert import llama
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Rule, Split, with_embedding

_ORIGINAL, _ORIGINAL_DEFAULT = "original_max_position_embeddings", 4096
_FORMS = ("rope_parameters", "rope_scaling")
_FUSED = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate_proj", "up_proj")

BODY: tuple[Rule, ...] = (
    *(rule for rule in llama.BODY if not any(f".{name}." in rule.hub_templates()[0] for name in _FUSED)),
    Split("layers.{i}.self_attn.qkv_proj.*", tuple(f"layers.{{i}}.attn.{name}.*" for name in "qkv")),
    Split("layers.{i}.mlp.gate_up_proj.*", ("layers.{i}.mlp.gate.*", "layers.{i}.mlp.up.*")),
)


class _Phi3Fields(llama.Qwen2Fields):
    """Rotary fields, of which "su" and "yarn" are first names of longrope; head_dim is written as in Qwen2."""

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | {"auto_map"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The form of version 4.

        Raises:
            ValueError: as `RopeFields.read`, or a scaling names another original length than config.json itself.
        """
        values = {name: value for name, value in values.items() if name != "auto_map"}
        for name in _FORMS:
            if isinstance(values.get(name), Mapping):
                values[name] = _as_longrope(values[name])
        scaled = [values[name] for name in _FORMS if isinstance(values.get(name), Mapping) and values[name]]
        inside = [form.pop(_ORIGINAL) for form in scaled if _ORIGINAL in form]
        if inside:
            outside = values.setdefault(_ORIGINAL, _ORIGINAL_DEFAULT)
            for length in inside:
                if length not in (None, outside):
                    raise ValueError(
                        f"{_ORIGINAL}: got {outside!r} in config.json ({_ORIGINAL_DEFAULT} if it does not say) and "
                        f"{length!r} in rope_parameters; write the right number into config.json itself"
                    )
        return super().read(values)

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Both forms; of rope_scaling only the fields that version 4 accepts, if there are no others."""
        values = super().write(values)
        if (scaling := values.get("rope_scaling")) is not None:
            values["rope_scaling"] = {name: value for name, value in scaling.items() if name != "rope_type"}
            values["rope_parameters"] = {**values["rope_parameters"], _ORIGINAL: values[_ORIGINAL]}
        return values


def _as_longrope(form: Mapping[str, Any]) -> dict[str, Any]:
    """A form of rotary fields with one name of longrope."""
    old = ("su", "yarn")
    return {key: "longrope" if key in ("type", "rope_type") and kind in old else kind for key, kind in form.items()}


_ROPE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
_FIELDS = {
    "partial_rotary_factor": "rotary_fraction",
    _ORIGINAL: "original_max_positions",
    "resid_pdrop": "dropout",
    "sliding_window": "sliding_window",
}
# What only the code published with the weights reads; the published values change nothing.
_REQUIRED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
}
# embd_pdrop: neither transformers nor the published code applies it.
_IGNORED = frozenset({"embd_pdrop"})
_TASKS = ("base", "causal-lm", "sequence-classification", "token-classification")

ARCH = ArchMap(
    model_type="phi3",
    prefix="model.",
    body=BODY,
    parts=llama.PARTS,
    tasks=with_embedding({name: task for name, task in llama.tasks("Phi3").items() if name in _TASKS}),
    config=ConfigMap(
        {**llama.FIELDS, **llama.HEAD_DIM, **_FIELDS},
        required=_REQUIRED,
        ignored=_IGNORED,
        translation=_Phi3Fields(_ROPE),
    ),
    ignore=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)

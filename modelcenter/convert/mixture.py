"""Checkpoints of Mixtral, OLMoE, GraniteMoE, Qwen2-MoE and Qwen3-MoE: rules and config of transformers' models with
these names.

Tensors have Llama's names, except those of mixtures of experts. Files hold three matrices of each expert; the models of
transformers hold two tensors of all experts, in which gate and up are joined, and so do files of GraniteMoE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.convert import granite, llama
from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.rules import ArchMap, Rename, Rule, Split, Stack, with_embedding


def _joined(router: str, gate_up: str, down: str) -> tuple[Rule, ...]:
    """The rules of mixtures whose experts are two tensors. router, gate_up, down: their names in a layer."""
    return (
        Rename(f"layers.{{i}}.{router}", "layers.{i}.mlp.router.weight"),
        Split(f"layers.{{i}}.{gate_up}", ("layers.{i}.mlp.experts.gate", "layers.{i}.mlp.experts.up"), dim=1),
        Rename(f"layers.{{i}}.{down}", "layers.{i}.mlp.experts.down"),
    )


_IN_MODEL = _joined("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_SHARED: tuple[Rule, ...] = (
    Rename("layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.weight"),
    Rename("layers.{i}.mlp.shared_expert.gate_proj.weight", "layers.{i}.mlp.shared.gate.weight"),
    Rename("layers.{i}.mlp.shared_expert.up_proj.weight", "layers.{i}.mlp.shared.up.weight"),
    Rename("layers.{i}.mlp.shared_expert.down_proj.weight", "layers.{i}.mlp.shared.down.weight"),
)


def _of_files(place: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The rules of mixtures in files. place: their name in a layer; gate, up, down: of an expert's matrices."""
    matrices = {"gate": gate, "up": up, "down": down}
    return (
        Rename(f"layers.{{i}}.{place}.gate.weight", "layers.{i}.mlp.router.weight"),
        *(
            Stack(f"layers.{{i}}.{place}.experts.{{e}}.{name}.weight", f"layers.{{i}}.mlp.experts.{own}")
            for own, name in matrices.items()
        ),
    )


@dataclass(frozen=True)
class MixtureFields(llama.Qwen2Fields):
    """Fields of rotary positions and heads, and the number of experts, whose name differs by family and version: either
    is read.

    experts: the one that is written, which is that of published files. (Of Qwen3-MoE, transformers 5 writes the other,
    which transformers 4 does not read.)
    """

    experts: str = "num_experts"

    @property
    def handles(self) -> frozenset[str]:
        return super().handles | {"num_experts", "num_local_experts"}

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read(values)
        given = {name: values.pop(name) for name in ("num_experts", "num_local_experts") if name in values}
        if len({*given.values()}) > 1:
            raise ValueError(f"num_experts and num_local_experts differ: {given}; give either")
        return values | dict.fromkeys([self.experts] if given else [], next(iter(given.values()), None))


_ROPE = llama.ROPE.names
_FIELDS = {
    "num_experts_per_tok": "experts_per_token",
    "router_aux_loss_coef": "router_aux_loss_coef",
    "output_router_logits": "output_router_logits",
}
_NORMALIZED = {"norm_topk_prob": "normalize_experts"}
_QWEN = {
    "use_sliding_window": "use_sliding_window",
    "sliding_window": "sliding_window",
    "moe_intermediate_size": "expert_intermediate_size",
    "decoder_sparse_step": "sparse_step",
    "mlp_only_layers": "dense_layers",
    **_NORMALIZED,
}


def _arch(
    model_type: str,
    name: str,
    fields: Mapping[str, str],
    rules: tuple[Rule, ...] = _of_files("mlp", "gate_proj", "up_proj", "down_proj"),
    shared: tuple[Rule, ...] = (),
    experts: str = "num_experts",
    required: Mapping[str, tuple[Any, ...]] | None = None,
    ignored: frozenset[str] = frozenset(),
    tasks: tuple[str, ...] | None = None,
    qa_prefix: str = "model.",
    in_model: tuple[Rule, ...] = _IN_MODEL,
) -> ArchMap:
    """The rules of a family. rules, in_model, shared: of its mixtures; experts: the name of their number in its
    config."""
    found = llama.tasks(name, qa_prefix)
    return ArchMap(
        model_type=model_type,
        prefix="model.",
        body=(*llama.BODY, *rules, *shared),
        parts=llama.PARTS,
        tasks=with_embedding({task: entry for task, entry in found.items() if tasks is None or task in tasks}),
        config=ConfigMap(
            {**llama.FIELDS, experts: "num_experts", **_FIELDS, **fields},
            required={**llama.REQUIRED, **(required or {})},
            ignored=llama.IGNORED | ignored,
            translation=MixtureFields(_ROPE, experts),
        ),
        of_some_layers=(r"mlp\..*",) if "mlp_only_layers" in fields else (),
        body_in_model=(*llama.BODY, *in_model, *shared),
    )


MIXTRAL = _arch(
    "mixtral",
    "Mixtral",
    llama.HEAD_DIM | {"sliding_window": "sliding_window"},
    _of_files("block_sparse_moe", "w1", "w3", "w2"),
    experts="num_local_experts",
    required={"router_jitter_noise": (0, None)},
)
OLMOE = _arch(
    "olmoe",
    "Olmoe",
    llama.HEAD_DIM | {"attention_bias": "attention_bias"} | _NORMALIZED,
    required={"clip_qkv": (None,)},
    tasks=("base", "causal-lm"),
)
_GRANITE = "block_sparse_moe"
GRANITEMOE = _arch(
    "granitemoe",
    "GraniteMoe",
    llama.HEAD_DIM | {"attention_bias": "attention_bias"} | granite.FACTORS,
    _joined(f"{_GRANITE}.router.layer.weight", f"{_GRANITE}.input_linear.weight", f"{_GRANITE}.output_linear.weight"),
    experts="num_local_experts",
    tasks=("base", "causal-lm"),
    in_model=_joined(f"{_GRANITE}.router.weight", f"{_GRANITE}.experts.gate_up_proj", f"{_GRANITE}.experts.down_proj"),
)
QWEN2_MOE = _arch(
    "qwen2_moe",
    "Qwen2Moe",
    llama.HEAD_DIM
    | _QWEN
    | {
        "shared_expert_intermediate_size": "shared_intermediate_size",
        "qkv_bias": "qkv_bias",
        "max_window_layers": "max_window_layers",
        "layer_types": "layer_types",
    },
    shared=_SHARED,
)
QWEN3_MOE = _arch(
    "qwen3_moe",
    "Qwen3Moe",
    llama.HEAD_DIM | _QWEN | {"attention_bias": "attention_bias"},
    ignored=frozenset({"max_window_layers"}),
    qa_prefix="transformer.",
)

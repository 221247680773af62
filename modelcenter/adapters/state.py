"""The record of an adapter on a model: which parameters belong to it, and the state of the model before."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.checkpoint import all_tensors
from engine.names import clean_name
from engine.shards import is_sharded
from modelcenter.adapters.peft_format import ADAPTER_NAME
from modelcenter.convert.layout import Layout, compile_layout
from modelcenter.convert.rules import ArchMap
from modelcenter.models.base import Model
from modelcenter.registry import get

# Parts of the names of an adapter's parameters; no architecture has a module with these names.
UPDATE, PROMPT = (".lora_A.", ".lora_B.", ".lora_magnitude_vector."), "tuned_prompt."

InitSpec = Mapping[str, tuple[Any, ...]]


@dataclass
class AdapterState:
    """The adapter of a model, as `model.adapter`.

    Attributes:
        kind: "lora" or "prompt".
        layout: of the base model's parameters.
        base: the checkpoint with these parameters; None: there is none. revision: its commit on the Hub; None: it is a
            directory.
        trained: parameters of the base model that are fully trained and saved.
        required: requires_grad of every parameter before the adapter was added.
        ranks, scales: {linear layer: rank, factor of its update}.
        dropout, dora, rslora: as in peft's config.
        quantized: the 4-bit format of the weights under the updates; None: they are not quantised.
        merged: the weights include the update, and the adapter adds nothing.
        hooks: the hooks that it registered on the modules of the model, each with `remove()`.
        initial: the values of a saved adapter for the model (load.AdapterValues), until `start` writes them.
    """

    kind: str
    layout: Layout
    base: str | None
    revision: str | None
    trained: list[str]
    required: dict[str, bool]
    ranks: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    quantized: str | None = None
    merged: bool = False
    hooks: list[Any] = field(default_factory=list)
    initial: Any = None


def is_adapter(name: str) -> bool:
    """Whether a parameter (by clean name) belongs to an adapter rather than to the base model."""
    return name.startswith(PROMPT) or any(part in name for part in UPDATE)


def adapter_parameters(model: nn.Module) -> list[str]:
    """Clean names of an adapter's parameters."""
    return [name for name in (clean_name(n) for n, _ in model.named_parameters()) if is_adapter(name)]


def base_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters without an adapter's; full shapes, however the model is sharded."""
    return {name: tuple(t.shape) for name, t in all_tensors(model).items() if not is_adapter(name)}


def layout_of(model: Model) -> tuple[ArchMap, Layout]:
    """The conversion rules of a model, and the layout that they give its parameters in transformers' model."""
    arch: ArchMap = get(model.config.model_type).arch_map().of_model()
    if model.adapter is not None:
        return arch, model.adapter.layout
    return arch, compile_layout(arch, model.task, model.config, base_shapes(model))


def embedding_width(model: Model) -> int:
    """The width of the token embeddings that the model looks up; in an encoder-decoder, the encoder's."""
    c: Any = model.config
    return getattr(c, "embedding_size", None) or c.hidden_size


def check_free(model: Model, what: str) -> None:
    """Raise ValueError if an adapter can no longer be added to the model."""
    if model.adapter is not None:
        remedy = "merge it first" if model.adapter.kind == "lora" else "it allows no other; load the model without it"
        raise ValueError(f"{what}: the model has an adapter already ({model.adapter.kind}); {remedy}")
    if is_sharded(model) or model.pipeline is not None:
        raise ValueError(
            f"{what}: the model is sharded already, and an adapter must be added before: pass it to from_pretrained "
            "as adapter=, or load with policy=False, add it and call engine.shard"
        )


def make_state(model: Model, kind: str, layout: Layout, trained: list[str], **more: Any) -> AdapterState:
    """The record of an adapter that is about to be added to a model; `more`: its other fields."""
    required = {clean_name(name): p.requires_grad for name, p in model.named_parameters()}
    base, revision = (None, None) if model.holds_merged else (_base_name(model), model.base_revision)
    return AdapterState(kind, layout, base, revision, trained, required, **more)


def _base_name(model: Model) -> str | None:
    """The base that transformers must load for the adapter: a Hub id or a directory."""
    report = getattr(model, "load_report", None)
    if report is None:
        return model.base_name
    return report.repo or (str(report.directory) if report.directory is not None else report.source)


def install(model: Model, state: AdapterState, init_spec: InitSpec) -> None:
    """Record an adapter on the model, and extend the model's init_spec and tp_plan by the adapter's.

    Args:
        init_spec: of the model without the adapter.
    """
    model.adapter = state
    instance: Any = model  # methods set on the instance override those of its class
    instance.init_spec = functools.partial(_init_spec, init_spec, model)
    if state.ranks:
        instance.tp_plan = functools.partial(_tp_plan, type(model).tp_plan.__get__(model), model, set(state.ranks))


def uninstall(model: Model) -> None:
    """Undo `install`, and restore which parameters are trainable."""
    required = model.adapter.required
    for hook in model.adapter.hooks:
        hook.remove()
    model.adapter = None
    for method in ("init_spec", "tp_plan"):
        model.__dict__.pop(method, None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(required.get(clean_name(name), True))


def _init_spec(base_spec: InitSpec, model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The initial values of a model with an adapter.

    A as in torch's linear layers, B at 0, a prompt as in Lester et al. 2021 (arXiv:2104.08691).
    """
    spec = dict(base_spec)
    for raw, parameter in model.named_parameters():
        name = clean_name(raw)
        if ".lora_A." in name:
            spec[name] = ("uniform", 1 / math.sqrt(parameter.shape[1]))
        elif ".lora_B." in name:
            spec[name] = ("zeros",)
        elif ".lora_magnitude_vector." in name:
            spec[name] = ("ones",)
        elif name.startswith(PROMPT):
            spec[name] = ("uniform", 0.5)
    return spec


def _tp_plan(base_plan: Callable[[], dict[str, str]], model: nn.Module, adapted: Collection[str]) -> dict[str, str]:
    """The tensor-parallel plan of a model whose layers `adapted` have low-rank updates.

    A layer that splits its outputs splits those of B; one that splits its inputs splits those of A.
    """
    linears = [clean_name(n.removesuffix(".base_layer")) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    plan: dict[str, str] = {}
    for pattern, style in base_plan().items():
        match = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        names = [name for name in linears if match(name)]
        if not any(name in adapted for name in names):
            plan[pattern] = style
            continue
        for name in names:
            if name not in adapted:
                plan[name] = style
                continue
            plan[f"{name}.base_layer"] = style
            plan[f"{name}.lora_{'A' if style == 'rowwise' else 'B'}.{ADAPTER_NAME}"] = style
    return plan


def materialize_adapter(model: nn.Module) -> None:
    """Allocate an adapter that was built on meta, in a plain model that is already allocated."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)

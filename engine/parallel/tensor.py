"""Tensor parallelism: each rank of a group holds a part of each layer and computes with plain tensors.

Parameters are DTensors on the ``tp`` dimension of the mesh, which FSDP shards further; layers (``tensor_layers``) take
their local tensor and call the few collectives themselves (Shoeybi et al. 2019, arXiv:1909.08053), so nothing is
dispatched through DTensor in forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from engine import runtime
from engine.names import clean_name
from engine.ops import Experts
from engine.parallel.tensor_layers import LAYERS, Rowwise, SplitLayer, TensorParallelGroup, partial_class, split_class
from engine.tensors import as_shard, local_box, part_of

# transformers' names for these styles.
_ALIASES = {
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "partial",
}
STYLES = {
    "colwise": "nn.Linear whose outputs are split over the ranks; takes whole inputs",
    "colwise_gather": "the same, with the outputs gathered",
    "rowwise": "nn.Linear whose inputs are split over the ranks; gives whole outputs",
    "vocab": "nn.Embedding, or a parameter (vocabulary, ...), whose rows are split over the ranks",
    "experts": "engine.ops.Experts, each of which is split over the ranks by its intermediate channels",
    "norm": "a root-mean-square norm (weight, eps) over channels that are split over the ranks",
    "partial": "any module that each rank applies to its own part of the activations",
}
_HEAD_COUNTS = ("num_heads", "num_kv_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head")


def find_plan(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """The plan that is given, else ``model.tp_plan()`` or ``transformers``' ``_tp_plan``, with styles in our names.

    Raises ValueError if there is none, or a style is unknown.
    """
    if plan is None:
        own = getattr(model, "tp_plan", None)
        plan = own() if callable(own) else own or getattr(model, "_tp_plan", None) or None
    self_split = _self_split(model)
    if plan is None and all(id(p) in self_split for p in model.parameters()):
        plan = {}
    if plan is None or not (plan or self_split):
        if self_split:
            raise ValueError(
                f"{type(model).__name__} has layers that tp_size splits and others that it does not: give it a "
                "tp_plan() that returns {name of a module that sees this rank's rows only, such as a norm: 'partial'}, "
                "or {} if all of them see the same on every rank"
            )
        raise ValueError(
            f"tp_size is {runtime.current().tp_size} but {type(model).__name__} does not define how it is split: give "
            "it a tp_plan(), or pass engine.shard(model, tp_plan={'layers.*.up': 'colwise', 'layers.*.down': "
            "'rowwise'})"
        )
    found = {pattern: _ALIASES.get(style, style) for pattern, style in plan.items()}
    for pattern, style in found.items():
        if style not in STYLES:
            known = "; ".join(f"{name}: {what}" for name, what in STYLES.items())
            raise ValueError(f"tp_plan has the style {style!r} for {pattern}, expected one of: {known}")
    return found


def _self_split(model: nn.Module) -> set[int]:
    """Ids of the parameters of layers that declare how they are split (``tp_split``, BMTrain's layers)."""
    layers = [module for module in model.modules() if hasattr(module, "tp_split")]
    return {id(p) for module in layers for p in module.parameters(recurse=False)}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    sequence_units: Any = None,
    absent: Collection[str] = (),
) -> None:
    """Split ``model`` over the ranks of ``mesh``, one-dimensional, in place. On meta too.

    Every rank starts from the same parameters and keeps its part; the rest of the model stays as it is.

    Args:
        plan: {name of modules or parameters: style}, with * for one component of a name; see ``STYLES``. None: the
            model's own (``find_plan``).
        sequence_units: units in which activations between split layers are split by rows over the same ranks
            (sequence parallelism), so that parameters outside of split layers get gradients from some of the rows only.
        absent: names of modules and parameters that are on other stages of a pipeline.

    Raises:
        ValueError: there is no plan, a style is unknown or does not fit its module, a name matches nothing, or the
            number of ranks does not divide a number of heads.
    """
    given = plan is not None or callable(getattr(model, "tp_plan", None))
    styles = _assign(model, find_plan(model, plan), given, absent)
    _check_heads(model, styles, mesh.size())
    group = TensorParallelGroup(mesh, sequence=sequence_units is not None)
    placed: _Placed = {}
    split: set[nn.Module] = set()
    for name, (style, module, own_name) in styles.items():
        if style == "partial":
            _mark_partial(module, mesh, placed)
            continue
        if own_name is not None:
            _place(module, own_name, mesh, Shard(0), placed)
            continue
        _split_layer(name, module, style, group, placed)
        split.add(module)
    split |= _place_as_declared(model, mesh, placed)
    for unit in sequence_units or ():
        for module in unit.modules():
            if module not in split and next(module.parameters(recurse=False), None) is not None:
                _mark_partial(module, mesh, placed)
            elif isinstance(module, Rowwise) and module.bias is not None:
                _place(module, "bias", mesh, Replicate(), placed)
    for module in model.modules():  # places that only share a parameter
        for own, parameter in module._parameters.items():
            if id(parameter) in placed:
                module._parameters[own] = placed[id(parameter)][1]


def _place_as_declared(model: nn.Module, mesh: DeviceMesh, placed: _Placed) -> set[nn.Module]:
    """Split the parameters of layers that declare how (``tp_split``, BMTrain's layers); returns these layers."""
    layers = [module for module in model.modules() if hasattr(module, "tp_split")]
    for layer in layers:
        for own, dim in layer.tp_split.items():  # type: ignore[union-attr, operator]
            if layer._parameters[own] is not None:
                _place(layer, own, mesh, Replicate() if dim is None else Shard(dim), placed)
    return set(layers)


def _split_layer(name: str, module: nn.Module, style: str, group: TensorParallelGroup, placed: _Placed) -> None:
    """Keep this rank's part of a linear layer, an embedding or experts, and give it the class that computes with it."""
    kind, layer = LAYERS[style]
    if not isinstance(module, kind):
        raise ValueError(
            f"tp_plan gives {name} the style {style!r}, which is for {kind.__name__}, but it is a "
            f"{type(module).__name__}"
        )
    if isinstance(module, Experts):
        for own in dict(module.named_parameters(recurse=False)):
            _place(module, own, group.mesh, Shard(2 if own == "down" else 1), placed)
        _compute_with_part(module, layer, group)
        return
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise ValueError(f"embedding {name} has max_norm or scale_grad_by_freq, which style 'vocab' does not support")
    assert isinstance(module.weight, Tensor)
    if style == "norm":
        _check_norm(name, module)
        module._width = module.weight.shape[0]  # type: ignore[assignment]
    placement = Shard(1) if style == "rowwise" else Shard(0)
    first = local_box(module.weight.shape, group.mesh, [placement])[1][0]
    _place(module, "weight", group.mesh, placement, placed)
    if style in ("colwise", "colwise_gather") and module.bias is not None:
        _place(module, "bias", group.mesh, Shard(0), placed)
    _compute_with_part(module, layer, group)
    module._first = first  # type: ignore[assignment]


def _compute_with_part(module: nn.Module, layer: type[SplitLayer], group: TensorParallelGroup) -> None:
    """Give a module the class that computes with its part."""
    module.__class__ = split_class(layer, type(module))
    module.tp_group = group  # type: ignore[assignment]


def _check_norm(name: str, module: nn.Module) -> None:
    """Raise ValueError unless a module has the parameters of a root-mean-square norm, and no others."""
    own = {key: tuple(p.shape) for key, p in module.named_parameters()}
    if list(own) != ["weight"] or len(own["weight"]) != 1 or not hasattr(module, "eps"):
        raise ValueError(
            f"tp_plan gives {name} the style 'norm', which is for a root-mean-square norm with a weight (channels,) "
            f"and eps, but it is a {type(module).__name__} with {own or 'no parameters'}"
        )


_Placed = dict[int, tuple[nn.Parameter, nn.Parameter]]  # id of a parameter: it, what took its place
_Target = tuple[str, nn.Module, str | None]  # style, module, name of one parameter of it


def _assign(model: nn.Module, plan: Mapping[str, str], strict: bool, absent: Collection[str]) -> dict[str, _Target]:
    """{name: what to do}; a parameter that two modules share is split in both."""
    modules = {clean_name(n): module for n, module in model.named_modules() if n not in absent}
    found: dict[str, _Target] = {}
    for pattern, style in plan.items():
        match = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        names = [name for name in modules if name and match(name)]
        found |= {name: (style, modules[name], None) for name in names}
        for prefix, module in modules.items():
            for own, parameter in module._parameters.items():
                full = f"{prefix}.{own}" if prefix else own
                if parameter is not None and match(full):
                    if style != "vocab":
                        raise ValueError(f"tp_plan gives parameter {full} the style {style!r}, expected 'vocab'")
                    names.append(full)
                    found[full] = (style, module, own)
        if strict and not names and not any(match(name) for name in absent):
            raise ValueError(f"tp_plan names {pattern!r}, but no module or parameter of {type(model).__name__} matches")
    tables = {
        id(module.weight)
        for style, module, own in found.values()
        if own is None and style in ("vocab", "colwise", "colwise_gather") and isinstance(module.weight, nn.Parameter)
    }
    for name, module in modules.items():
        if id(module._parameters.get("weight")) in tables and name not in found:
            style = "vocab" if isinstance(module, nn.Embedding) else "colwise_gather"
            found[name] = (style, module, None)
    return found


def _check_heads(model: nn.Module, styles: Mapping[str, _Target], size: int) -> None:
    for name, (style, _, own_name) in styles.items():
        if style != "colwise" or own_name is not None:
            continue
        owner = _owner(model, name)
        parent = model.get_submodule(owner)
        for place in (parent, getattr(parent, "config", None)):
            if place is not parent and "attention" not in type(parent).__name__.lower():
                continue
            for count in _HEAD_COUNTS:
                heads = getattr(place, count, None)
                if isinstance(heads, int) and heads % size:
                    raise ValueError(
                        f"{owner or type(model).__name__} has {count}={heads}, which tp_size={size} does not divide: "
                        f"each rank computes whole heads. Use a tp_size that divides {heads}"
                    )


def _owner(model: nn.Module, name: str) -> str:
    """The name of the module that computes with the layer ``name``: around a low-rank update, not inside it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if "base_layer" in model.get_submodule(".".join(parts[:depth]))._modules:
            return ".".join(parts[: depth - 1])
    return ".".join(parts[:-1])


@torch.no_grad()
def _place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, placed: _Placed) -> None:
    """Replace a parameter by its part on this rank."""
    parameter = module._parameters[name]
    assert parameter is not None
    done: Any = parameter
    if isinstance(parameter, DTensor):  # shared with a module that was here before
        pass
    elif id(parameter) in placed:
        done = placed[id(parameter)][1]
    else:
        part = part_of(parameter.detach(), mesh, [placement])
        if not part.is_meta:
            part = part.to(runtime.device())
        done = nn.Parameter(as_shard(part, parameter.shape, mesh, [placement]), requires_grad=parameter.requires_grad)
        placed[id(parameter)] = parameter, done
    if tuple(done.placements) != (placement,):
        raise ValueError(f"a parameter shared by several modules is split as {done.placements} and as {placement}")
    module._parameters[name] = done


def _mark_partial(module: nn.Module, mesh: DeviceMesh, placed: _Placed) -> None:
    """Give a module whole parameters whose gradients are summed over the ranks."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    for name in names:
        _place(module, name, mesh, Replicate(), placed)
    module.__class__ = partial_class(type(module), names)

"""The norm of gradients that are placed on one mesh or several, and clipping by it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine import runtime
from engine.notes import NORM_LAYOUT, STAGE_ROLE
from engine.ops import fused, library
from engine.optim.checks import check_not_gathered
from engine.optim.states import placed_alike, placed_gradient, scalar_on, sparse_gradient
from engine.parallel.mesh import device_mesh, once_per_world
from engine.tensors import cut_dims, gradients_of, is_shard, local_tensor, local_tensors

_EPS = 1e-6
_dtype, _tensor_layout, _device = map(operator.attrgetter, ("dtype", "layout", "device"))
_layout_of = operator.attrgetter(NORM_LAYOUT.name)
# The mesh dimensions over which the ranks hold different parts, and the role of this stage of a pipeline.
_Layout = tuple[tuple[DeviceMesh | None, tuple[int, ...]], str | None]


@torch.no_grad()
def grad_norm(params: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as one vector: 0-d, fp32, equal on all ranks that share the parameters. Collective.

    Each distinct set of ranks over which parameters are sharded costs one all-reduce of one number, and so do the
    stages of a pipeline. Replicas of a parameter are counted once. Does not wait for the device.

    Args:
        params: parameters; those without a gradient are ignored.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.

    Raises ValueError for the gathered parameters that a model shows after a forward: their shards have the gradients.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type is {norm_type!r}, expected a number above 0")
    # A pipeline stage without any of the parameters still takes part in the reduction over the stages, on its device.
    home = params[0].device if params else runtime.device()
    largest, squares = p == float("inf"), p == 2.0
    total, of_stage = torch.zeros(2, dtype=torch.float64 if squares else torch.float32, device=home).unbind()
    for ((mesh, dims), role), gradients in _by_layout(params):
        if role == "copy":  # counted on the stage that owns the parameter
            continue
        if set(map(_tensor_layout, gradients)) - {torch.strided}:
            raise sparse_gradient(next(g.shape for g in gradients if g.layout is not torch.strided))
        part = _local_part(gradients, p, gradients[0].device if gradients else home)
        for dim in dims:
            assert mesh is not None
            part = _reduced(part, largest, mesh.get_group(dim))
        part = part.to(home)
        if role == "own":
            of_stage = torch.maximum(of_stage, part) if largest else of_stage + part
        else:
            total = torch.maximum(total, part) if largest else total + part
    if runtime.stages() > 1:  # whether or not this stage has any of the parameters
        of_stage = _reduced(of_stage.clone(), largest, device_mesh()["pp"].get_group())
        total = torch.maximum(total, of_stage) if largest else total + of_stage
    if squares:
        return total.sqrt().float()
    return total if largest else total.pow(1.0 / p)


def _by_layout(params: list[torch.Tensor]) -> list[tuple[_Layout, list[torch.Tensor]]]:
    """The local gradients, grouped by the layout of their parameters.

    The groups come from the parameters and not from the gradients, so that all ranks make the same collectives.
    """
    layouts = _layouts(params)
    distinct = list(dict(zip(map(id, layouts), layouts, strict=True)).values())
    if len(distinct) == 1:
        return [(distinct[0], _local_gradients(params))]
    return [
        (layout, _local_gradients([p for p, own in zip(params, layouts, strict=True) if own is layout]))
        for layout in distinct
    ]


def _reduced(part: torch.Tensor, largest: bool, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, in place, or the maximum, where NaN counts as infinity, since collectives may drop it."""
    if largest:
        part = torch.where(part.isnan(), torch.inf, part)
    dist.all_reduce(part, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return part


def _local_part(gradients: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The contribution of these gradients, on one device or several, to the norm: 0-d, on ``device``."""
    if len(devices := dict.fromkeys(map(_device, gradients))) > 1:
        each = [_local_part([g for g in gradients if g.device == there], p, there).to(device) for there in devices]
        return torch.stack(each).max() if p == float("inf") else torch.stack(each).sum()
    part = torch.zeros((), dtype=torch.float64 if p == 2.0 else torch.float32, device=device)
    if gradients and p == 2.0 and _fit(gradients):
        fused.grad_norm_sq(gradients, part)
    elif gradients := [g.abs() if g.is_complex() else g for g in gradients if g.numel()]:
        dtype = torch.float64 if torch.float64 in map(_dtype, gradients) else torch.float32
        norms = torch.stack(torch._foreach_norm(gradients, p, dtype=dtype)).to(part.dtype)
        part = norms.max() if p == float("inf") else norms.pow(p).sum()
    return part


def _layouts(params: list[torch.Tensor]) -> list[_Layout]:
    try:
        return list(map(_layout_of, params))
    except AttributeError:  # noted once on each parameter: with many small ones, finding it costs as much as the norm
        check_not_gathered(params)
        for parameter in params:
            NORM_LAYOUT.set(parameter, _shared_layout(_sharded_over(parameter), STAGE_ROLE.get(parameter)))
        return list(map(_layout_of, params))


def _local_gradients(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """The local gradients of those that have one; partial gradients are summed first."""
    gradients = gradients_of(params)
    if type(None) in map(type, gradients):
        params = [p for p, g in zip(params, gradients, strict=True) if g is not None]
        gradients = gradients_of(params)
    if not placed_alike(params, gradients):
        gradients = list(map(placed_gradient, params))
    return local_tensors(gradients)


@once_per_world
def _shared_layout(over: tuple[DeviceMesh | None, tuple[int, ...]], role: str | None) -> _Layout:
    """One object for all parameters with the same layout, so that layouts can be compared by identity."""
    return over, role


def _fit(gradients: list[torch.Tensor]) -> bool:
    if not library.serves(gradients[0].device) or not set(map(_dtype, gradients)) <= set(library.FLOATS):
        return False
    return all(map(torch.Tensor.is_contiguous, gradients))


def clip_coefficient(norm: torch.Tensor, max_norm: float, eps: float = _EPS) -> torch.Tensor:
    """The factor by which gradients of this norm are clipped: at most 1; 0-d, on the device.

    Raises ValueError for a ``max_norm`` or an ``eps`` below 0, which would reverse the gradients.
    """
    if not isinstance(max_norm, Real) or not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}, expected a number of at least 0; for no limit, do not clip")
    if not isinstance(eps, Real) or not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps!r}, expected a number of at least 0, which is added to the norm")
    return torch.clamp(max_norm / (norm + eps), max=1.0)


@torch.no_grad()
def clip_grad_norm_(
    params: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, eps: float = _EPS
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; returns the norm before that.

    ``torch.nn.utils.clip_grad_norm_`` for plain and sharded parameters, also of several meshes. See ``grad_norm``.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    norm = grad_norm(params, norm_type)
    scale_gradients_(params, clip_coefficient(norm, max_norm, eps))
    return norm


@torch.no_grad()
def scale_gradients_(params: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients by ``factor`` (0-d, may be on the device)."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in params:
        if parameter.grad is not None:
            by_device.setdefault(parameter.device, []).append(local_tensor(parameter.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, scalar_on(device, factor))


def _sharded_over(parameter: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh dimensions over which the ranks hold different parts."""
    if not is_shard(parameter):
        return None, ()
    dims = tuple(cut_dims(parameter))
    return parameter.device_mesh if dims else None, dims

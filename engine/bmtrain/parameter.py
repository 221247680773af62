"""``DistributedParameter`` and ``DistributedModule``: sharded parameters with BMTrain's API."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from engine import runtime
from engine.optim.checks import mark_awaiting_sharding

# Attributes that a parameter keeps when it is replaced by its shard.
_DECLARED = ("_is_distributed_parameter", "init_method", "group")


class _ParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        # Sharding replaces the parameter by one of torch's class, which must still count as what the user declared.
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_distributed_parameter", False)


class DistributedParameter(nn.Parameter, metaclass=_ParameterMeta):
    """A parameter that ``init_parameters``, ``load`` and ``BMTrainModelWrapper`` shard.

    Before that it is a whole parameter on this rank's device. On meta it takes no memory until it is sharded.

    Args:
        data: its values. With an ``init_method``, ``init_parameters`` replaces them.
        requires_grad: whether it is trained.
        init_method: fills a tensor of the whole shape in place, such as ``torch.nn.init.zeros_`` or a
            ``ParameterInitializer``.
        group: the name of its group in ``grouped_parameters``.

    Attributes:
        init_method, group: as given; kept when the parameter is sharded.
    """

    init_method: Callable[[torch.Tensor], object] | None
    group: str | None
    _is_distributed_parameter: bool

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method: Callable[[torch.Tensor], object] | None = None,
        group: str | None = None,
    ) -> DistributedParameter:
        data = data.detach()
        home = runtime.current().device
        if home is not None and not data.is_meta:
            data = data.to(home)
        parameter = super().__new__(cls, data, requires_grad)
        parameter._is_distributed_parameter = True
        parameter.init_method, parameter.group = init_method, group
        if runtime.world_size() > 1:
            mark_awaiting_sharding(parameter)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedParameter:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.detach().clone(), self.requires_grad, self.init_method, self.group)
        return memo[id(self)]


class ParameterInitializer:
    """``ParameterInitializer(fn, *args, **kwargs)(tensor)`` is ``fn(tensor, *args, **kwargs)``."""

    def __init__(self, func: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.func, self._args, self._kwargs = func, args, kwargs

    def __call__(self, param: torch.Tensor) -> None:
        self.func(param, *self._args, **self._kwargs)


def declared_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name: {attribute: value}} of the DistributedParameters, as declared."""
    return {
        name: {mark: getattr(p, mark) for mark in _DECLARED}
        for name, p in model.named_parameters()
        if isinstance(p, DistributedParameter)
    }


def set_declared_attributes(model: nn.Module, marks: Mapping[str, Mapping[str, Any]]) -> None:
    """Set ``declared_attributes`` again after parameters were replaced."""
    for name, parameter in model.named_parameters():
        for mark, value in marks.get(name, {}).items():
            setattr(parameter, mark, value)


_quiet = threading.local()  # gather nothing while a module is printed, perhaps on one rank only


class DistributedModule(nn.Module):
    """A module whose parameters are whole wherever its code reads them.

    In ``forward`` of a sharded model they are whole anyway. Elsewhere (in a method other than forward, or with a parent
    that is not sharded) ``module.weight`` gathers the parameter, which is collective, and its gradient is averaged over
    the ranks like any other. As in BMTrain, parameters inside a ``Block`` are not gathered: there ``module.weight`` is
    the shard itself, as ``module._parameters["weight"]`` always is.
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if (
            isinstance(value, DTensor)
            and isinstance(value, nn.Parameter)
            and not getattr(value, "_in_block", False)
            and not getattr(_quiet, "on", False)
            # FSDP, too, reads its shards by attribute.
            and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed.")
        ):
            return gather(value)
        return value

    def __repr__(self) -> str:
        before, _quiet.on = getattr(_quiet, "on", False), True
        try:
            return super().__repr__()
        finally:
            _quiet.on = before


def gather(parameter: DTensor) -> torch.Tensor:
    """Gather a sharded parameter. Collective. Its gradient is averaged over ranks, as in a sharded forward."""
    return _Gather.apply(parameter)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.parameter = parameter
        ctx.mesh, ctx.placements, ctx.dtype = parameter.device_mesh, parameter.placements, parameter.dtype
        return parameter.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        from engine.parallel.fsdp import note_gradient  # not at the top: plain models need no FSDP

        note_gradient(ctx.parameter)
        # Ranks of a tensor-parallel group have the same gradient of the whole; other ranks that of their own batch.
        names = ctx.mesh.mesh_dim_names or ("",) * ctx.mesh.ndim
        addends: list[Placement] = [Replicate() if name == "tp" else Partial() for name in names]
        ranks = 1
        for dim, placement in enumerate(addends):
            ranks *= ctx.mesh.size(dim) if placement.is_partial() else 1
        part = DTensor.from_local(grad.float() / ranks, ctx.mesh, addends, run_check=False)
        return part.redistribute(placements=ctx.placements).to(ctx.dtype)

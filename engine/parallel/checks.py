"""What ``engine.shard`` rejects: cases that FSDP gets silently wrong, or reports in terms that users do not know."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from engine import runtime
from engine.collectives import gather_objects
from engine.names import clean_name
from engine.shards import is_sharded

_ON_SHARDS = (
    "call register_post_accumulate_grad_hook on the parameters after engine.shard; such hooks get this rank's shard "
    "and its averaged gradient"
)


def check_model(model: nn.Module, methods: Iterable[str]) -> None:
    """Raise ValueError if a model cannot be sharded as it is, or lacks one of these methods."""
    for name, module in model.named_modules():
        if is_sharded(module):
            raise ValueError(
                f"module {name} is already sharded but the model around it is not: shard the whole model at once"
            )
        if any(isinstance(p, UninitializedParameter) for p in module._parameters.values()):
            raise ValueError(
                f"module {name or type(module).__name__} has parameters whose shapes are not known yet: run one batch "
                "through the model before engine.shard"
            )
    for method in methods:
        if not callable(getattr(model, method, None)):
            raise ValueError(f"forward_methods names {method!r}, which {type(model).__name__} does not have")


def check_shards(model: nn.Module) -> None:
    """Raise ValueError for gradient hooks and sparse gradients, which shards cannot have."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {clean_name(name)} has a hook on its gradient, which its shard would not have: {_ON_SHARDS}"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(
                f"embedding {name} has sparse gradients, which cannot be sharded: build it with sparse=False"
            )


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError if a shard was given a hook that nothing will call."""
    from engine.parallel.gloo.collectives import is_own_hook  # imports FSDP, which a single process does not need

    for name, parameter in model.named_parameters():
        # An enclosing model that was sharded later, and called first, has its own hooks there.
        if not all(map(is_own_hook, (parameter._backward_hooks or {}).values())):
            raise ValueError(
                f"register_hook of parameter {clean_name(name)} would never be called, because FSDP sets the gradients "
                f"of shards itself: {_ON_SHARDS}"
            )


def check_ranks(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError, on all ranks, if a rank's tensors differ from rank 0's in name, shape or dtype. Collective.

    Otherwise the ranks would wait for each other forever, or take one parameter's bytes for another's.
    """
    mine = [(clean_name(name), tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
    digest = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "little")
    bounds = torch.tensor([digest, -digest], device=runtime.message_device())
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if bounds.sum() == 0:
        return
    every: list[list[tuple[str, tuple[int, ...], str, bool]]] = gather_objects(mine)
    rank = next(rank for rank, found in enumerate(every) if found != every[0])
    pairs = zip([*every[rank], None], [*every[0], None], strict=False)
    theirs, first = next((found, wanted) for found, wanted in pairs if found != wanted)
    raise ValueError(
        f"rank {rank} built another model than rank 0: it has {_described(theirs)} where rank 0 has "
        f"{_described(first)}. Build it from the same configuration (labels, vocabulary) on every rank"
    )


def _described(parameter: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if parameter is None:
        return "no more parameters"
    name, shape, dtype, trained = parameter
    return f"{name} of shape {shape}, {dtype}{'' if trained else ', frozen'}"


def check_units(units: Mapping[nn.Module, list[tuple[str, nn.Parameter]]]) -> None:
    """Raise ValueError if FSDP cannot gather the parameters of a unit together.

    Args:
        units: each unit's own parameters, as (name, parameter) pairs.
    """
    settings = runtime.current()
    for members in units.values():
        number = next((name for name, p in members if p.ndim == 0), None)
        if number is not None and settings.tp_size * settings.pp_size > 1:
            raise ValueError(
                f"parameter {clean_name(number)} has no dimensions, which is not supported with "
                f"tp_size={settings.tp_size} and pp_size={settings.pp_size}: give it the shape (1,)"
            )
        by_dtype = {p.dtype: name for name, p in members if p.requires_grad and p.ndim}
        if len(by_dtype) > 1:
            text = " and ".join(f"{clean_name(name)} is {dtype}" for dtype, name in by_dtype.items())
            remedy = "Policy(precision='bf16'), which keeps all trainable ones in fp32"
            if any(dtype.is_complex for dtype in by_dtype):
                remedy = "name the modules of the complex ones with units="
            raise ValueError(
                f"trainable parameters of one unit have several dtypes: {text}. Use one dtype, or {remedy}"
            )
    check_no_generator(units)


def check_no_generator(units: Iterable[nn.Module]) -> None:
    """Raise ValueError if the forward of a unit is a generator, which would run after its parameters are freed."""
    for unit in units:
        if inspect.isgeneratorfunction(type(unit).forward):
            raise ValueError(
                f"forward of unit {type(unit).__name__} yields, but its parameters are gathered only until it returns: "
                "return a list, or name other units with units="
            )


def check_not_nested(units: Collection[nn.Module]) -> None:
    """Raise ValueError if a unit is inside another, whose "selective" recomputation would record its gathering."""
    for outer in units:
        if inner := next((m for m in outer.modules() if m in units and m is not outer), None):
            raise ValueError(
                f"recompute is 'selective' but unit {type(inner).__name__} is inside unit {type(outer).__name__}: name "
                "only one of them with units=, or use 'full'"
            )

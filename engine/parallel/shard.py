"""``engine.shard``: FSDP2 on any module, at the four ZeRO levels, with the traps of foreign modules taken care of.

What it does on several ranks is in ``engine.parallel.over_ranks``, which is imported only then: FSDP and DTensor take
more than a second to import.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine import runtime
from engine.mixed_precision import casting
from engine.notes import note_parameters, set_sharding, stages_of
from engine.optim.checks import watch_optimizers
from engine.parallel.checks import (
    check_model,
    check_no_generator,
    check_not_nested,
    check_ranks,
    check_shards,
    check_units,
)
from engine.parallel.units import Units, unit_parameters, units_of
from engine.policy import Policy
from engine.recompute import wrap_units_
from engine.shards import is_sharded


def shard(
    model: nn.Module,
    units: Sequence[nn.Module] | None = None,
    policy: Policy | None = None,
    forward_methods: Iterable[str] = (),
    tp_plan: Mapping[str, str] | None = None,
) -> nn.Module:
    """Shard ``model`` over the ranks, in place, and return it. Does nothing to a model that is already sharded.

    Level 0 keeps every parameter on every rank and averages gradients. Levels 1 to 3 shard parameters, gradients and
    optimizer state: 1 and 2 keep gathered parameters between forward and backward, 3 gathers them unit by unit and
    frees them after use. Gradients are averaged over the ranks in each backward (by ``engine.accumulate``, at levels 0
    and 1, once a step). In one process the model stays plain, and in 16 bits its units see casts of their parameters.

    Args:
        model: any module, on any device or on meta (then call ``engine.materialize``). Parameters may be tied, frozen,
            of odd sizes, smaller than the number of ranks, or single numbers.
        units: modules whose parameters are gathered together; None: ``model.shard_units()``, or the blocks found
            (``transformers``' ``_no_split_modules``, else the items of the outermost ModuleLists). A unit that shares
            a parameter with another one is left to the root. A unit that is listed several times, because a forward
            runs it that often, is recomputed and compiled by itself, but its parameters are left to the root.
        policy: None: ``Policy()``.
        forward_methods: methods of ``model`` other than forward that use its parameters, such as "encode".
        tp_plan: {name of modules or parameters: style} of tensor parallelism, see ``engine.parallel.tensor``; None:
            ``model.tp_plan()``, or ``transformers``' plan.

    Raises:
        ValueError: a unit is not part of the model, a method is missing, policy is not a Policy, a unit mixes trainable
            dtypes or yields, a parameter has no dimensions (with tp_size or pp_size), an inner module is already
            sharded, or the model cannot be split by tp_size or cp_size.
    """
    return lay_over_ranks(model, units, policy, forward_methods, tp_plan, over_stages=bool(_pipelined_lists(model)))


def lay_over_ranks(
    model: nn.Module,
    units: Sequence[nn.Module] | None = None,
    policy: Policy | None = None,
    forward_methods: Iterable[str] = (),
    tp_plan: Mapping[str, str] | None = None,
    over_stages: bool = False,
) -> nn.Module:
    """``shard``. With ``over_stages``, as BMTrain does under pp_size: every rank has data of its own, and only lists
    that pipeline their blocks themselves are split into stages."""
    policy = policy or Policy()
    if not isinstance(policy, Policy):
        raise ValueError(
            f"policy: got {policy!r}, expected an engine.Policy, or None for the settings of init_distributed"
        )
    if is_sharded(model):
        return model
    methods, stays_plain = list(forward_methods), runtime.world_size() == 1
    check_model(model, methods)
    if not stays_plain and stages_of(model) is None:
        check_ranks(model.named_parameters())
    policy.cast_parameters_(model)
    chosen = units_of(model, units)
    _check_chosen(model, chosen, policy, stays_plain)
    lists: list[nn.ModuleList] = []
    if runtime.current().pp_size > 1:
        lists = _pipelined_lists(model)
        if stages_of(model) is None:  # else an earlier call has cut it, and raised afterwards
            from engine.parallel.over_ranks import cut_into_stages

            cut_into_stages(model, lists, over_stages)
            chosen = units_of(model, units)
    set_sharding(model, policy)
    if policy.offload != "none":
        watch_optimizers()
    cast_to = policy.compute_dtype if stays_plain else None
    if _wraps_units(policy) or cast_to is not None:
        wrap_units_(chosen.gathered, policy.recompute, policy.compile, cast_to)
    if _wraps_units(policy):
        wrap_units_(chosen.repeated, policy.recompute, policy.compile)
    if stays_plain:
        _finish_plain(model, methods, cast_to)
    else:
        from engine.parallel.over_ranks import replace_parameters

        replace_parameters(model, chosen, policy, methods, tp_plan, lists, over_stages)
    note_parameters(model)
    return model


def _wraps_units(policy: Policy) -> bool:
    return policy.recompute != "none" or bool(policy.compile)


def _check_chosen(model: nn.Module, chosen: Units, policy: Policy, stays_plain: bool) -> None:
    """Raise ValueError for units, or parameters in them, that the policy or FSDP cannot handle.

    Called before the model is cut into stages, so that all stages raise and none is cut.
    """
    if _wraps_units(policy) and not chosen.all:
        raise ValueError(
            f"the policy recomputes or compiles units, but none were found in {type(model).__name__}: name them with "
            "units="
        )
    if stays_plain:
        if policy.compute_dtype is not None:
            check_no_generator(chosen.all)
        return
    check_units(unit_parameters(model, chosen.gathered))
    check_shards(model)
    if policy.recompute == "selective":
        check_not_nested(chosen.all)


def _finish_plain(model: nn.Module, methods: Sequence[str], cast_to: torch.dtype | None) -> None:
    """Finish a model in one process: move it to the device; in 16 bits, cast the root's own parameters in forward."""
    if cast_to is not None:
        wrap_units_([model], "none", False, cast_to)
        for method in methods:
            setattr(model, method, types.MethodType(casting(_function_of(model, method), cast_to), model))
    device = runtime.current().device
    if device is not None and not any(t.is_meta for t in _tensors(model)):
        model.to(device)


def _pipelined_lists(model: nn.Module) -> list[nn.ModuleList]:
    return [m for m in model.modules() if isinstance(m, nn.ModuleList) and getattr(m, "pipelines_blocks", False)]


def _function_of(model: nn.Module, method: str) -> Callable[..., Any]:
    """A method of ``model``, as a function that takes the model first."""
    bound = getattr(model, method)
    return getattr(bound, "__func__", None) or (lambda _, *args, **kwargs: bound(*args, **kwargs))


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()

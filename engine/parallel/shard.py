"""``engine.shard``: FSDP2 on any module, at the four ZeRO levels, with the traps of foreign modules taken care of.

What is done where there are several ranks is in ``engine.parallel.over_ranks``, and is imported there only: FSDP and
DTensor take more than a second.
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
from engine.parallel.units import choose_units, repeated_units, unit_parameters
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
    """Lay ``model`` over the ranks, in place, and return it. Does nothing to a model that is already sharded.

    Levels: 0 keeps every parameter on every rank and averages gradients. 1 to 3 shard parameters, gradients and
    optimizer state; 1 and 2 keep gathered parameters between forward and backward, 3 gathers them unit by unit and
    frees them after use. Gradients are averages over ranks, reduced in backward (``engine.accumulate``: at level 0 and
    1 once a step). In one process the model stays plain, and in 16 bits its units see casts of their parameters.

    Args:
        model: any module, on any device or meta (then call ``engine.materialize``). Tied and frozen parameters, odd
            sizes and parameters smaller than the number of ranks, single numbers too, are fine.
        units: modules whose parameters are gathered together; None: ``model.shard_units()``, or the blocks found
            (``transformers``' ``_no_split_modules``, else the items of the outermost ModuleLists). A unit that shares
            a parameter with another is left to the root. One that is listed several times, as a forward runs it so
            often, is recomputed and compiled by itself, and its parameters are left to the root.
        policy: None: ``Policy()``.
        forward_methods: methods of ``model`` other than forward that use its parameters, such as "encode".
        tp_plan: {name of modules or parameters: style} of tensor parallelism, see ``engine.parallel.tensor``; None:
            ``model.tp_plan()``, or ``transformers``' plan.

    Raises:
        ValueError: a unit is not part of the model, a method is missing, policy is no Policy, a unit mixes trainable
            dtypes or yields, a parameter has no dimensions (with tp_size or pp_size), an inner module is already
            sharded, or the model cannot be split as tp_size and cp_size say.
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
    """``shard``; with ``over_stages``, as BMTrain does it under pp_size: every rank has data of its own, and only lists
    that pipeline their blocks themselves are split into stages."""
    policy = policy or Policy()
    if not isinstance(policy, Policy):
        raise ValueError(f"policy: got {policy!r}, expected an engine.Policy, or None for what init_distributed said")
    if is_sharded(model):
        return model
    methods, settings = list(forward_methods), runtime.current()
    check_model(model, methods)
    if runtime.world_size() > 1 and stages_of(model) is None:
        check_ranks(model.named_parameters())
    policy.cast_parameters_(model)
    stays_plain = runtime.world_size() == 1
    chosen, repeated = choose_units(model, units), repeated_units(model, units)
    _check_chosen(model, chosen, repeated, policy, stays_plain)
    lists = _pipelined_lists(model) if settings.pp_size > 1 else []
    if settings.pp_size > 1 and stages_of(model) is None:  # else a call that raised later has cut it
        from engine.parallel.over_ranks import cut_into_stages

        cut_into_stages(model, lists, over_stages)
        chosen = choose_units(model, units)
    set_sharding(model, policy)
    if policy.offload != "none":
        watch_optimizers()
    cast_to = policy.compute_dtype if stays_plain else None
    order = [m for m in model.modules() if m in chosen]
    if _wraps_units(policy) or cast_to is not None:
        wrap_units_((m for m in order if m not in repeated), policy.recompute, policy.compile, cast_to)
    if _wraps_units(policy):
        wrap_units_((m for m in order if m in repeated), policy.recompute, policy.compile)
    if stays_plain:
        _finish_plain(model, methods, cast_to)
    else:
        from engine.parallel.over_ranks import replace_parameters

        replace_parameters(model, chosen, repeated, policy, methods, tp_plan, lists, over_stages)
    note_parameters(model)
    return model


def _wraps_units(policy: Policy) -> bool:
    return policy.recompute != "none" or bool(policy.compile)


def _check_chosen(
    model: nn.Module, chosen: set[nn.Module], repeated: set[nn.Module], policy: Policy, stays_plain: bool
) -> None:
    """Raises ValueError for units, or parameters in them, that the policy or FSDP cannot treat.

    Called before the model is cut into stages, so that all of them raise and none is cut.
    """
    if _wraps_units(policy) and not chosen:
        raise ValueError(
            f"the policy recomputes or compiles units, but {type(model).__name__} has none that were found: name them "
            "with units="
        )
    if stays_plain:
        if policy.compute_dtype is not None:
            check_no_generator(chosen)
        return
    check_units(unit_parameters(model, chosen - repeated))
    check_shards(model)
    if policy.recompute == "selective":
        check_not_nested(chosen)


def _finish_plain(model: nn.Module, methods: Sequence[str], cast_to: torch.dtype | None) -> None:
    """What is left for a model in one process: the root's own parameters, seen in 16 bits, and the device."""
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
    """A method of ``model`` as a function of the model."""
    bound = getattr(model, method)
    return getattr(bound, "__func__", None) or (lambda _, *args, **kwargs: bound(*args, **kwargs))


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()

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
from engine.optim.checks import watch_optimizers
from engine.parallel.checks import (
    check_model,
    check_no_generator,
    check_not_nested,
    check_ranks,
    check_shards,
    check_units,
)
from engine.precision import Policy
from engine.recompute import wrap_units_
from engine.registry import note_parameters, set_sharding, stages_of
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
            a parameter with another is left to the root.
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
    settings = runtime.current()
    level = settings.zero_level if policy.zero_level is None else policy.zero_level
    if is_sharded(model):
        return model
    methods = list(forward_methods)
    check_model(model, methods)
    if runtime.world_size() > 1 and stages_of(model) is None:
        check_ranks(model.named_parameters())
    policy.cast_parameters_(model)
    chosen = _choose_units(model, units)
    stays_plain = runtime.world_size() == 1
    wraps = policy.recompute != "none" or bool(policy.compile)
    cast_to = policy.compute_dtype if stays_plain else None
    _check_whole(model, chosen, wraps, stays_plain)
    if cast_to is not None:
        check_no_generator(chosen)
    if policy.recompute == "selective" and not stays_plain:
        check_not_nested(chosen)
    lists = _pipelined_lists(model) if settings.pp_size > 1 else []
    if settings.pp_size > 1 and stages_of(model) is None:  # else a call that raised later has cut it
        from engine.parallel.over_ranks import cut_into_stages

        cut_into_stages(model, lists, over_stages)
        chosen = _choose_units(model, units)
    set_sharding(model, policy)
    if policy.offload != "none":
        watch_optimizers()
    if wraps or cast_to is not None:
        wrap_units_((m for m in model.modules() if m in chosen), policy.recompute, policy.compile, cast_to)
    if stays_plain:
        _finish_plain(model, methods, cast_to)
        note_parameters(model)
        return model
    from engine.parallel.over_ranks import lay_out

    lay_out(model, chosen, level, policy, methods, tp_plan, lists, over_stages)
    return model


def _check_whole(model: nn.Module, chosen: set[nn.Module], wraps: bool, stays_plain: bool) -> None:
    """Before the model is cut into stages, so that all of them raise and none is cut."""
    if wraps and not chosen:
        raise ValueError(
            f"the policy recomputes or compiles units, but {type(model).__name__} has none that were found: name them "
            "with units="
        )
    if not stays_plain:
        check_units(unit_parameters(model, chosen))
        check_shards(model)


def _finish_plain(model: nn.Module, methods: Sequence[str], cast_to: torch.dtype | None) -> None:
    """What is left for a model in one process: the root's own parameters, seen in 16 bits, and the device."""
    if cast_to is not None:
        wrap_units_([model], "none", False, cast_to)
        for method in methods:
            setattr(model, method, types.MethodType(casting(_function_of(model, method), cast_to), model))
    device = runtime.current().device
    if device is not None and not any(t.is_meta for t in _tensors(model)):
        model.to(device)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The blocks of any module: those it declares, those ``transformers`` declares, or the items of its ModuleLists."""
    if callable(say := getattr(model, "shard_units", None)):
        return list(say())
    if names := set(getattr(model, "_no_split_modules", None) or ()):
        if found := [m for m in model.modules() if type(m).__name__ in names and m is not model]:
            return found
    found = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


def _pipelined_lists(model: nn.Module) -> list[nn.ModuleList]:
    return [m for m in model.modules() if isinstance(m, nn.ModuleList) and getattr(m, "pipelines_blocks", False)]


def _choose_units(model: nn.Module, units: Sequence[nn.Module] | None) -> set[nn.Module]:
    inside = set(model.modules())
    wanted = find_units(model) if units is None else list(units)
    chosen: set[nn.Module] = set()
    for unit in wanted:
        # A list has no forward of its own, so its items are the units.
        for module in unit if isinstance(unit, nn.ModuleList) else [unit]:
            if module not in inside:
                raise ValueError(f"units has a {type(module).__name__} that is not a module of {type(model).__name__}")
            if module is not model and next(module.parameters(), None) is not None:
                chosen.add(module)
    while shared := _sharing_units(model, chosen):
        chosen -= shared
    return chosen


def unit_parameters(model: nn.Module, chosen: set[nn.Module]) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """The (name, parameter) pairs that each unit, or the root, has of its own."""
    groups: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def visit(module: nn.Module, prefix: str, group: nn.Module) -> None:
        group = module if module in chosen else group
        if (module, group) in seen:  # once for each unit that holds the module
            return
        seen.add((module, group))
        groups.setdefault(group, []).extend(
            (prefix + name, p) for name, p in module._parameters.items() if p is not None
        )
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", group)

    visit(model, "", model)
    return groups


def _sharing_units(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Units that hold a parameter which another unit, or the root, holds too."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for group, members in unit_parameters(model, chosen).items():
        for _, parameter in members:
            holders.setdefault(parameter, set()).add(group)
    return {group for groups in holders.values() if len(groups) > 1 for group in groups if group is not model}


def _function_of(model: nn.Module, method: str) -> Callable[..., Any]:
    """A method of ``model`` as a function of the model."""
    bound = getattr(model, method)
    return getattr(bound, "__func__", None) or (lambda _, *args, **kwargs: bound(*args, **kwargs))


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()

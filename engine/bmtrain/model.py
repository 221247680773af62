"""Sharding and initialising models of BMTrain's classes, and any other model with ``BMTrainModelWrapper``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from engine import runtime
from engine.bmtrain.block import Block, apply_settings
from engine.bmtrain.parameter import DistributedParameter, declared_attributes, set_declared_attributes
from engine.init import draw_, init_parameters_
from engine.names import clean_name
from engine.notes import AWAITS_SHARDING
from engine.parallel.checks import check_ranks
from engine.parallel.shard import lay_over_ranks
from engine.parallel.units import find_units
from engine.policy import Policy
from engine.shards import is_sharded, materialize, sharded_roots, show_own_parameters
from engine.tensors import as_bytes, is_shard


def init_parameters(model: nn.Module, policy: Policy | None = None, forward_methods: Iterable[str] = ()) -> None:
    """Shard ``model`` in place, and initialise the parameters that have an ``init_method``. Collective.

    Each is drawn from the seed of ``init_distributed``, the number of earlier calls, and its name, with the same bits
    on any number of ranks. Parameters without an ``init_method`` keep their values of rank 0; those on meta are drawn
    by the rule of their module (see ``engine.init``).

    Args:
        model: parts of it may be sharded already; the rest is sharded now.
        policy: None: ``Policy()``.
        forward_methods: methods other than forward that call parts of the model, such as "generate".

    Raises:
        ValueError: as in ``engine.shard`` and ``engine.init``.
    """
    methods = {name: m["init_method"] for name, m in declared_attributes(model).items() if m["init_method"] is not None}
    lost = {name for name, p in model.named_parameters() if p.is_meta}
    shard_from_rank_0(model, policy, forward_methods, overwritten=methods)
    settings = runtime.current()
    prefix = f"{settings.draws}/" if settings.draws else ""  # layers that are initialised by separate calls must differ
    settings.draws += 1
    for name, parameter in model.named_parameters():
        if name in methods:
            draw_(parameter, prefix + clean_name(name), settings.seed, methods[name])
            lost.discard(name)
    held = {name for name, _ in model.named_parameters()}  # the others are on other stages of a pipeline
    if lost & held:
        init_parameters_(model, settings.seed, [clean_name(name) for name in lost & held])


def shard_from_rank_0(
    model: nn.Module,
    policy: Policy | None = None,
    forward_methods: Iterable[str] = (),
    units: list[nn.Module] | None = None,
    overwritten: Collection[str] = (),
) -> None:
    """Shard the unsharded parts of ``model`` by its blocks, with the values of rank 0. Collective.

    Parameters on meta get uninitialised memory. ``overwritten`` ones are not broadcast, as their values do not matter.
    """
    show_own_parameters(model)  # otherwise gathered ones would be sharded again
    marks = declared_attributes(model)
    skipped = {id(p) for name, p in model.named_parameters() if name in overwritten}
    for root in _roots(model):
        if runtime.world_size() > 1:
            check_ranks([*root.named_parameters(), *root.named_buffers()])  # otherwise gloo would end the process
        _broadcast_values(root, skipped)
        inside = set(root.modules())
        blocks = [m for m in inside if isinstance(m, Block)] if units is None else units
        chosen = [m for m in blocks if m in inside] or None
        methods = forward_methods if root is model else ()
        lay_over_ranks(root, units=chosen, policy=policy, forward_methods=methods, over_stages=True)
    materialize(model)
    set_declared_attributes(model, marks)
    for module in model.modules():
        if isinstance(module, Block):
            apply_settings(module)


def _roots(model: nn.Module) -> list[nn.Module]:
    """``model``, or, if a part of it is sharded already, the outermost modules that are not."""
    if all(map(is_shard, model.parameters())):  # perhaps by a module around it
        return []
    if is_sharded(model):
        return _added_to(model)
    container = isinstance(model, nn.ModuleList | nn.ModuleDict) and type(model).forward is nn.Module.forward
    if not sharded_roots(model) and not container:
        return [model]
    if own := next(iter(name for name, p in model._parameters.items() if p is not None), None):
        raise ValueError(
            f"parameter {own} of {type(model).__name__} is not sharded but a module inside it is: call init_parameters "
            "once, on the outermost module, or put the parameter into a separate module"
        )
    return [root for child in model.children() for root in _roots(child)]


def _added_to(model: nn.Module) -> list[nn.Module]:
    """The outermost modules in ``model`` whose parameters are all still to be sharded."""
    if (parameters := list(model.parameters())) and all(map(AWAITS_SHARDING.get, parameters)):
        return [model]
    return [added for child in model.children() for added in _added_to(child)]


@torch.no_grad()
def _broadcast_values(model: nn.Module, skipped: set[int]) -> None:
    """Copy rank 0's values to every rank: ranks draw different numbers, so models built on them differ."""
    if runtime.world_size() == 1:
        return
    home = runtime.device()
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta and id(tensor) not in skipped:
            value = tensor.detach().to(home, copy=True).contiguous()
            broadcast_(value)
            tensor.copy_(value)


def broadcast_(tensor: torch.Tensor) -> None:
    """Copy rank 0's values to every rank; ``tensor`` is contiguous and on this rank's device. Collective."""
    if runtime.world_size() > 1 and tensor.numel():
        dist.broadcast(as_bytes(tensor), src=0)


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """(group, parameters) for each ``group`` with which parameters of ``model`` were declared; None: no group."""
    groups: dict[str | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        group = parameter.group if isinstance(parameter, DistributedParameter) else None
        groups.setdefault(group, []).append(parameter)
    yield from groups.items()


def BMTrainModelWrapper(
    model: nn.Module, use_checkpoint: bool = True, policy: Policy | None = None, forward_methods: Iterable[str] = ()
) -> nn.Module:
    """Shard any module in place, and return it: its repeated layers become blocks. Collective.

    The layers are those that ``engine.shard`` finds: ``model.shard_units()``, ``transformers``' own list, or the items
    of the outermost ModuleLists. Values are those of rank 0.

    Args:
        model: on any device except meta.
        use_checkpoint: recompute the blocks in backward. A ``transformers`` model uses its own
            ``gradient_checkpointing_enable``, in training mode, because it must also drop its key-value cache.
        policy: None: ``Policy()``.
        forward_methods: methods other than forward that use the model's parameters, such as "encode".

    Raises:
        ValueError: a parameter is on meta, or as in ``engine.shard``.
    """
    if lost := next((name for name, p in model.named_parameters() if p.is_meta), None):
        raise ValueError(f"parameter {lost} is on the meta device: call init_parameters or load, not the wrapper")
    if sharded_roots(model):
        shard_from_rank_0(model, policy, forward_methods)
        return model
    units = [unit for unit in find_units(model) if unit is not model and next(unit.parameters(), None) is not None]
    own_way = getattr(model, "supports_gradient_checkpointing", False) and use_checkpoint
    if own_way:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for unit in units:
        if not isinstance(unit, Block):  # a user's own Block keeps its settings
            Block(unit, use_checkpoint=use_checkpoint and not own_way)
    shard_from_rank_0(model, policy, forward_methods, units)
    return model

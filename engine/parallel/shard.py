"""``engine.shard``: FSDP2 on any module, at the four ZeRO levels, with the traps of foreign modules taken care of."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from engine import runtime
from engine.init import clean_name
from engine.optim.rounding import round_at_random
from engine.optim.stale import mark_stale
from engine.parallel.context import split_tokens
from engine.parallel.exchange import Exchange, exchange, over_gloo
from engine.parallel.mesh import data_mesh, storage_mesh
from engine.parallel.pipeline import pipeline_of, split
from engine.parallel.rows import spread_tables
from engine.parallel.stages import absent_names, mark, split_lists
from engine.parallel.tensor import check_inputs, parallelize
from engine.precision import Policy
from engine.recompute import wrap_units_
from engine.shards import is_sharded

_levels: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
last_units: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that level 3 leaves gathered after forward
_policies: weakref.WeakKeyDictionary[nn.Module, Policy] = weakref.WeakKeyDictionary()


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
    1 once a step). In one process, in fp32, the model stays plain.

    Args:
        model: any module, on any device or meta (then call ``engine.materialize``). Tied and frozen parameters, odd
            sizes and parameters smaller than the number of ranks are fine.
        units: modules whose parameters are gathered together; None: ``model.shard_units()``, or the blocks found
            (``transformers``' ``_no_split_modules``, else the items of the outermost ModuleLists). A unit that shares
            a parameter with another is left to the root.
        policy: None: ``Policy()``.
        forward_methods: methods of ``model`` other than forward that use its parameters, such as "encode".
        tp_plan: {name of modules or parameters: style} of tensor parallelism, see ``engine.parallel.tensor``; None:
            ``model.tp_plan()``, or ``transformers``' plan.

    Raises:
        ValueError: a unit is not part of the model, a method is missing, a unit mixes trainable dtypes or yields, a
            parameter has no dimensions, an inner module is already sharded, or the model cannot be split as tp_size and
            cp_size say.
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
    settings = runtime.current()
    level = settings.zero_level if policy.zero_level is None else policy.zero_level
    if is_sharded(model):
        return model
    methods = list(forward_methods)
    _check_whole(model, methods)
    policy.cast_parameters_(model)
    lists = _cut_into_stages(model, over_stages) if settings.pp_size > 1 else []
    chosen = _choose_units(model, units)
    _policies[model] = policy
    if policy.recompute != "none" or policy.compile:
        if not chosen:
            raise ValueError(
                f"the policy recomputes or compiles units, but {type(model).__name__} has none that were found: name "
                "them with units="
            )
        wrap_units_((m for m in model.modules() if m in chosen), policy.recompute, policy.compile)
    if runtime.world_size() == 1 and policy.precision == "fp32":
        if settings.device is not None and not any(t.is_meta for t in _tensors(model)):
            model.to(settings.device)
        return model
    _check_units(model, chosen)
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    before = {name: p for name, p in model.named_parameters()}
    _split_over_ranks(model, level, tp_plan, chosen if policy.sequence_parallel else None)
    order = [m for m in model.modules() if m in chosen]
    _shard_units(model, order, policy, level, lists, over_stages)
    shards = storage_mesh(runtime.mesh(), level, over_stages)["dp_shard"]
    # Of a pipeline, a stage that gathers ahead may wait for one that waits for this one.
    calls = _Calls(model, exchange(model, shards, order if settings.pp_size == 1 else ()))
    _levels[model] = level
    if (pipeline := pipeline_of(model)) is not None:
        pipeline.dtype = policy.compute_dtype or next(model.parameters()).dtype
        pipeline.watch(model)
    model.register_forward_pre_hook(calls.enter, prepend=True)
    model.register_forward_hook(calls.leave, always_call=True)
    for method in methods:
        register_fsdp_forward_method(model, method)
        setattr(model, method, calls.counted(getattr(model, method)))
    mark_stale(before)
    _mark_rounding(model)
    mark(model)
    return model


def _check_whole(model: nn.Module, methods: Iterable[str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"module {name} is already sharded but the model around it is not: shard the model whole")
    for method in methods:
        if not callable(getattr(model, method, None)):
            raise ValueError(f"forward_methods names {method!r}, which {type(model).__name__} does not have")


def _cut_into_stages(model: nn.Module, over_stages: bool) -> list[nn.ModuleList]:
    """Leave this rank's stage of the model; the lists that pipeline their blocks themselves."""
    lists = _pipelined_lists(model)
    if over_stages:
        _check_stages(lists)
        split_lists(model, lists, runtime.mesh())
    else:
        split(model, runtime.mesh(), runtime.current().pp_chunks)
    return lists


def _shard_units(
    model: nn.Module,
    order: Sequence[nn.Module],
    policy: Policy,
    level: int,
    lists: Iterable[nn.ModuleList],
    over_stages: bool,
) -> None:
    """``fully_shard`` of the units, in the order of ``model.modules()``, and of what is left, the root's."""
    settings = runtime.current()
    of_stage, mesh = data_mesh(runtime.mesh(), level), data_mesh(runtime.mesh(), level, over_stages)
    in_lists = {m for blocks in lists for m in blocks.modules()}
    mixed = policy.mixed_precision()
    if policy.precision == "fp32" and any(p.itemsize < 4 for p in model.parameters() if p.requires_grad):
        mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # a sum in 16 bits loses what the ranks agree on
    # What is gathered last in forward stays, as the root's own parameters do (None): backward needs it first.
    if order and settings.pp_size == 1:
        last_units.add(order[-1])
    looked_up: set[nn.Parameter] = set()
    if mesh.ndim == 1 and over_gloo(mesh) and settings.tp_size * settings.pp_size == 1:
        looked_up = spread_tables(model, mesh, order, policy.compute_dtype)
    # Inner units first: each takes the parameters below it that no unit has taken.
    for unit in reversed(order):
        where = of_stage if unit in in_lists else mesh
        freed = level == 3 and unit not in last_units
        fully_shard(unit, mesh=where, mp_policy=mixed, reshard_after_forward=freed, ignored_params=looked_up)
        if unit in in_lists:
            # Gathering ahead what comes before the list would wait, on a CPU, for stages that wait for this one.
            assert isinstance(unit, FSDPModule)
            unit.set_modules_to_backward_prefetch([unit])
    kept = None if level == 3 else False
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=kept, ignored_params=looked_up)


def zero_level(model: nn.Module) -> int:
    """The level at which ``engine.shard`` laid out ``model``; 3 for one that its user gave to ``fully_shard``."""
    return _levels.get(model, 3)


def policy_of(model: nn.Module) -> Policy | None:
    """The policy that ``engine.shard`` was given for ``model``, if it was."""
    return _policies.get(model)


def sharded_roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules in ``model``, itself included."""
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters, so that ``model.parameters()`` are the shards that the optimizer updates."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def find_units(model: nn.Module) -> list[nn.Module]:
    """The blocks of any module: what it says itself, what ``transformers`` says, or the items of its ModuleLists."""
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


def _check_stages(lists: list[nn.ModuleList]) -> None:
    settings = runtime.current()
    if settings.tp_size * settings.cp_size * settings.pp_chunks > 1:
        raise ValueError(
            f"PipelineTransformerBlockList (pp_size={settings.pp_size}) works without tp_size, cp_size and pp_chunks, "
            f"which are {settings.tp_size}, {settings.cp_size} and {settings.pp_chunks}: set them to 1"
        )
    for blocks in lists:
        if len(blocks) < settings.pp_size:
            raise ValueError(
                f"a PipelineTransformerBlockList has {len(blocks)} blocks, which are fewer than the {settings.pp_size} "
                "stages of the pipeline (pp_size): use fewer"
            )


def _split_over_ranks(
    model: nn.Module, level: int, tp_plan: Mapping[str, str] | None, sequence_units: Collection[nn.Module] | None
) -> None:
    """Tensor, sequence and context parallelism, as ``init_distributed`` and the policy say; after the pipeline's."""
    mesh = runtime.mesh()
    tensor, context = mesh["tp"].size() > 1, mesh["cp"].size() > 1
    sequence = tensor and sequence_units is not None
    if context or sequence:
        split_tokens(model, mesh, sequence)
    if tensor:
        units = sequence_units if sequence else None
        parallelize(model, storage_mesh(mesh, level)["tp"], tp_plan, units, absent_names(model))
    if (tensor or context) and not hasattr(model, "tp_split"):  # such a layer by itself takes each rank's own rows
        check_inputs(model, mesh)


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
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str, group: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        group = module if module in chosen else group
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


def _check_units(model: nn.Module, chosen: set[nn.Module]) -> None:
    for unit, members in unit_parameters(model, chosen).items():
        if number := next((name for name, p in members if p.ndim == 0), None):
            raise ValueError(
                f"parameter {clean_name(number)} has no dimensions, and a single number cannot be sharded: give it the "
                "shape (1,)"
            )
        by_dtype = {p.dtype: name for name, p in members if p.requires_grad}
        if len(by_dtype) > 1:
            text = " and ".join(f"{clean_name(name)} is {dtype}" for dtype, name in by_dtype.items())
            remedy = "Policy(precision='bf16'), which keeps all trainable ones in fp32"
            if any(dtype.is_complex for dtype in by_dtype):
                remedy = "name the modules of the complex ones with units="
            raise ValueError(
                f"trainable parameters of one unit have several dtypes: {text}. Use one dtype, or {remedy}"
            )
        if inspect.isgeneratorfunction(type(unit).forward):
            raise ValueError(
                f"forward of unit {type(unit).__name__} yields, but its parameters are there only until it returns: "
                "return a list, or name other units with units="
            )


class _Calls:
    """Counts the calls of a model that are under way, and frees gathered parameters after the last where need be."""

    def __init__(self, model: nn.Module, exchange: Exchange | None) -> None:
        self._model, self._exchange = weakref.ref(model), exchange
        self._open = 0
        self._gathered = False

    def enter(self, *_: Any) -> None:
        if not self._gathered and (model := self._model()) is not None:
            self._gathered = True
            if torch.is_inference_mode_enabled():
                _gather_once(model)
        if self._open == 0 and self._exchange is not None:
            self._exchange.before_forward()
        self._open += 1

    def leave(self, *_: Any) -> None:
        # Without a backward nothing frees the gathered parameters, and an optimizer built now would be given them.
        self._open -= 1
        if self._open == 0 and self._exchange is not None:
            self._exchange.after_forward()
        if self._open == 0 and not torch.is_grad_enabled() and (model := self._model()) is not None:
            reshard(model)

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, counted as a call of the model, so that a forward inside it does not free what it still uses."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return method(*args, **kwargs)
            finally:
                self.leave()

        return call


@torch.inference_mode(False)
def _gather_once(model: nn.Module) -> None:
    """Make the tensors that FSDP keeps for gathered parameters: made in inference mode, training could not use them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def settle(model: nn.Module) -> None:
    """Note on parameters that have just got their memory what this module knows of them."""
    _mark_rounding(model)
    mark(model)


def _mark_rounding(model: nn.Module) -> None:
    if (policy := policy_of(model)) is not None and policy.precision == "bf16-sr":
        for name, parameter in model.named_parameters():
            round_at_random(parameter, clean_name(name))

"""``engine.shard``: FSDP2 on any module, at the four ZeRO levels, with the traps of foreign modules taken care of."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from engine import runtime
from engine.mixed_precision import casting
from engine.optim.checks import mark_replaced, watch_optimizers
from engine.parallel.checks import (
    check_model,
    check_no_generator,
    check_not_nested,
    check_ranks,
    check_shards,
    check_units,
)
from engine.parallel.context import split_tokens
from engine.parallel.forward_hooks import ForwardHooks
from engine.parallel.fsdp import reshard, shards_integers
from engine.parallel.gloo.collectives import over_gloo, use_gloo_collectives
from engine.parallel.gloo.sharded_embedding import shard_embeddings
from engine.parallel.inputs import check_inputs
from engine.parallel.mesh import data_mesh, device_mesh, storage_mesh
from engine.parallel.pipeline.execution import pipeline_of, split_into_stages
from engine.parallel.pipeline.stages import absent_names, split_block_lists
from engine.parallel.tensor import parallelize
from engine.precision import Policy
from engine.recompute import wrap_units_
from engine.registry import STAYS_GATHERED, note_parameters, set_sharding, stages_of
from engine.shards import is_sharded, set_user_attributes, user_attributes
from engine.tensors import shard_of


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
        _cut_into_stages(model, lists, over_stages)
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
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    before, attributes = dict(model.named_parameters()), user_attributes(model)
    _split_over_ranks(model, level, tp_plan, chosen if policy.sequence_parallel else None)
    order = [m for m in model.modules() if m in chosen]
    _shard_units(model, order, policy, level, lists, over_stages)
    set_sharding(model, policy, level)
    _install_hooks(model, order, policy, methods, storage_mesh(device_mesh(), level, over_stages)["dp_shard"])
    set_user_attributes(model, attributes)
    still = set(model.parameters())
    mark_replaced({name: p for name, p in before.items() if p not in still})
    note_parameters(model)
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


def _cut_into_stages(model: nn.Module, lists: list[nn.ModuleList], over_stages: bool) -> None:
    """Leave this rank's stage of the model; ``lists`` pipeline their blocks themselves."""
    if over_stages:
        _check_stages(lists)
        split_block_lists(model, lists, device_mesh())
    else:
        split_into_stages(model, device_mesh(), runtime.current().pp_chunks)


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
    of_stage, mesh = data_mesh(device_mesh(), level), data_mesh(device_mesh(), level, over_stages)
    in_lists = {m for blocks in lists for m in blocks.modules()}
    mixed = mixed_precision(policy, model)
    # What is gathered last in forward stays, as the root's own parameters do (None): backward needs it first.
    if order and settings.pp_size == 1:
        STAYS_GATHERED.set(order[-1], True)
    # What FSDP refuses; each rank has all of them.
    left = {p for p in model.parameters() if p.numel() == 0 or p.ndim == 0}
    if not shards_integers():
        left |= {p for p in model.parameters() if not (p.is_floating_point() or p.is_complex())}
    for parameter in left:
        if not parameter.is_meta:
            parameter.data = parameter.to(runtime.device()).data  # by a subclass's own `to`, with what else it holds
    if mesh.ndim == 1 and over_gloo(mesh) and settings.tp_size * settings.pp_size == 1:
        left |= shard_embeddings(model, mesh, order, policy.compute_dtype)
    # Inner units first: each takes the parameters below it that no unit has taken.
    units = set(order)
    for unit in sorted(order, key=lambda unit: sum(m in units for m in unit.modules())):
        where = of_stage if unit in in_lists else mesh
        freed = level == 3 and not STAYS_GATHERED.get(unit)
        fully_shard(unit, mesh=where, mp_policy=mixed, reshard_after_forward=freed, ignored_params=left)
        if unit in in_lists:
            # Gathering ahead what comes before the list would wait, on a CPU, for stages that wait for this one.
            assert isinstance(unit, FSDPModule)
            unit.set_modules_to_backward_prefetch([unit])
    kept = None if level == 3 else False
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=kept, ignored_params=left)


def _install_hooks(
    model: nn.Module, order: Sequence[nn.Module], policy: Policy, methods: Iterable[str], shards: DeviceMesh
) -> None:
    """Add the engine's hooks to a model that ``fully_shard`` has sharded; ``shards``: the mesh of the shards."""
    # Of a pipeline, a stage that gathers ahead may wait for one that waits for this one.
    ahead = order if runtime.current().pp_size == 1 else ()
    hooks = ForwardHooks(model, use_gloo_collectives(model, shards, ahead))
    if (pipeline := pipeline_of(model)) is not None:
        pipeline.dtype = policy.compute_dtype or next(model.parameters()).dtype
        pipeline.watch(model)
    hooks.watch()
    for method in methods:
        register_fsdp_forward_method(model, method)
        setattr(model, method, hooks.counted(getattr(model, method)))
    cut = functools.partial(_cut_whole_tensors, weakref.ref(model))
    for module in model.modules():
        module.register_load_state_dict_pre_hook(cut)


def mixed_precision(policy: Policy, model: nn.Module) -> MixedPrecisionPolicy:
    """FSDP's policy for the dtypes of ``model``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # What is frozen may be trained later; but fp64 and complex numbers are not reduced in fp32 for its sake.
    looked_at = trained if any(p.itemsize > 4 for p in trained) else model.parameters()
    if policy.precision == "fp32" and any(p.is_floating_point() and p.itemsize < 4 for p in looked_at):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)  # a sum in 16 bits loses what the ranks agree on
    return policy.mixed_precision()


def sharded_roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules in ``model``, itself included."""
    found: list[FSDPModule] = []
    left = [model]
    while left:  # each step asks: without generators for each module
        module = left.pop()
        if isinstance(module, FSDPModule):
            found.append(module)
        elif module._modules:
            left += [child for child in reversed(dict.fromkeys(module._modules.values())) if child is not None]
    return found


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
    mesh = device_mesh()
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


def _cut_whole_tensors(
    root: weakref.ref[nn.Module], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before ``load_state_dict``: of whole tensors, which one process has saved, each rank takes its shards."""
    shown = [p for p in module._parameters.values() if p is not None and not isinstance(p, DTensor)]
    if shown and (model := root()) is not None:
        reshard(model)
    for own_name, parameter in module._parameters.items():
        name = prefix + own_name
        value = state.get(name)
        if isinstance(parameter, DTensor) and torch.is_tensor(value) and not isinstance(value, DTensor):
            if value.shape == parameter.shape:
                state[name] = shard_of(value, parameter.device_mesh, parameter.placements)

"""What ``engine.shard`` does on several ranks: pipeline stages, tensor and context parallelism, FSDP2, hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from engine import runtime
from engine.notes import STAYS_GATHERED, set_sharding
from engine.optim.checks import mark_replaced
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
from engine.parallel.units import Units
from engine.policy import Policy
from engine.shards import set_user_attributes, user_attributes
from engine.tensors import shard_of


def cut_into_stages(model: nn.Module, lists: list[nn.ModuleList], over_stages: bool) -> None:
    """Reduce the model to this rank's stage. lists: those that pipeline their blocks themselves."""
    if over_stages:
        _check_stages(lists)
        split_block_lists(model, lists, device_mesh())
    else:
        split_into_stages(model, device_mesh(), runtime.current().pp_chunks)


def _check_stages(lists: list[nn.ModuleList]) -> None:
    settings = runtime.current()
    if settings.tp_size * settings.cp_size * settings.pp_chunks > 1:
        raise ValueError(
            f"PipelineTransformerBlockList (pp_size={settings.pp_size}) does not support tp_size, cp_size and "
            f"pp_chunks, which are {settings.tp_size}, {settings.cp_size} and {settings.pp_chunks}: set them to 1"
        )
    for blocks in lists:
        if len(blocks) < settings.pp_size:
            raise ValueError(
                f"a PipelineTransformerBlockList has {len(blocks)} blocks, fewer than the {settings.pp_size} stages of "
                "the pipeline (pp_size): use fewer stages"
            )


def replace_parameters(
    model: nn.Module,
    units: Units,
    policy: Policy,
    methods: Iterable[str],
    tp_plan: Mapping[str, str] | None,
    lists: Sequence[nn.ModuleList],
    over_stages: bool,
) -> None:
    """Replace the parameters by this rank's shards, and install the hooks that gather and reduce them.

    Args:
        units: wrapped already (``engine.recompute``).
        methods: names of methods besides forward that use parameters.
        lists: those that pipeline their blocks themselves.
        over_stages: shard what is in no list over the stages too (see ``lay_over_ranks``).
    """
    level = runtime.current().zero_level if policy.zero_level is None else policy.zero_level
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    before, attributes = dict(model.named_parameters()), user_attributes(model)
    _split_over_ranks(model, level, tp_plan, units.all if policy.sequence_parallel else None)
    _shard_units(model, units.gathered, policy, level, lists, over_stages)
    set_sharding(model, policy, level)
    shards = storage_mesh(device_mesh(), level, over_stages)["dp_shard"]
    _install_hooks(model, units.gathered, policy, methods, shards)
    set_user_attributes(model, attributes)
    still = set(model.parameters())
    mark_replaced({name: p for name, p in before.items() if p not in still})


def _split_over_ranks(
    model: nn.Module, level: int, tp_plan: Mapping[str, str] | None, sequence_units: Collection[nn.Module] | None
) -> None:
    """Apply tensor, sequence and context parallelism, as ``init_distributed`` and the policy say."""
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


def _shard_units(
    model: nn.Module,
    order: Sequence[nn.Module],
    policy: Policy,
    level: int,
    lists: Iterable[nn.ModuleList],
    over_stages: bool,
) -> None:
    """Call ``fully_shard`` on the units, then on the model, for the parameters that are in no unit.

    order: the units in the order of ``model.modules()``.
    """
    settings = runtime.current()
    of_stage, mesh = data_mesh(device_mesh(), level), data_mesh(device_mesh(), level, over_stages)
    in_lists = {m for blocks in lists for m in blocks.modules()}
    mixed = mixed_precision(policy, model)
    # The unit that forward gathers last stays gathered, as the root does (None), because backward needs it first.
    if order and settings.pp_size == 1:
        STAYS_GATHERED.set(order[-1], True)
    left = _leave_whole(model)
    if mesh.ndim == 1 and over_gloo(mesh) and settings.tp_size * settings.pp_size == 1:
        left |= shard_embeddings(model, mesh, order, policy.compute_dtype)
    # Inner units first: each takes those parameters below it that no other unit has taken.
    units = set(order)
    for unit in sorted(order, key=lambda unit: sum(m in units for m in unit.modules())):
        where = of_stage if unit in in_lists else mesh
        freed = level == 3 and not STAYS_GATHERED.get(unit)
        fully_shard(unit, mesh=where, mp_policy=mixed, reshard_after_forward=freed, ignored_params=left)
        if unit in in_lists:
            # On a CPU, gathering ahead what comes before the list would wait for stages that wait for this one.
            assert isinstance(unit, FSDPModule)
            unit.set_modules_to_backward_prefetch([unit])
    kept = None if level == 3 else False
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=kept, ignored_params=left)


def _leave_whole(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that FSDP refuses, moved to this rank's device. Every rank has all of them, whole."""
    left = {p for p in model.parameters() if p.numel() == 0 or p.ndim == 0}
    if not shards_integers():
        left |= {p for p in model.parameters() if not (p.is_floating_point() or p.is_complex())}
    for parameter in left:
        if not parameter.is_meta:
            parameter.data = parameter.to(runtime.device()).data  # a subclass's own `to` moves what else it holds
    return left


def _install_hooks(
    model: nn.Module, order: Sequence[nn.Module], policy: Policy, methods: Iterable[str], shards: DeviceMesh
) -> None:
    """Add the engine's hooks to a model that ``fully_shard`` has sharded. shards: the mesh of the shards."""
    # In a pipeline, a stage that gathers ahead could wait for another stage that waits for it.
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
    # Frozen parameters may be trained later, so they count too; but fp64 and complex ones must not be reduced in fp32.
    looked_at = trained if any(p.itemsize > 4 for p in trained) else model.parameters()
    if policy.precision == "fp32" and any(p.is_floating_point() and p.itemsize < 4 for p in looked_at):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)  # a sum over ranks in 16 bits would lose too much
    return policy.mixed_precision()


def _cut_whole_tensors(
    root: weakref.ref[nn.Module], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before ``load_state_dict``: replace whole tensors, as one process saves them, by this rank's shards."""
    shown = [p for p in module._parameters.values() if p is not None and not isinstance(p, DTensor)]
    if shown and (model := root()) is not None:
        reshard(model)
    for own_name, parameter in module._parameters.items():
        name = prefix + own_name
        value = state.get(name)
        if isinstance(parameter, DTensor) and torch.is_tensor(value) and not isinstance(value, DTensor):
            if value.shape == parameter.shape:
                state[name] = shard_of(value, parameter.device_mesh, parameter.placements)

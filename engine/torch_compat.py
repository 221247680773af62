"""What differs between the torch versions that the engine supports, found by looking, not by number: those from
2.11 on. The fast tests were run with 2.11, 2.13 and 2.15, those of the engine and the models with 2.12, some with 2.14.

Private torch names that the engine needs are imported here and nowhere else, so that a new torch breaks one file.
"""

from __future__ import annotations

import datetime
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

_local, _grad = operator.attrgetter("_local_tensor"), operator.attrgetter("grad")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that this rank holds, sharing its memory; any other tensor as it is. No dispatch."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``local_tensor`` of each; quick, for many, where all are shards or none is."""
    kinds = set(map(type, tensors))
    if kinds == {DTensor}:
        return list(map(_local, tensors))
    return list(tensors) if kinds <= {torch.Tensor, torch.nn.Parameter} else [local_tensor(t) for t in tensors]


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """``grad`` of each; quick for many."""
    with torch._C.DisableTorchFunctionSubclass():  # which a shard has none of, but is asked about each time
        return list(map(_grad, parameters))


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` laid out as the DTensor ``tensor`` is, on whatever device it is; ``local`` itself if that is plain."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``; of a shard without a dispatch."""
    return with_local(tensor, local_tensor(tensor).detach())


def as_shard(
    local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """``local`` as this rank's shard of a tensor of ``shape`` placed so on ``mesh``."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride)


def shard_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's shard of ``whole``, which every rank has, on the mesh's device. No communication."""
    return as_shard(part_of(whole, mesh, placements), whole.shape, mesh, placements)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A copy of what this rank holds of ``whole``, which every rank has, where that is."""
    size, offset = local_box(whole.shape, mesh, placements)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    return part.clone(memory_format=torch.contiguous_format)


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard of a tensor of ``shape`` placed so on ``mesh``."""
    size, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))
    return tuple(size), tuple(offset)


def all_gather_flat(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` (ranks * n) with the ``tensor`` (n) of every rank."""
    # torch 2.13 renamed it and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, tensor, group=group)


def reduce_scatter_flat(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` (n) with this rank's part of the sum of the ``tensor`` (ranks * n) of every rank."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, tensor, group=group)


def assert_on_device(true: torch.Tensor, message: str) -> None:
    """Assert a 0-d bool where it is, without waiting for it."""
    torch._assert_async(true, message)


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread, such as one that recomputes a forward."""
    return torch._C._current_graph_task_id() != -1


def set_reduce_unused(root: FSDPModule, enabled: bool) -> None:
    """Make parameters that got no gradient take part in the reduction with zeros."""
    if hasattr(root, "set_reduce_scatter_unused_params"):  # torch 2.13
        root.set_reduce_scatter_unused_params(enabled)
        return
    for unit in root.modules():  # type: ignore[attr-defined]
        for group in _groups(unit) if isinstance(unit, FSDPModule) else ():
            vars(group).pop("post_backward", None)
            if enabled:
                group.post_backward = functools.partial(_post_backward_with_zeros, group)


def _post_backward_with_zeros(group: Any, *unused: Any) -> None:
    """FSDP's own, after what torch 2.13 does in it."""
    for p in group.fsdp_params if group.reduce_grads else ():
        if hasattr(p, "_unsharded_param") and p.unsharded_accumulated_grad is None:  # it has been gathered before
            whole = p.unsharded_param
            if whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
    type(group).post_backward(group, *unused)


def _groups(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP gathers together when this unit runs."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before there was one, or None
    if groups is None:
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    return groups


def _records(model: torch.nn.Module) -> Iterator[Any]:
    """What FSDP notes of each parameter that it shards."""
    for unit in model.modules():
        for group in _groups(unit) if isinstance(unit, FSDPModule) else ():
            yield from group.fsdp_params


def gathered_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """The whole parameters that FSDP has made so far. It shows them, and uses the same ones again and again."""
    return [record._unsharded_param for record in _records(model) if hasattr(record, "_unsharded_param")]


def record_of_a_shard(model: torch.nn.Module) -> Any:
    """FSDP's record of some parameter of ``model``, whose ``sharded_param`` is the shard; None if it shards none."""
    return next(_records(model), None)


def make_root(model: FSDPModule) -> None:
    """Let FSDP take ``model`` for the outermost module, which otherwise is the first one to be called."""
    model._get_fsdp_state()._lazy_init()


def before_backward(unit: FSDPModule, check: Callable[[], None]) -> None:
    """Call ``check`` whenever a backward comes to ``unit``, before FSDP does anything for it."""
    state = unit._get_fsdp_state()
    theirs = state._pre_backward

    def pre_backward(gradient: torch.Tensor) -> torch.Tensor:
        check()
        return theirs(gradient)

    vars(state)["_pre_backward"] = pre_backward


def backward_was_left(root: FSDPModule) -> bool:
    """Whether an exception ended a backward of ``root``: FSDP still waits for the end of one, and none is running."""
    return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued and not in_backward()


def drop_pass(root: FSDPModule) -> None:
    """Make FSDP forget the forward or backward that an exception ended, and all gradients it has not reduced yet."""
    state = root._get_fsdp_state()
    if state._is_root:  # else no forward has begun, or the root is further out, and recovers at its own next forward
        if hasattr(root, "reset_iter_state"):  # torch 2.13
            root.reset_iter_state()
        else:
            _reset_iter_state(root)
    for record in _records(root):  # type: ignore[arg-type]
        record.unsharded_accumulated_grad = None
        if hasattr(record, "_unsharded_param"):
            record._unsharded_param.grad = None


def _reset_iter_state(root: FSDPModule) -> None:
    """What torch 2.13 does."""
    state = root._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    for unit in (m for m in root.modules() if isinstance(m, FSDPModule)):  # type: ignore[attr-defined]
        unit._get_fsdp_state()._training_state = TrainingState.IDLE
        for group in _groups(unit):
            group.wait_for_unshard()
            group._post_forward_indices.clear()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def gather_ahead(root: FSDPModule) -> None:
    """Let the units of ``root`` gather their parameters in the background where they are asked to do so ahead."""
    root._set_unshard_async_op(True)


def sums_are_only_viewed(unit: FSDPModule, dtype: torch.dtype) -> bool:
    """Whether FSDP, given the averages of this unit's gradients in ``dtype``, makes them the shards' gradients as they
    are: it does not convert, accumulate or reduce them further, and no hook looks at them before backward is over."""
    groups = _groups(unit)
    shards = [p.sharded_param for group in groups for p in group.fsdp_params]  # also while whole ones are shown
    return all(group._all_reduce_hook is None for group in groups) and all(
        p.grad is None and p.dtype == dtype and p.device_mesh.ndim == 1 and not p._post_accumulate_grad_hooks
        for p in shards
        if p.requires_grad
    )


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let collectives of ``group`` that begin from now on raise after so many seconds."""
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        if hasattr(backend, "_set_default_timeout"):  # no pretended group does
            backend._set_default_timeout(datetime.timedelta(seconds=seconds))


def default_store() -> dist.Store:
    """The key-value store at which the ranks met."""
    return dist.distributed_c10d._get_default_store()

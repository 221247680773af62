"""DTensors as the engine uses them: the local tensor of a shard, and shards made from local tensors.

DTensor's private names are used here and nowhere else. DTensor is imported only once a tensor is one, because that
takes longer than loading a model of a gigabyte into one process.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
#: The placements of a DTensor, for ``map``.
placements_of = operator.attrgetter("_spec.placements")
_local, _grad = operator.attrgetter("_local_tensor"), operator.attrgetter("grad")


def is_shard(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is a DTensor. Recognises plain tensors without importing DTensor."""
    if type(tensor) in _PLAIN:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor is of a subclass, such as DTensor. Runs no Python code per tensor."""
    return set(map(type, tensors)) <= _PLAIN


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory, without dispatch; any other tensor is returned as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``local_tensor`` of each. Runs no Python code per tensor if all are DTensors or none is."""
    if are_plain(tensors):
        return list(tensors)
    try:
        return list(map(_local, tensors))
    except AttributeError:  # some are plain
        return [local_tensor(tensor) for tensor in tensors]


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """``grad`` of each. Runs no Python code per tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # DTensor does not override it, but would be asked each time
        return list(map(_grad, parameters))


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local``, on whatever device it is, as a DTensor with the placements of ``tensor``; ``local`` itself if
    ``tensor`` is plain."""
    if is_shard(tensor):
        from torch.distributed.tensor import DTensor

        return DTensor(local, tensor._spec, requires_grad=False)
    return local


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``, without dispatch for a DTensor."""
    return with_local(tensor, local_tensor(tensor).detach())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat bytes, in which any dtype can be sent. Collectives support only some
    dtypes: none knows 16-bit integers, and gloo knows neither bools nor 8-bit floats."""
    # A tensor of one element is contiguous whatever its stride; a new dimension has stride 1.
    return tensor.detach().view(-1).unsqueeze(-1).view(torch.uint8).view(-1)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor of any dtype, on every rank and without a gradient; any other tensor is returned as it is.
    Collective."""
    if not is_shard(tensor):
        return tensor
    # The bytes get a dimension of their own, so that they are sharded as the tensor is.
    local = local_tensor(tensor).detach().unsqueeze(-1).view(torch.uint8)
    shard: Any = as_shard(local, (*tensor.shape, tensor.itemsize), tensor.device_mesh, tensor.placements)
    with _without_advice():
        whole: torch.Tensor = shard.full_tensor()
    return whole.view(tensor.dtype).squeeze(-1)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Inside, suppress torch's advice (on every rank) to gather in one step what tensor parallelism and FSDP have both
    split by rows; it says itself that this cannot be done."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(_: logging.LogRecord) -> bool:
    return False


def as_shard(
    local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """``local`` as this rank's shard of a tensor of ``shape`` with these placements on ``mesh``."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride)


def shard_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's shard of ``whole``, which every rank has, on the mesh's device. Does not communicate."""
    return as_shard(part_of(whole, mesh, placements), whole.shape, mesh, placements)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A copy of this rank's part of ``whole``, which every rank has, on the device of ``whole``."""
    size, offset = local_box(whole.shape, mesh, placements)
    return whole[box_slices(size, offset)].clone(memory_format=torch.contiguous_format)


def cut_dims(tensor: DTensor) -> list[int]:
    """The dimensions of its mesh along which a DTensor is split over several ranks."""
    mesh = tensor.device_mesh
    return [i for i, placed in enumerate(tensor.placements) if mesh.size(i) > 1 and not placed.is_replicate()]


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard of a tensor of ``shape`` with these placements on ``mesh``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))
    return tuple(size), tuple(offset)


def box_slices(size: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    """The index of a ``local_box`` in the whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))

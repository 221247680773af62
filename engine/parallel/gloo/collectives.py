"""FSDP's all-gather and reduce-scatter on CPUs: each rank sends its parts to the others directly.

gloo's own all-gather and reduce-scatter pass the same bytes around a ring, step by step, and take about twice as long.
Here all parts travel at once, directly to where they are needed, while the rank computes: the parameters of the next
unit arrive while the current one runs, in forward and backward, and the gradients of a unit are sent while the one
before it runs. Gradients are added in rank order, whenever the parts arrive.

Ranks of one machine read the parts in each other's memory (``engine.parallel.gloo.shared_memory``). Parts that are too
large for that, and all parts between machines, go over gloo; then only the nonzero blocks of an embedding table's
gradients are sent (``engine.parallel.gloo.block_sparse``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import unserializable_hook

from engine.parallel.fsdp import gather_ahead, sums_are_only_viewed
from engine.parallel.gloo import shared_memory
from engine.parallel.gloo.block_sparse import BlockSparseParts, has_gathered_embedding
from engine.parallel.gloo.point_to_point import send_parts, wait_for
from engine.parallel.gloo.sharded_embedding import TABLE_BYTES
from engine.parallel.gloo.shared_memory import Message
from engine.torch_compat import in_backward, run_after_backward

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
# Tags that keep these messages apart from the user's own messages between two ranks.
GATHER_TAG, REDUCE_TAG = 0x9A7, 0x5ED


class _GlooMessage:
    """An exchange of parts over gloo, with the interface of ``shared_memory.Message``."""

    def __init__(self, send: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None, group: Any, tag: int) -> None:
        """
        Args:
            into: a buffer for each rank's message, already filled for this rank; None: allocated here.
        """
        me = group.rank()
        self._parts = list(into or [t if rank == me else torch.empty_like(t) for rank, t in enumerate(send)])
        self._works = send_parts(send, self._parts, group, tag)

    def parts(self) -> list[torch.Tensor]:
        """Wait for all messages. Returns them in rank order, this rank's own included."""
        for work in self._works:
            wait_for(work)
        return self._parts

    def done(self) -> None:
        """Called when the messages have been read."""


def _post(send: Sequence[torch.Tensor], group: Any, memories: shared_memory.SharedMemories) -> Message | None:
    """Start sending ``send[r]``, all of one size and dtype, to each other rank r through shared memory. Returns None,
    on all ranks, if they must go over gloo. Collective."""
    memory = memories.of(group)
    return memory.post(send) if memory is not None and memory.fits(send) else None


class _AllGatherWork(dist.Work):  # FSDP waits for nothing else
    """An all-gather in progress: this rank's row goes to all others, and their rows arrive."""

    def __init__(self, rows: Sequence[torch.Tensor], group: Any, memories: shared_memory.SharedMemories) -> None:
        super().__init__()
        send = [rows[group.rank()]] * len(rows)
        self._rows = rows
        self._coming: Message | _GlooMessage | None = _post(send, group, memories)
        if self._coming is None:
            self._coming = _GlooMessage(send, rows, group, GATHER_TAG)

    @property
    def open(self) -> bool:
        """Whether nobody has waited for the rows yet."""
        return self._coming is not None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        coming, self._coming = self._coming, None
        if coming is not None:
            for row, part in zip(self._rows, coming.parts(), strict=True):
                if part is not row:
                    row.copy_(part)
            coming.done()
        return True


class _Allocates:
    @torch.inference_mode(False)  # so that a training step can use what inference mode has gathered ahead
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocates):
    """What FSDP calls in place of ``dist.all_gather_single`` for a unit (its ``AllGather`` protocol)."""

    def __init__(self, memories: shared_memory.SharedMemories) -> None:
        self._memories = memories
        self._gather: _AllGatherWork | None = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        rows, me = output_tensor.view(group.size(), -1).unbind(), group.rank()
        if input_tensor.data_ptr() != rows[me].data_ptr():
            rows[me].copy_(input_tensor)
        gather = _AllGatherWork(rows, group, self._memories)
        if not async_op:
            gather.wait()
            return None
        self._gather = gather
        return gather

    @property
    def unused(self) -> bool:
        """Whether parameters were gathered ahead that no forward or backward has waited for."""
        return self._gather is not None and self._gather.open


class _DenseParts:
    """A reduce-scatter under way: ``send[r]`` goes to each other rank r, and its part for this rank comes back."""

    def __init__(self, coming: Message | _GlooMessage) -> None:
        self._coming = coming

    def add_into(self, output: torch.Tensor) -> None:
        """Wait for the parts and add them up, in the order of the ranks."""
        parts = self._coming.parts()
        torch.add(parts[0], parts[1], out=output)
        for part in parts[2:]:
            output.add_(part)
        self._coming.done()


class ReduceScatter(_Allocates):
    """What FSDP calls in place of ``dist.reduce_scatter_single`` for a unit (its ``ReduceScatter`` protocol)."""

    def __init__(self, unit: FSDPModule, pending: _PendingSum, memories: shared_memory.SharedMemories) -> None:
        self._unit, self._pending, self._memories = weakref.ref(unit), pending, memories
        self._has_gathered_embedding = has_gathered_embedding(unit)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in _OPS:
            raise ValueError(f"reduce-scatter of gradients: got the operation {op}, expected a sum or an average")
        self._pending.finish()
        send = input_tensor.view(group.size(), -1).unbind()
        parts: _DenseParts | BlockSparseParts
        if (message := _post(send, group, self._memories)) is not None:
            parts = _DenseParts(message)
        elif self._has_gathered_embedding and send[0].nbytes >= TABLE_BYTES:
            parts = BlockSparseParts(send, group)
        else:
            parts = _DenseParts(_GlooMessage(send, None, group, REDUCE_TAG))
        self._pending.begin(parts, input_tensor, output_tensor, len(send) if op == dist.ReduceOp.AVG else 1)
        unit = self._unit()
        later = in_backward() and op == dist.ReduceOp.AVG
        if unit is None or not later or not sums_are_only_viewed(unit, output_tensor.dtype):
            self._pending.finish()


class _PendingSum:
    """The sum of gradients that is under way between the ranks: at most one, for it holds a whole unit's."""

    def __init__(self) -> None:
        self._open: tuple[Any, ...] | None = None

    def begin(
        self, parts: _DenseParts | BlockSparseParts, whole: torch.Tensor, output: torch.Tensor, divisor: int
    ) -> None:
        """The parts of ``whole`` are under way; ``output`` has this rank's sum, divided, after ``finish``, which is
        called before the next and at the end of a backward."""
        self._open = parts, whole, output, divisor
        if in_backward():
            run_after_backward(self.finish)

    def finish(self) -> None:
        """Wait for the parts that are under way, and add them up."""
        if self._open is None:
            return
        (parts, _whole, output, divisor), self._open = self._open, None
        parts.add_into(output)
        if divisor > 1:
            output.div_(divisor)


class GlooCollectives:
    """The collectives of one sharded model on CPUs, and when its units are gathered ahead."""

    def __init__(self, model: nn.Module, order: Sequence[nn.Module]) -> None:
        """
        Args:
            order: the units as forward comes to them: each begins the gather of the next. One that forward does not
                come to next is found out, and is not gathered ahead again. Empty: nothing is gathered ahead.
        """
        self._pending, memories = _PendingSum(), shared_memory.SharedMemories()
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._gathers: dict[FSDPModule, AllGather] = {module: AllGather(memories) for module in modules}
        for module, gather in self._gathers.items():
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ReduceScatter(module, self._pending, memories))  # type: ignore[arg-type]
        self._before: dict[FSDPModule, FSDPModule] = {}
        if order:
            ordered = [m for m in (model, *order) if isinstance(m, FSDPModule)]
            self._before = dict(zip(ordered[1:], ordered, strict=False))
            for unit, before in self._before.items():
                before.set_modules_to_forward_prefetch([unit])
            gather_ahead(modules[0])

    @unserializable_hook
    def before_accumulation(self, _gradient: torch.Tensor) -> None:
        """A hook on shards: autograd is about to add to the gradient of one, which was read outside the units (in a
        penalty, say), and the sum that is under way may be that gradient."""
        self._pending.finish()

    def after_forward(self) -> None:
        """Stop gathering ahead the units that this forward did not reach."""
        for unit in [u for u in self._before if self._gathers[u].unused]:
            self._before.pop(unit).set_modules_to_forward_prefetch([])

    def before_forward(self) -> None:
        """Drop what was gathered ahead and not used: the parameters may have changed since."""
        for module, gather in self._gathers.items():
            if gather.unused:
                module.unshard()
                module.reshard()


def is_own_hook(hook: Any) -> bool:
    """Whether a hook on a shard is ``GlooCollectives.before_accumulation``, of whichever model."""
    return getattr(hook, "__func__", None) is GlooCollectives.before_accumulation


def use_gloo_collectives(model: nn.Module, mesh: DeviceMesh, order: Sequence[nn.Module]) -> GlooCollectives | None:
    """Let FSDP use these collectives for ``model`` where its shards are on several CPUs; None elsewhere.

    Args:
        mesh: the dimension that the shards are on.
        order: see ``GlooCollectives``.
    """
    return GlooCollectives(model, order) if over_gloo(mesh) else None


def over_gloo(mesh: DeviceMesh) -> bool:
    """Whether a dimension of the mesh has several ranks, on CPUs."""
    gloo = mesh.device_type == "cpu" and "gloo" in str(dist.get_backend_config(mesh.get_group()))
    return gloo and mesh.size() > 1

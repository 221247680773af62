"""Parameters and gradients between ranks over gloo: each rank sends its parts to the others, and adds up what it got.

gloo's own all-gather and reduce-scatter move the same bytes in turns around a ring and take about twice as long. Here
all parts travel at once, straight to where they are needed, and while they do the rank computes: the parameters of the
next unit come while this one works, in forward and backward, and the gradients of a unit go while the one before it
works. Gradients are added in the order of the ranks, whenever the parts arrive. Of the gradients of a table of
embeddings only what a batch read is sent (``engine.parallel.tables``).
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

from engine.parallel.parts import send_parts
from engine.parallel.rows import TABLE_BYTES
from engine.parallel.tables import FewRows, reads_a_table
from engine.torch_compat import gather_ahead, in_backward, sums_are_only_viewed

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
# So that no message of the user's own between two ranks is taken for one of these.
GATHER_TAG, REDUCE_TAG = 0x9A7, 0x5ED


class _Parts(dist.Work):  # FSDP waits for nothing else
    """Parts that are under way."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    @property
    def open(self) -> bool:
        """Whether nobody has waited for them yet."""
        return bool(self._works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return True


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeShards(_Allocates):
    """What FSDP calls in place of ``dist.all_gather_single`` for a unit (its ``AllGather`` protocol)."""

    def __init__(self) -> None:
        self._parts: _Parts | None = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        rows, me = output_tensor.view(group.size(), -1), group.rank()
        if input_tensor.data_ptr() != rows[me].data_ptr():
            rows[me].copy_(input_tensor)
        parts = _Parts(send_parts([rows[me]] * len(rows), rows.unbind(), group, GATHER_TAG))
        if not async_op:
            parts.wait()
            return None
        self._parts = parts
        return parts

    @property
    def unused(self) -> bool:
        """Whether parameters were asked for that no forward or backward has waited for."""
        return self._parts is not None and self._parts.open


class _Whole:
    """Parts of one tensor on their way: ``send[r]`` to each other rank r, and from it what it has for this one."""

    def __init__(self, send: Sequence[torch.Tensor], group: Any) -> None:
        me = group.rank()
        self._parts = [send[me] if rank == me else torch.empty_like(send[me]) for rank in range(len(send))]
        self._works = send_parts(send, self._parts, group, REDUCE_TAG)

    def add_into(self, output: torch.Tensor) -> None:
        """Wait for the parts and add them up, in the order of the ranks."""
        for work in self._works:
            work.wait()
        torch.add(self._parts[0], self._parts[1], out=output)
        for part in self._parts[2:]:
            output.add_(part)


class ExchangeAndAdd(_Allocates):
    """What FSDP calls in place of ``dist.reduce_scatter_single`` for a unit (its ``ReduceScatter`` protocol)."""

    def __init__(self, unit: FSDPModule, sums: _Sums) -> None:
        self._unit, self._sums, self._reads_a_table = weakref.ref(unit), sums, reads_a_table(unit)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in _OPS:
            raise ValueError(f"reduce-scatter of gradients: got the operation {op}, expected a sum or an average")
        kind = FewRows if self._reads_a_table and input_tensor.nbytes >= TABLE_BYTES * group.size() else _Whole
        self._sums.begin(output_tensor, input_tensor, group, op == dist.ReduceOp.AVG, kind)
        unit = self._unit()
        later = in_backward() and op == dist.ReduceOp.AVG
        if unit is None or not later or not sums_are_only_viewed(unit, output_tensor.dtype):
            self._sums.finish()


class _Sums:
    """The sums of gradients that a model's ranks have begun; at most one, for it holds a unit's whole gradients."""

    def __init__(self) -> None:
        self._open: tuple[Any, ...] | None = None

    def begin(
        self, output: torch.Tensor, whole: torch.Tensor, group: Any, average: bool, kind: type[_Whole | FewRows]
    ) -> None:
        """Begin to exchange the parts of ``whole``; ``output`` has this rank's after ``finish``, or after backward."""
        self.finish()
        send = whole.view(group.size(), -1).unbind()
        self._open = kind(send, group), whole, output, average, len(send)
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Wait for the parts that are under way, and add them up."""
        if self._open is None:
            return
        (parts, _, output, average, count), self._open = self._open, None
        parts.add_into(output)
        if average:
            output.div_(count)


class Exchange:
    """The exchanges of one sharded model on the CPU."""

    def __init__(self, model: nn.Module, order: Sequence[nn.Module]) -> None:
        """
        Args:
            order: the units as forward comes to them: each begins the gather of the next. One that forward does not
                come to next is found out, and is not gathered ahead again. Empty: nothing is gathered ahead.
        """
        sums = _Sums()
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._gathers: dict[FSDPModule, ExchangeShards] = {module: ExchangeShards() for module in modules}
        for module, gather in self._gathers.items():
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ExchangeAndAdd(module, sums))  # type: ignore[arg-type]
        self._before: dict[FSDPModule, FSDPModule] = {}
        if order:
            ordered = [m for m in (model, *order) if isinstance(m, FSDPModule)]
            self._before = dict(zip(ordered[1:], ordered, strict=False))
            for unit, before in self._before.items():
                before.set_modules_to_forward_prefetch([unit])
            gather_ahead(modules[0])

    def after_forward(self) -> None:
        """Stop gathering ahead what this forward did not come to."""
        for unit in [u for u in self._before if self._gathers[u].unused]:
            self._before.pop(unit).set_modules_to_forward_prefetch([])

    def before_forward(self) -> None:
        """Drop what was gathered ahead and not used: the parameters may have changed since."""
        for module, gather in self._gathers.items():
            if gather.unused:
                module.unshard()
                module.reshard()


def exchange(model: nn.Module, mesh: DeviceMesh, order: Sequence[nn.Module]) -> Exchange | None:
    """Let a sharded model exchange its parameters and gradients so, where its shards are on several CPUs.

    Args:
        mesh: the dimension that the shards are on.
        order: see ``Exchange``.
    """
    return Exchange(model, order) if over_gloo(mesh) else None


def over_gloo(mesh: DeviceMesh) -> bool:
    """Whether a dimension of the mesh has several ranks, on CPUs."""
    gloo = mesh.device_type == "cpu" and "gloo" in str(dist.get_backend_config(mesh.get_group()))
    return gloo and mesh.size() > 1

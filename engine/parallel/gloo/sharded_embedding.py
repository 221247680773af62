"""Embedding tables that are never gathered, on CPUs: ranks send each other the rows that a batch reads.

A table may be most of a small model, and a batch reads a few hundred of its rows. Where a model says that it does
nothing else with a table (``model.looked_up_tables()``), no rank gathers it and none has a gradient of all of it: each
rank tells the others which of their rows it reads, and is sent those; in backward their gradients go the same way back.
The parameter is the shard that FSDP would have made of it, and its gradient the average that FSDP would have given.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine.ops import zero_pages
from engine.ops.autograd import once_differentiable
from engine.ops.embeddings import Embedding, check_ids, gives_gradient, takes_rows
from engine.ops.table_memory import LARGE
from engine.parallel.gloo import shared_memory
from engine.parallel.gloo.point_to_point import send_parts, wait_for
from engine.tensors import shard_of

TABLE_BYTES = 2**18  # of a part; a smaller one is gathered sooner than its rows are asked for
# So that no message of the user's own between two ranks is taken for one of these.
_WANTED_TAG, _ROWS_TAG, _GRADIENTS_TAG = 0x2E1, 0x2E2, 0x2E3


def shard_embeddings(
    model: nn.Module, mesh: DeviceMesh, units: Collection[nn.Module], dtype: torch.dtype | None
) -> set[nn.Parameter]:
    """Shard the tables that ``model`` only looks up, so that no rank gathers them. Returns their parameters.

    Args:
        mesh: one dimension, over whose ranks the rows are split.
        units: modules that the caller wants gathered.
        dtype: of the embeddings that are looked up; None: the table's.
    """
    tables: list[nn.Embedding] = getattr(model, "looked_up_tables", list)()
    places: dict[torch.Tensor, int] = {}
    memories = shared_memory.SharedMemories()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[parameter] = places.get(parameter, 0) + 1
    for table in tables:
        # What is derived from these, or tied, is used in ways that are not known here.
        if type(table) not in (nn.Embedding, Embedding) or "forward" in vars(table):
            continue
        if places[table.weight] > 1 or table in units:
            continue
        if table.weight.nbytes < TABLE_BYTES * mesh.size() or table.max_norm is not None or table.scale_grad_by_freq:
            continue
        part = shard_of(table.weight.detach(), mesh, (Shard(0),))
        table.weight = nn.Parameter(part, requires_grad=table.weight.requires_grad)
        table.forward = _ShardedForward(table, dtype, memories)  # type: ignore[method-assign, assignment]
    return {p for table in tables if is_sharded_embedding(table) for p in table.parameters()}


def is_sharded_embedding(module: nn.Module) -> bool:
    """Whether this table is looked up by messages instead of being gathered."""
    return isinstance(vars(module).get("forward"), _ShardedForward)


class _ShardedForward:
    """The forward of a table whose rows are on several ranks."""

    def __init__(self, table: nn.Embedding, dtype: torch.dtype | None, memories: shared_memory.SharedMemories) -> None:
        self._table, self._dtype, self._memories = weakref.ref(table), dtype, memories

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Collective.

        Args:
            ids: integers of any shape.

        Returns:
            (*shape of ids, width).

        Raises:
            IndexError: an id is not of the table, as ``nn.Embedding`` does.
        """
        table = self._table()
        assert table is not None and isinstance(table.weight, DTensor)
        flat, words = ids.reshape(-1), len(table.weight)
        check_ids(flat, words)
        group = table.weight.device_mesh.get_group()
        exchange = _RowExchange(flat, words, group, self._memories.of(group), table.padding_idx)
        dtype, parameter = self._dtype or table.weight.dtype, weakref.ref(table.weight)
        found: torch.Tensor = _LookUp.apply(table.weight.to_local(), exchange, dtype, parameter)
        return found.view(*ids.shape, table.embedding_dim)


class _RowExchange:
    """Which rows travel for a batch: ``read[r]`` of rank r's come here, ``asked[r]`` of this rank's go to rank r."""

    def __init__(
        self,
        ids: torch.Tensor,
        words: int,
        group: Any,
        memory: shared_memory.SharedMemory | None,
        padding: int | None,
    ) -> None:
        self.group, self.memory, self.ranks, self.me = group, memory, group.size(), group.rank()
        wanted = torch.zeros(words, dtype=torch.bool)
        wanted[ids] = True
        # The rows that are read stand in the order of the table, so those of one rank are next to each other.
        place = wanted.cumsum(0) - 1
        self.at = place[ids]
        self.padding = int(place[padding]) if padding is not None and wanted[padding] else -1  # is not trained
        parts = list(wanted.split(-(-words // self.ranks)))
        parts += [wanted[:0]] * (self.ranks - len(parts))  # the last ranks may keep no rows
        self.read = [int(part.sum()) for part in parts]
        self.count = sum(self.read)
        asking = [torch.empty_like(parts[self.me]) for _ in range(self.ranks)]
        asking[self.me] = parts[self.me]
        self.swap(parts, asking, _WANTED_TAG)
        self.asked = [which.nonzero()[:, 0] for which in asking]

    def swap(self, send: Sequence[torch.Tensor], into: Sequence[torch.Tensor], tag: int) -> None:
        """Send ``send[r]`` to each other rank r and receive ``into[r]`` from it."""
        if self.memory is None:
            for work in send_parts(send, into, self.group, tag):
                wait_for(work)
            return
        message = self.memory.post(send, into)
        for rank, part in enumerate(message.parts()):
            if rank != self.me:
                into[rank].copy_(part)
        message.done()


class _LookUp(torch.autograd.Function):
    """(ids, width): rows of all ranks' parts of a table; the gradient is the average over the ranks of this part's."""

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        exchange: _RowExchange,
        dtype: torch.dtype,
        parameter: weakref.ref[torch.Tensor],
    ) -> torch.Tensor:
        rows = part.new_empty(exchange.count, part.shape[1], dtype=dtype)
        into = rows.split(exchange.read)
        send = [part[asked].to(dtype) for asked in exchange.asked]
        into[exchange.me].copy_(send[exchange.me])
        exchange.swap(send, into, _ROWS_TAG)
        ctx.exchange, ctx.part, ctx.parameter = exchange, part.detach(), parameter
        return rows[exchange.at]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        exchange, part, parameter = ctx.exchange, ctx.part, ctx.parameter()
        # A row's own sum, and the ranks', in no fewer bits than a mean of gradients is reduced in.
        wide = torch.promote_types(part.dtype, torch.float32)
        sums = torch.ops.aten.embedding_dense_backward(
            gradient.to(wide), exchange.at, exchange.count, exchange.padding, False
        )
        send, counts = sums.split(exchange.read), [len(asked) for asked in exchange.asked]
        received = sums.new_empty(sum(counts), part.shape[1])
        into = received.split(counts)
        into[exchange.me].copy_(send[exchange.me])
        exchange.swap(send, into, _GRADIENTS_TAG)
        rows, at = torch.cat(exchange.asked).unique(return_inverse=True)
        # Added in the order of the ranks.
        sums = sums.new_zeros(len(rows), part.shape[1]).index_add_(0, at, received.div_(exchange.ranks))
        if parameter is not None and takes_rows(parameter, rows, sums):
            return None, None, None, None
        if part.nbytes < LARGE:
            whole = torch.zeros_like(part, dtype=wide)
        else:
            gives_gradient(parameter)
            whole = zero_pages.zeros(part.shape, wide)
        return whole.index_copy_(0, rows, sums).to(part.dtype), None, None, None

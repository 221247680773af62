"""``PipelineTransformerBlockList``: blocks on the stages of a pipeline, inside the user's own training loop."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import runtime
from engine.bmtrain.block import Block, TransformerBlockList
from engine.collectives import first_difference
from engine.parallel.mesh import device_mesh
from engine.parallel.pipeline.p2p import Neighbours
from engine.parallel.pipeline.schedule import split_units
from engine.parallel.pipeline.stages import is_absent
from engine.torch_compat import all_gather_flat


class PipelineTransformerBlockList(TransformerBlockList):
    """A ``TransformerBlockList`` whose blocks are divided among the stages (``init_distributed(pipe_size=2)``).

    As in BMTrain, every rank has its own batch, and computes everything outside the list for it. The list gathers the
    batches of the ranks of a pipeline, cuts them along dimension 0 into ``num_micro_batches``, and sends each through
    the stages; each rank gets back the hidden states of its own batch. Forward of all microbatches precedes backward of
    the first, which runs in ``loss.backward()``. Gradients are averages over ranks, as everywhere. Without a pipeline
    it is a ``TransformerBlockList``.

    Args:
        modules: blocks; at least as many as stages. If they do not divide evenly, the first stages have one more.
        num_hidden: 1.

    Raises:
        ValueError: num_hidden is not 1.
    """

    pipelines_blocks = True  # engine.shard keeps only the blocks of this stage

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        if num_hidden != 1:
            raise ValueError(f"num_hidden of a PipelineTransformerBlockList is {num_hidden!r}, expected 1")
        super().__init__(modules)
        self._neighbours: Neighbours | None = None
        if runtime.stages() > 1:
            for block in self:
                # Keep gathered parameters for all microbatches, as in BMTrain.
                assert isinstance(block, Block)
                block._block_level = block._block_level or 2

    def forward(
        self, *args: Any, batch_related: Collection[int] | None = None, return_hidden_states: bool = False
    ) -> Any:
        """The hidden states (batch, ...) after the last block. Collective over the ranks of a pipeline.

        Args:
            args: the hidden states, then further arguments of every block: tensors whose dimension 0 is the batch are
                cut as the hidden states are; other values, this rank's, are passed whole with every microbatch.
            batch_related: indices, after the hidden states, of the arguments that are cut; None or empty: as above.
            return_hidden_states: see ``TransformerBlockList``; not with a pipeline.

        Raises:
            ValueError: the ranks of a pipeline give different shapes (raised on every rank); return_hidden_states with
                a pipeline; the list is not sharded; a block returns another shape than it was given.
        """
        if runtime.stages() == 1:
            return super().forward(*args, return_hidden_states=return_hidden_states)
        if return_hidden_states:
            raise ValueError(
                "return_hidden_states: not supported with pipe_size, under which they are on several ranks; leave it "
                "out"
            )
        mine = split_units(len(self), runtime.stages())[runtime.stage()]
        if not all(is_absent(block) for i, block in enumerate(self) if i not in mine):
            raise ValueError(
                "the list has all its blocks on this rank: call init_parameters, load or engine.shard first"
            )
        hidden, *rest = args
        cut = [
            isinstance(x, Tensor) and (i in batch_related if batch_related else x.dim() > 0 and len(x) == len(hidden))
            for i, x in enumerate(rest)
        ]
        group = device_mesh()["pp"].get_group()
        _check_shapes([hidden, *rest], group)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # so that every stage has a backward
        tensors = [i for i, x in enumerate(rest) if isinstance(x, Tensor)]
        kinds = (True, *(cut[i] for i in tensors))
        whole, *moved = _Collect.apply(group, kinds, hidden, *(rest[i] for i in tensors))
        for i, x in zip(tensors, moved, strict=True):
            rest[i] = x
        micros = runtime.current().num_micro_batches or runtime.stages()
        pieces = [x.chunk(micros) if is_cut else None for x, is_cut in zip(rest, cut, strict=True)]
        outputs = []
        neighbours = self._ring()
        for number, x in enumerate(whole.chunk(micros)):
            given = [x if piece is None else piece[number] for x, piece in zip(rest, pieces, strict=True)]
            x = _FromStageBefore.apply(x, neighbours)
            shape = x.shape
            for index in mine:
                x = self[index](x, *given)
                x = x[0] if isinstance(x, tuple) and len(x) == 1 else x
                if not isinstance(x, Tensor) or x.shape != shape:
                    raise ValueError(
                        f"block {index} must return hidden states of the shape {tuple(shape)} it was given"
                    )
            outputs.append(_ToNextStage.apply(x, neighbours, whole.dtype))
        return _Deal.apply(torch.cat(outputs), group)

    def _ring(self) -> Neighbours:
        if self._neighbours is None:
            self._neighbours = Neighbours(device_mesh())
        self._neighbours.flush()
        return self._neighbours


def _check_shapes(values: list[Any], group: dist.ProcessGroup) -> None:
    shapes = [(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else None for x in values]
    other = first_difference(zlib.crc32(repr(shapes).encode()), group)
    if other is not None:
        raise ValueError(
            f"stage {group.rank()} of a pipeline gives its PipelineTransformerBlockList {shapes} but stage {other} "
            "gives other shapes: their batches must have the same size; pad them"
        )


class _Collect(torch.autograd.Function):
    """Gather the batches of all ranks of a pipeline; other arguments are unchanged."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, cut: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut = group, cut
        found = []
        for x, is_cut in zip(tensors, cut, strict=True):
            out = x.view_as(x)
            if is_cut:
                out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
                all_gather_flat(out, x, group)
            if not x.is_floating_point():
                ctx.mark_non_differentiable(out)
            found.append(out)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        size, rank = ctx.group.size(), ctx.group.rank()
        found: list[Tensor | None] = []
        for grad, is_cut, needed in zip(grads, ctx.cut, ctx.needs_input_grad[2:], strict=True):
            if not needed:
                found.append(None)
                continue
            total = grad.clone(memory_format=torch.contiguous_format)  # zeros if this stage has not used it
            dist.all_reduce(total, group=ctx.group)  # each stage has the addend from its blocks
            # Inside the list losses are scaled by 1 / size (see _Deal); the loss of this batch is not.
            found.append(total.chunk(size)[rank] * size if is_cut else total)
        return None, None, *found


class _FromStageBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: Neighbours) -> Tensor:
        ctx.neighbours = neighbours
        if runtime.stage() == 0:
            return x.view_as(x)
        x = torch.empty_like(x, memory_format=torch.contiguous_format)
        neighbours.receive(x, forward=True)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if runtime.stage() == 0:
            return grad, None
        ctx.neighbours.send(grad, forward=False)
        return torch.zeros_like(grad), None


class _ToNextStage(torch.autograd.Function):
    """Sends hidden states in the list's input dtype: a block may return the dtype that its policy computes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: Neighbours, dtype: torch.dtype) -> Tensor:
        ctx.neighbours, ctx.dtype = neighbours, dtype
        if runtime.stage() < runtime.stages() - 1:
            neighbours.send(x.detach().to(dtype), forward=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if runtime.stage() < runtime.stages() - 1:
            given = torch.empty_like(grad, dtype=ctx.dtype, memory_format=torch.contiguous_format)
            ctx.neighbours.receive(given, forward=False)
            grad = given.to(grad.dtype)
        return grad, None, None


class _Deal(torch.autograd.Function):
    """Scatter the output of the last stage: each rank gets its own batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        last = group.size() - 1
        out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        pieces = [piece.contiguous() for piece in x.chunk(group.size())] if group.rank() == last else None
        dist.scatter(out, pieces, group=group, group_src=last)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size, rank = ctx.group.size(), ctx.group.rank()
        whole = grad.new_empty(size * grad.shape[0], *grad.shape[1:])
        dist.gather(
            grad.contiguous(),
            list(whole.chunk(size)) if rank == size - 1 else None,
            group=ctx.group,
            group_dst=size - 1,
        )
        # The blocks see the losses of all ranks of the pipeline, but FSDP averages their gradients over one stage only.
        # Other stages receive their gradient from the next stage and ignore this one.
        return whole / size if rank == size - 1 else whole.zero_(), None

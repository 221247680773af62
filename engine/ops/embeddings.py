"""Tables of embeddings whose gradients cost what the looked-up rows do, and are right in 16 bits on a CPU too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops.table_memory import TableMemory, table_memory

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int, memory: TableMemory | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding, ctx.memory = table.shape, padding, memory
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (ids,), memory = ctx.saved_tensors, ctx.memory
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        rows, at = ids.unique(return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(wide, at, len(rows), -1, False).to(grad.dtype)
        if ctx.padding >= 0:
            sums[rows == ctx.padding] = 0.0
        whole = grad.new_empty(ctx.shape) if memory is None else memory.gradients.take(ctx.shape, grad.dtype)
        return None, whole.zero_().index_copy_(0, rows.long(), sums), None, None


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """F.embedding, whose gradients of a row are added up in fp32.

    On a CPU torch adds those of a table in 16 bits up in 16 bits, where a sum stops growing at 256 (bf16) or 2,048
    (fp16) times what is added: of a row that 4,096 tokens look up, one of two token types say, a sixteenth is left.

    Args:
        ids: integers of any shape. weight: (rows, width). padding_idx: a row that is not trained.

    Returns:
        (*shape of ids, width).
    """
    if weight.is_cpu and weight.requires_grad and torch.is_grad_enabled():
        memory = table_memory(weight)
        plain = type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
        if memory is not None or (plain and weight.dtype in _SIXTEEN_BITS):
            padding = -1 if padding_idx is None else padding_idx % len(weight)
            return _Lookup.apply(ids, weight, padding, memory)
    return F.embedding(ids, weight, padding_idx)


class Embedding(nn.Embedding):
    """torch's, looked up by `embedding`. Raises ValueError for max_norm, scale_grad_by_freq and sparse gradients, which
    that does not know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = {"max_norm": self.max_norm, "scale_grad_by_freq": self.scale_grad_by_freq, "sparse": self.sparse}
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(f"Embedding does not know {', '.join(wrong)}: leave it out, or use torch.nn.Embedding")

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx)

"""Tables of embeddings whose gradients are right in 16 bits on a CPU too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops.autograd import once_differentiable

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = len(weight), padding
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        wide = torch.ops.aten.embedding_dense_backward(gradient.float(), ids, ctx.rows, ctx.padding, False)
        return None, wide.to(gradient.dtype), None


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """F.embedding, whose gradients of a row are added up in fp32.

    On a CPU torch adds those of a table in 16 bits up in 16 bits, where a sum stops growing at 256 (bf16) or 2,048
    (fp16) times what is added: of a row that 4,096 tokens look up, one of two token types say, a sixteenth is left.

    Args:
        ids: integers of any shape. weight: (rows, width). padding_idx: a row that is not trained.

    Returns:
        (*shape of ids, width).
    """
    plain = type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    trained = weight.requires_grad and torch.is_grad_enabled()
    if weight.device.type == "cpu" and weight.dtype in _SIXTEEN_BITS and trained and plain:
        padding = -1 if padding_idx is None else padding_idx % len(weight)
        return _Lookup.apply(ids, weight, padding)
    return F.embedding(ids, weight, padding_idx)


class Embedding(nn.Embedding):
    """torch's, looked up by `embedding`; without max_norm, scale_grad_by_freq and sparse gradients."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx)

"""A convolution along the tokens of each sequence of a packed batch."""

import torch
from torch import Tensor, nn

from engine.ops import linear
from modelcenter.layers.packing import Packed


class TokenConvolution(nn.Module):
    """nn.Conv1d over each sequence, padded with zeros at both ends. x: (T, in) -> (T, out).

    Attributes:
        weight: (out, in, kernel_size), as in nn.Conv1d; kernel_size is odd. bias: (out,).
    """

    def __init__(self, in_features: int, out_features: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, kernel_size).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        width = self.weight.shape[2]
        rows = x if ctx.split is None else ctx.split.gather_units(x)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        near = rows.index_select(0, _neighbours(ctx, width // 2).flatten()).view(x.shape[0], width * x.shape[1])
        return linear(near, self.weight.movedim(2, 1).flatten(1), self.bias)


def _neighbours(ctx: Packed, reach: int) -> Tensor:
    """(rows, 2 * reach + 1): for each of this rank's tokens in a unit, the indices in the whole batch of the tokens up
    to `reach` before and after it; the number of tokens in the batch where the sequence has none."""
    split, cu = ctx.split, ctx.cu_seqlens.long()
    total = ctx.num_tokens * (1 if split is None else split.size)
    start, end = (torch.repeat_interleave(x, cu.diff(), output_size=total)[:, None] for x in (cu[:-1], cu[1:]))
    at = torch.arange(total, device=cu.device)[:, None] + torch.arange(-reach, reach + 1, device=cu.device)
    at = torch.where((at >= start) & (at < end), at, total)
    return at if split is None else split.of_units(split.local(at))

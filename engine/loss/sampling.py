"""Classes drawn from the softmax of a vocabulary's head, without ever holding all logits.

By the inverse of the distribution function: one number in [0, 1) for each row decides it, so who draws these numbers
decides what is sampled, however the rows are cut into batches and the vocabulary into parts. Sums of probabilities are
taken in fp64, as those of many classes in fp32 would move the borders between them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.loss.chunks import ChunkedHead
from engine.loss.vocabulary import ExtendedVocabulary, VocabularyShard, local_vocabulary
from engine.ops.autocast import as_factors

DRAW_BITS = 53  # of a draw: as many as the mantissa of fp64 holds
_BLOCK = 256  # classes whose masses are added up first: only the block that is hit is looked into


@torch.no_grad()
def sample_classes(
    hidden: Tensor,
    weight: Tensor | ExtendedVocabulary,
    bias: Tensor | None,
    draws: Tensor,
    *,
    cap: float | None = None,
) -> Tensor:
    """For each row a class of softmax(hidden @ weight.T + bias): the first whose cumulative probability is greater than
    draws / 2**53. Without a gradient.

    Args:
        hidden: (n, hidden_size). weight, bias, cap: as for linear_cross_entropy. draws: (n,) int64, from 0 to
            2**53 - 1; whole numbers, as mixed precision rounds those that are not where a model is called.

    Returns:
        (n,) int64. Under tensor parallelism the same on all ranks. Of logits that are not finite some class.
    """
    table, bias, shard = local_vocabulary(hidden, weight, bias)
    hidden, table, bias = as_factors(hidden, table, bias)
    head = ChunkedHead(hidden, table, bias, shard, fused=False, cap=cap)
    found = torch.empty_like(draws)
    for chunk in head.chunks:
        logits = head.logits(chunk)[:, : head.classes].float()
        found[chunk] = _invert(logits, draws[chunk, None].double() * 2.0**-DRAW_BITS, shard)
        del logits  # before the next chunk, which takes its memory
    return found


def _invert(logits: Tensor, uniform: Tensor, shard: VocabularyShard | None) -> Tensor:
    """(rows,) classes, of this rank's part of the logits, fp32, which are overwritten; uniform: (rows, 1) fp64."""
    columns = logits.shape[1]
    top = logits.amax(1, keepdim=True) if columns else logits.new_full((len(logits), 1), -torch.inf)
    if shard is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    blocks = max(1, -(-columns // _BLOCK))
    masses = F.pad(logits.sub_(top).exp_(), (0, blocks * _BLOCK - columns)).unflatten(1, (blocks, _BLOCK))
    ends = masses.sum(2, dtype=torch.float64).cumsum(1)
    total = ends[:, -1:]
    if shard is None:
        target, own = uniform * total, None
    else:
        target, own = _within_rank(uniform, total, shard)
    block, rest = _first_beyond(ends, target)
    inside = masses.gather(1, block[..., None].expand(-1, 1, _BLOCK)).squeeze(1).double().cumsum(1)
    place, _ = _first_beyond(inside, rest)
    found = (block * _BLOCK + place).squeeze(1).clamp_(max=max(columns - 1, 0))
    if shard is None or own is None:
        return found
    return shard.sum((found + shard.first) * own.squeeze(1))


def _within_rank(uniform: Tensor, total: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """(what is left of the mass to pass on the rank whose classes it ends in, whether that is this one), (rows, 1)."""
    rank = shard.group.rank()
    totals = total.new_zeros(len(total), shard.group.size())
    totals[:, rank : rank + 1] = total
    ends = shard.sum(totals).cumsum(1)
    owner, rest = _first_beyond(ends, uniform * ends[:, -1:])
    return rest, owner == rank


def _first_beyond(ends: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the first of `ends`, (rows, n) ascending, that is greater than the target (rows, 1); what the target
    goes beyond the one before it). A target that rounding has put at the end counts as within the last that rises."""
    target = torch.minimum(target, torch.nextafter(ends[:, -1:], torch.zeros_like(target)))
    at = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)  # of NaN: anything
    return at, target - F.pad(ends, (1, 0)).gather(1, at)

"""Classes sampled from the softmax of a vocabulary head, without ever holding all logits.

By inverse transform sampling: one number in [0, 1) decides each row, so the samples depend only on these numbers, not
on how rows are cut into batches or the vocabulary into parts. Probabilities are summed in fp64, because fp32 sums over
many classes would shift the boundaries between them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.loss.chunks import ChunkedHead
from engine.loss.vocabulary import ExtendedVocabulary, VocabularyShard, local_vocabulary
from engine.ops.autocast import as_factors

DRAW_BITS = 53  # bits of a draw: those of an fp64 significand
_BLOCK = 256  # classes whose probabilities are summed first; only the block that is hit is searched


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
    draws / 2**53. Has no gradient.

    Args:
        hidden: (n, hidden_size). weight, bias, cap: as in linear_cross_entropy. draws: (n,) int64, from 0 to 2**53 - 1;
            integers, because mixed precision rounds floating-point inputs of a model.

    Returns:
        (n,) int64; under tensor parallelism the same on all ranks. For logits that are not finite, an arbitrary class.
    """
    table, bias, shard = local_vocabulary(hidden, weight, bias)
    hidden, table, bias = as_factors(hidden, table, bias)
    head = ChunkedHead(hidden, table, bias, shard, fused=False, cap=cap)
    found = torch.empty_like(draws)
    for chunk in head.chunks:
        logits = head.logits(chunk)[:, : head.classes].float()
        found[chunk] = _invert(logits, draws[chunk, None].double() * 2.0**-DRAW_BITS, shard)
        del logits  # so that the next chunk reuses the memory
    return found


def _invert(logits: Tensor, uniform: Tensor, shard: VocabularyShard | None) -> Tensor:
    """The sampled classes (rows,). logits: this rank's part, fp32, overwritten. uniform: (rows, 1) fp64."""
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
    """((rows, 1) the mass to pass within the classes of the rank that is hit, (rows, 1) whether that is this rank)."""
    rank = shard.group.rank()
    totals = total.new_zeros(len(total), shard.group.size())
    totals[:, rank : rank + 1] = total
    ends = shard.sum(totals).cumsum(1)
    owner, rest = _first_beyond(ends, uniform * ends[:, -1:])
    return rest, owner == rank


def _first_beyond(ends: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the first of the ascending `ends` (rows, n) that is greater than target (rows, 1); target minus the end
    before it). A target that was rounded up to the last end counts as within the last interval that is not empty."""
    target = torch.minimum(target, torch.nextafter(ends[:, -1:], torch.zeros_like(target)))
    at = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)  # arbitrary for NaN
    return at, target - F.pad(ends, (1, 0)).gather(1, at)

"""Attention of a rectangle whose scores have a soft cap, cap tanh(s / cap), by torch's operators: what a GPU runs, as
none of torch's flash kernels takes one, and on any device the attention of a part of a sequence.

Scores of long sequences are made for some of the queries at a time, of the keys that these may see, and once more in
backward: memory grows with the length, and a window costs what it covers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.ops import eager
from modelcenter.layers.attention_options import AttentionOptions

# Scores in all heads that are made at once and kept for backward; those of a larger rectangle are made in blocks of so
# many, which are products of thousands of rows.
_KEPT = 1 << 24


# The key of dropout changes at each step: it must not be a constant of a compiled graph.
@eager
def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, options: AttentionOptions, first: int = 0
) -> Tensor:
    """q (n, heads, queries, head_dim), k and v (n, kv_heads, keys, head_dim) -> as q.

    seen: as Mask.rectangle gives it. first: the place of the first query among the keys.
    """
    (n, heads, queries, _), keys, drop = q.shape, k.shape[2], options.drop
    key, numbers = 0, None
    if drop.p and q.device.type == "cpu":
        total = n * queries
        key, numbers = drop.key, drop.numbers(total, slice(0, total), n, heads).view(n, heads, queries)

    def block(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, numbers: Tensor | None) -> Tensor:
        return _attend(q, k, v, seen, numbers, options, key)

    if n * heads * queries * keys <= _KEPT:
        return block(q, k, v, seen, numbers)
    mixed, step = [], max(1, _KEPT // (n * heads * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        columns = slice(*_keys_of(first + rows.start, first + rows.stop, keys, options))
        of_rows = seen if seen is None or seen.shape[-2] == 1 else seen[..., rows, :]
        parts = (
            *(x[:, :, part] for x, part in ((q, rows), (k, columns), (v, columns))),
            None if of_rows is None else of_rows[..., columns],
            None if numbers is None else numbers[:, :, rows],
        )
        mixed.append(checkpoint(block, *parts, use_reentrant=False, preserve_rng_state=drop.p > 0))
    return torch.cat(mixed, 2)


def _keys_of(start: int, stop: int, keys: int, options: AttentionOptions) -> tuple[int, int]:
    """The keys [begin, end) beyond which the queries at places start to stop - 1 see none."""
    mask, window = options.mask, options.mask.window
    if mask.segments is not None:
        return 0, keys
    ahead = 1 if mask.causal else keys if window is None else window
    # On a CPU a weight is dropped by the place of its key among those that are here.
    behind = None if options.drop.p else window
    return 0 if behind is None else max(0, start - behind + 1), min(keys, stop - 1 + ahead)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, numbers: Tensor | None, options: AttentionOptions, key: int
) -> Tensor:
    """The query heads that share a key head are so many more rows of one product."""
    n, groups, cap = q.shape[0], k.shape[1], options.cap
    assert cap is not None
    scores = q.reshape(n, groups, -1, q.shape[3]) @ k.transpose(2, 3)
    # A product in 16 bits has been rounded, as in transformers; what follows rounds no more.
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = ((wide * (options.scale / cap)).tanh() * cap).view(*q.shape[:3], -1)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen
    weights = scores.softmax(-1)
    if numbers is not None:
        weights = options.drop.drop(weights, key, numbers.flatten())
    elif options.drop.p:
        weights = F.dropout(weights, options.drop.p)
    return (weights.to(v.dtype).view(n, groups, -1, weights.shape[3]) @ v).view(q.shape)

"""Attention over a rectangle with softly capped scores, cap tanh(s / cap), in torch operators. It is used on a GPU,
because torch's flash kernels support no cap, and on any device for a part of a sequence.

The scores of long sequences are computed for blocks of queries and the keys that these may attend to, and again in
backward: memory is linear in the length, and a window costs only what it covers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.ops import eager
from modelcenter.layers.attention_options import AttentionOptions

# The largest number of scores, over all heads, that is computed at once and kept for backward. Larger rectangles are
# split into blocks of this size, whose products still have thousands of rows.
_KEPT = 1 << 24


# The dropout key changes at each step, so it must not become a constant of a compiled graph.
@eager
def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, options: AttentionOptions, first: int = 0
) -> Tensor:
    """q (n, heads, queries, head_dim), k and v (n, kv_heads, keys, head_dim) -> as q.

    seen: as returned by Mask.rectangle. first: the position of the first query among the keys.
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
    """The range [begin, end) of the keys that the queries at positions start to stop - 1 may attend to."""
    mask, window = options.mask, options.mask.window
    if mask.segments is not None:
        return 0, keys
    ahead = 1 if mask.causal else keys if window is None else window
    # On a CPU the dropout mask of a weight depends on the position of its key among these keys, so keep them all.
    behind = None if options.drop.p else window
    return 0 if behind is None else max(0, start - behind + 1), min(keys, stop - 1 + ahead)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, numbers: Tensor | None, options: AttentionOptions, key: int
) -> Tensor:
    """Query heads that share a key head are computed as more rows of one product."""
    n, groups, cap = q.shape[0], k.shape[1], options.cap
    assert cap is not None
    scores = q.reshape(n, groups, -1, q.shape[3]) @ k.transpose(2, 3)
    # A product in 16 bits is rounded once, as in transformers; the rest is computed in fp32.
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

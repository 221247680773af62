"""Rectangles of sequences of similar length, in which attention runs where it cannot read a packed batch as it is."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from modelcenter.layers.host_copies import to_device


@dataclass
class Bucket:
    """Sequences that attention handles as one rectangle (n sequences, each padded to length).

    Attributes:
        index: (n * length,) token numbers; padding repeats the first token of its sequence. None: tokens start:stop.
        keep: (n, length) bool, False at padding; None: no padding.
        tokens: (n * length - padding,) places in the rectangle that hold a token, in the order of `index[keep]`.
        real: their token numbers, `index[tokens]`.
    """

    n: int
    length: int
    start: int
    stop: int
    index: Tensor | None = None
    keep: Tensor | None = None
    tokens: Tensor | None = None
    real: Tensor | None = None


# One bucket more costs about as much as this many padded score elements, forward and backward: on a CPU as measured; on
# a GPU, where nothing is measured yet, its some twenty kernels take 100 us to launch, in which 16 heads have the scores
# and the bias of more elements than this.
_CPU_COST, _GPU_COST = 6144, 1 << 18
_MOST_LENGTHS = 48


def bucket_cost(device: torch.device) -> int:
    """What one bucket more costs, in padded score elements."""
    return _CPU_COST if device.type == "cpu" else _GPU_COST


def plan_buckets(lengths: list[int], cost: int = _CPU_COST) -> list[list[int]]:
    """Split sequences into groups of similar length so that padding plus per-group overhead (`cost`) is least.

    Dynamic programming over the distinct lengths (rounded up when there are many). Returns lists of sequence numbers;
    empty sequences are in none.
    """
    by_length: dict[int, list[int]] = {}
    step = 1
    longest = max(lengths, default=0)
    if len(set(lengths)) > _MOST_LENGTHS:
        step = -(-longest // _MOST_LENGTHS)
    for i, n in enumerate(lengths):
        if n:
            by_length.setdefault(-(-n // step) * step, []).append(i)
    sizes = sorted(by_length)
    counts = list(accumulate((len(by_length[s]) for s in sizes), initial=0))
    best: list[tuple[int, int]] = [(0, 0)]  # (cost of the first j sizes, where their last group begins)
    for j, size in enumerate(sizes, 1):
        area = size * (size + 8)  # scores, and the gathered rows of q, k and v
        best.append(min((best[i][0] + (counts[j] - counts[i]) * area + cost, i) for i in range(j)))
    groups, j = [], len(sizes)
    while j:
        i = best[j][1]
        groups.append(sorted(n for size in sizes[i:j] for n in by_length[size]))
        j = i
    return groups


def plan_pairs(queries: list[int], keys: list[int], cost: int = _CPU_COST) -> list[list[int]]:
    """As `plan_buckets`, for rectangles of queries by keys: the sequences of a group are near in both lengths."""
    rows = sorted((k, q, i) for i, (q, k) in enumerate(zip(queries, keys, strict=False)) if q)
    step = -(-len(rows) // _MOST_LENGTHS) or 1
    cuts = [*range(0, len(rows), step), len(rows)]
    best: list[tuple[int, int]] = [(0, 0)]
    for j in range(1, len(cuts)):
        longest, costs = 0, []
        for i in reversed(range(j)):
            longest = max(longest, *(q for _, q, _ in rows[cuts[i] : cuts[i + 1]]))
            area = longest * (rows[cuts[j] - 1][0] + 8)
            costs.append((best[i][0] + (cuts[j] - cuts[i]) * area + cost, i))
        best.append(min(costs))
    groups, j = [], len(cuts) - 1
    while j > 0:
        i = best[j][1]
        groups.append(sorted(n for _, _, n in rows[cuts[i] : cuts[j]]))
        j = i
    return groups


def make_bucket(numbers: list[int], lengths: list[int], starts: list[int], device: torch.device) -> Bucket:
    """The sequences of these numbers as one rectangle; lengths, starts: of all sequences."""
    sizes = [lengths[i] for i in numbers]
    n, length, start = len(numbers), max(sizes), starts[numbers[0]]
    equal = min(sizes) == length
    if equal and all(starts[number] - start == i * length for i, number in enumerate(numbers)):
        return Bucket(n, length, start, start + n * length)
    # Worked out on the host, where the lengths are, and copied: no wait for a GPU.
    first = torch.tensor([starts[i] for i in numbers])[:, None]
    column = torch.arange(length)
    if equal:
        return Bucket(n, length, -1, -1, to_device((first + column).flatten(), device))
    keep = column < torch.tensor(sizes)[:, None]
    index = torch.where(keep, first + column, first).flatten()
    tokens = keep.flatten().nonzero().flatten()
    return Bucket(n, length, -1, -1, *(to_device(x, device) for x in (index, keep, tokens, index[tokens])))

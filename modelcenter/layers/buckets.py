"""Rectangles of sequences of similar length, for attention kernels that cannot read a packed batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from modelcenter.layers.host_copies import host_copy, to_device


@dataclass
class Bucket:
    """Sequences that attention processes as one rectangle (n sequences, each padded to length).

    Attributes:
        index: (n * length,) token indices; padding repeats the first token of its sequence. None: tokens start:stop.
        keep: (n, length) bool, False at padding; None: no padding.
        tokens: (n * length - padding,) slots of the rectangle that hold a token, in the order of `index[keep]`.
        real: the indices of these tokens, `index[tokens]`.
    """

    n: int
    length: int
    start: int
    stop: int
    index: Tensor | None = None
    keep: Tensor | None = None
    tokens: Tensor | None = None
    real: Tensor | None = None


Pairs = Sequence[tuple[Bucket, Bucket]]  # of queries, and of the keys that they attend to


@dataclass
class Places:
    """The slots of concatenated rectangles, and the tokens in them; each token has at most one slot.

    Attributes:
        shapes: (n, length) of each rectangle.
        index: (slots,) token index of each slot; padding repeats the first token of its sequence. None: slot i holds
            token i, and there are no others.
        at: (tokens,) the slot of each token.
        padding: indices of the slots that are padding; None: there are none.
        outside: indices of the tokens without a slot; None: there are none.
    """

    shapes: list[tuple[int, int]]
    index: Tensor | None = None
    at: Tensor | None = None
    padding: Tensor | None = None
    outside: Tensor | None = None
    _repeated: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def repeated(self, count: int) -> tuple[Tensor, Tensor | None]:
        """`at` and `outside` for `count` concatenated copies of the tokens, each with its own slots; cached."""
        assert self.index is not None and self.at is not None
        if count not in self._repeated:
            copies = torch.arange(count, device=self.at.device)[:, None]
            at, outside = (copies * self.index.numel() + self.at).flatten(), self.outside
            outside = None if outside is None else (copies * self.at.numel() + outside).flatten()
            self._repeated[count] = at, outside
        return self._repeated[count]


# An additional bucket costs about as much as this many padded score elements, forward and backward. The number for a
# CPU is measured. On an H100 an element of 16 heads in bf16 with a bias takes 0.45 ns in torch's memory-efficient
# kernels (measured: 27 ps per head, and 1 to 2 for the gradient of the bias). A bucket takes an estimated 30 us in gaps
# between kernels and at their ends, but 150 to 250 us of the host, which launches them; the number for a GPU is the
# elements computed in that time.
_CPU_COST, _GPU_COST = 6144, 1 << 19
# Padded lengths are multiples of this many tokens, so that torch's GPU kernels take masks without a copy.
_GPU_MULTIPLE = 16
_MOST_LENGTHS = 48


def bucket_cost(device: torch.device) -> int:
    """The cost of an additional bucket, in padded score elements."""
    return _CPU_COST if device.type == "cpu" else _GPU_COST


def length_multiple(device: torch.device) -> int:
    """The number of which the length of a padded rectangle is a multiple."""
    return 1 if device.type == "cpu" else _GPU_MULTIPLE


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def plan_buckets(lengths: list[int], cost: int = _CPU_COST, multiple: int = 1) -> list[list[int]]:
    """Split sequences into groups of similar length that minimise padding plus the overhead of a group (`cost`).

    multiple: see `length_multiple`.

    Dynamic programming over the distinct lengths (rounded up if there are many). Returns lists of sequence indices,
    without empty sequences.
    """
    by_length: dict[int, list[int]] = {}
    step = multiple
    longest = max(lengths, default=0)
    if len(set(lengths)) > _MOST_LENGTHS:
        step = _up(-(-longest // _MOST_LENGTHS), multiple)
    for i, n in enumerate(lengths):
        if n:
            by_length.setdefault(_up(n, step), []).append(i)
    sizes = sorted(by_length)
    counts = list(accumulate((len(by_length[s]) for s in sizes), initial=0))
    best: list[tuple[int, int]] = [(0, 0)]  # (cost of the first j sizes, start of their last group)
    for j, size in enumerate(sizes, 1):
        area = size * (size + 8)  # scores, and the gathered rows of q, k and v
        best.append(min((best[i][0] + (counts[j] - counts[i]) * area + cost, i) for i in range(j)))
    groups, j = [], len(sizes)
    while j:
        i = best[j][1]
        groups.append(sorted(n for size in sizes[i:j] for n in by_length[size]))
        j = i
    return groups


def plan_pairs(queries: list[int], keys: list[int], cost: int = _CPU_COST, multiple: int = 1) -> list[list[int]]:
    """As `plan_buckets`, for rectangles of queries by keys: the sequences of a group are similar in both lengths."""
    pairs = zip(queries, keys, strict=False)
    rows = sorted((_up(k, multiple), _up(q, multiple), i) for i, (q, k) in enumerate(pairs) if q)
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
    """The sequences with these numbers as one rectangle; lengths, starts: of all sequences."""
    sizes = [lengths[i] for i in numbers]
    n, length, start = len(numbers), max(sizes), starts[numbers[0]]
    equal = min(sizes) == length
    if not equal:
        length = _up(length, length_multiple(device))
    if equal and all(starts[number] - start == i * length for i, number in enumerate(numbers)):
        return Bucket(n, length, start, start + n * length)
    # Computed on the host, where the lengths are, and then copied, so that a GPU is not waited for.
    first = torch.tensor([starts[i] for i in numbers])[:, None]
    column = torch.arange(length)
    if equal:
        return Bucket(n, length, -1, -1, to_device((first + column).flatten(), device))
    keep = column < torch.tensor(sizes)[:, None]
    index = torch.where(keep, first + column, first).flatten()
    tokens = keep.flatten().nonzero().flatten()
    return Bucket(n, length, -1, -1, *(to_device(x, device) for x in (index, keep, tokens, index[tokens])))


def make_places(buckets: Sequence[Bucket], tokens: int, device: torch.device) -> Places:
    """The slots of these rectangles, among which `tokens` tokens are placed."""
    indices, kept = [], []  # computed on the host, as in make_bucket
    for b in buckets:
        indices.append(torch.arange(b.start, b.stop) if b.index is None else host_copy(b.index))
        size = b.n * b.length
        kept.append(torch.ones(size, dtype=torch.bool) if b.keep is None else host_copy(b.keep).flatten())
    index, keep, shapes = torch.cat(indices), torch.cat(kept), [(b.n, b.length) for b in buckets]
    if torch.equal(index, torch.arange(tokens)):
        return Places(shapes)
    real = keep.nonzero().flatten()
    at = torch.full((tokens,), -1).index_copy(0, index[real], real)
    padding, outside = (
        to_device(found, device) if (found := x.nonzero().flatten()).numel() else None for x in (~keep, at < 0)
    )
    return Places(shapes, to_device(index, device), to_device(at.clamp(min=0), device), padding, outside)

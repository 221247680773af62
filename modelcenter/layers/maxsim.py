"""Late interaction (Khattab and Zaharia 2020, arXiv:2004.12832): the score of a query and a document is the sum, over
the query's vectors, of the greatest dot product with one of the document's vectors.

All queries are compared with all documents. The products of a block are held until their maxima are found, and of these
only the places, so that memory is a number for each vector of a query and each document. The gradient passes through
the greatest products alone: as sums of selected vectors it costs the number of vectors in a document less than the
products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import Function, once_differentiable
from modelcenter.layers.host_copies import to_device

_PRODUCTS = 1 << 24  # held at once
_STEP = 16  # lengths of documents in a rectangle differ by at most so many vectors, or by a quarter


@dataclass(frozen=True)
class Documents:
    """Where the vectors of documents are, which lie one behind the other, (T, width).

    Attributes:
        lengths: of each document, at least 1.
        rectangles: on a GPU, which would wait for a loop over documents: (numbers (n,), places (n, longest)) of groups
            of documents with similar lengths. Shorter ones repeat their last vector, which changes no maximum.
    """

    lengths: Sequence[int]
    rectangles: Sequence[tuple[Tensor, Tensor]] | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Documents":
        """Documents of these lengths, as a device needs them. Nothing is read from the device."""
        return cls(lengths, None if device.type == "cpu" else _rectangles(lengths, device))


def _rectangles(lengths: Sequence[int], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    starts = torch.tensor([0, *accumulate(lengths)][:-1], dtype=torch.int64)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    for number in order:
        least = lengths[groups[-1][0]] if groups else -1
        if groups and lengths[number] <= max(least + _STEP, least * 5 // 4):
            groups[-1].append(number)
        else:
            groups.append([number])
    found = []
    for group in groups:
        numbers = torch.tensor(group, dtype=torch.int64)
        places = torch.arange(int(sizes[numbers].max())).minimum(sizes[numbers, None] - 1) + starts[numbers, None]
        found.append((to_device(numbers, device), to_device(places, device)))
    return found


def maxsim(queries: Tensor, query_of: Tensor, count: int, vectors: Tensor, documents: Documents) -> Tensor:
    """(count, documents) fp32: the score of each query and each document.

    Args:
        queries: (m, width), the vectors of `count` queries, one query after the other.
        query_of: (m,) int64, ascending, whose each vector is.
        vectors: (T, width), of the documents.
    """
    return _MaxSim.apply(queries, query_of, count, vectors, documents)


class _MaxSim(Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, query_of: Tensor, count: int, vectors: Tensor, documents: Documents
    ) -> Tensor:
        values, places = best(queries, vectors, documents)
        ctx.save_for_backward(queries, query_of, vectors, places)
        starts = torch.searchsorted(query_of, torch.arange(count, device=query_of.device))
        every = torch.arange(len(values), device=values.device)
        return F.embedding_bag(every, values, starts, mode="sum")  # index_add would add in another order each time

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, query_of, vectors, places = ctx.saved_tensors
        weights = grad.index_select(0, query_of)
        needed = ctx.needs_input_grad
        of_queries = selected_sums(places, weights, vectors) if needed[0] else None
        of_vectors = transposed_sums(places, weights, queries, len(vectors)) if needed[3] else None
        return of_queries, None, None, of_vectors, None


def best(queries: Tensor, vectors: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """(m, documents) fp32, the greatest product of each vector of a query with one of each document's; and (m,
    documents) int64, the index of that vector. Arguments: see `maxsim`."""
    shape = len(queries), len(documents.lengths)
    values = torch.empty(shape, dtype=torch.float32, device=queries.device)
    places = torch.empty(shape, dtype=torch.int64, device=queries.device)
    if documents.rectangles is None:
        start = 0
        for number, length in enumerate(documents.lengths):
            found, at = (queries @ vectors[start : start + length].T).max(1)
            values[:, number], places[:, number] = found, at + start
            start += length
        return values, places
    for numbers, index in documents.rectangles:
        n, longest = index.shape
        step = max(1, _PRODUCTS // (len(queries) * longest or 1))
        for some, their in zip(numbers.split(step), index.split(step), strict=True):
            products = queries @ vectors.index_select(0, their.flatten()).T
            found, at = products.view(len(queries), -1, longest).max(2)
            values.index_copy_(1, some, found.float())
            rows = torch.arange(len(some), device=at.device) * longest
            places.index_copy_(1, some, their.flatten().index_select(0, (at + rows).flatten()).view(at.shape))
    return values, places


def selected_sums(places: Tensor, weights: Tensor, vectors: Tensor) -> Tensor:
    """(m, width): row i is the sum over j of weights[i, j] * vectors[places[i, j]]; places and weights: (m, n)."""
    if not places.numel():
        return vectors.new_zeros(len(places), vectors.shape[1])
    return F.embedding_bag(places, vectors, mode="sum", per_sample_weights=weights.to(vectors.dtype))


def transposed_sums(places: Tensor, weights: Tensor, queries: Tensor, count: int) -> Tensor:
    """(count, width): row t is the sum of weights[i, j] * queries[i] over all (i, j) with places[i, j] = t.

    Sorted by place, the rows are sums of neighbours, which needs no atomic additions: the result is always the same.
    """
    if not places.numel():
        return queries.new_zeros(count, queries.shape[1])
    at, order = places.flatten().sort(stable=True)
    starts = torch.searchsorted(at, torch.arange(count, device=at.device))
    given = weights.to(queries.dtype).flatten().index_select(0, order)
    return F.embedding_bag(order // places.shape[1], queries, starts, mode="sum", per_sample_weights=given)

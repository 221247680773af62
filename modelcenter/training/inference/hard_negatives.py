"""Hard negatives: texts that are most similar to an anchor but not among its known positives.

After mine_hard_negatives of sentence-transformers; for the margin between negatives and the positive, see Moreira et
al. 2024, arXiv:2407.15831.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import engine
from modelcenter.training.metrics import sum_over_ranks
from modelcenter.training.sparse_rows import Rows
from modelcenter.training.tasks.text_search import nearest

_QUERIES = 256  # queries searched at a time; constant, because products of other sizes are rounded differently


@dataclass(frozen=True)
class Pool:
    """The texts that are compared, each once.

    Attributes:
        queries: the anchors. documents: the texts to search for negatives, including all positives.
        query_of_row: int64 (rows,), the query of each row.
        positives: int64 (pairs, 2), each query with each of its positive documents, sorted.
    """

    queries: list[str]
    documents: list[str]
    query_of_row: np.ndarray
    positives: np.ndarray

    @classmethod
    def of(cls, anchors: Sequence[str], positives: Sequence[Sequence[str]], corpus: Sequence[str]) -> "Pool":
        """From rows of an anchor and its positives, and further texts."""
        queries = {text: number for number, text in enumerate(dict.fromkeys(anchors))}
        texts = dict.fromkeys(text for row in positives for text in row) | dict.fromkeys(corpus)
        documents = {text: number for number, text in enumerate(texts)}
        rows = zip(anchors, positives, strict=True)
        pairs = {(queries[anchor], documents[text]) for anchor, row in rows for text in row}
        query_of_row = np.array([queries[anchor] for anchor in anchors], np.int64)
        return cls([*queries], [*documents], query_of_row, np.array(sorted(pairs), np.int64).reshape(-1, 2))

    def excluded(self) -> np.ndarray:
        """int64 (k, 2), sorted: each query with the documents that are no negatives of it: its positives and itself."""
        documents = {text: number for number, text in enumerate(self.documents)}
        itself = [(number, documents[text]) for number, text in enumerate(self.queries) if text in documents]
        return np.unique(np.concatenate([self.positives, np.array(itself, np.int64).reshape(-1, 2)]), axis=0)


@dataclass(frozen=True)
class Rules:
    """Which of the documents most similar to a query become its negatives.

    Attributes:
        num_negatives: how many. depth: how many documents are considered. skip: how many of the best documents that
            satisfy the other rules are skipped.
        margin, relative_margin: by how much a negative's score must be below the lowest score of a positive; the latter
            as a share of the magnitude of that score. max_score, min_score: of a negative.
        seed: draw negatives at random among the remaining ones, with this seed; None: take the best.
    """

    num_negatives: int
    depth: int
    skip: int = 0
    margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    seed: int | None = None


@dataclass
class Choice:
    """The negatives of each query: numbers of documents and their scores, highest first. dropped: {rule: number of
    documents that it excluded}."""

    documents: list[np.ndarray]
    scores: list[np.ndarray]
    dropped: dict[str, int] = field(default_factory=dict)


def search(queries: Rows, documents: Rows, pool: Pool, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The documents that are most similar to each query and may be its negatives, on every rank. Exact. Collective.

    Besides the embeddings, it holds depth numbers per query, and similarities of a few queries to some documents.

    Args:
        queries, documents: (n, width) embeddings of the pool's texts, whose dot products are the similarities.
        device: where they are compared.

    Returns:
        (n, count) fp32 scores, highest first, -inf where no document is left; (n, count) int64 numbers of the
        documents. count: depth, or fewer if there are fewer documents.
    """
    count, excluded = min(depth, len(documents)), pool.excluded()
    scores = torch.zeros(len(queries), count)
    numbers = torch.zeros(len(queries), count, dtype=torch.int64)
    bounds = np.searchsorted(excluded[:, 0], np.arange(0, len(queries) + _QUERIES, _QUERIES))
    for part in range(engine.rank(), len(bounds) - 1, engine.world_size()):
        start = part * _QUERIES
        hidden = excluded[bounds[part] : bounds[part + 1]] - np.array([start, 0])
        rows = slice(start, start + _QUERIES)
        best, found = nearest(queries[rows].to(device), documents, count, torch.from_numpy(hidden))
        scores[rows], numbers[rows] = best.cpu(), found.cpu()
    return sum_over_ranks(scores), sum_over_ranks(numbers)  # zeros on all ranks but one, so the sums are exact


def lowest_positives(scores: Tensor, pool: Pool) -> Tensor:
    """(queries,) the lowest score among the positives of each query. scores: (pairs,) of the pool's positives."""
    query_of = torch.from_numpy(pool.positives[:, 0])
    return torch.full((len(pool.queries),), torch.inf).scatter_reduce_(0, query_of, scores, "amin")


def choose(scores: Tensor, documents: Tensor, positives: Tensor, rules: Rules) -> Choice:
    """The negatives of each query.

    Args:
        scores, documents: (n, count), as returned by `search`; scores may also come from another model, in any order.
            positives: (n,) the lowest score of a positive of each query.
    """
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    documents, limit = documents.gather(1, order), positives[:, None]
    kept = scores > -torch.inf
    dropped: dict[str, int] = {}

    def drop(name: str, wrong: Tensor) -> None:
        dropped[name] = int((wrong & kept).sum())
        kept.logical_and_(~wrong)

    if rules.margin is not None:
        drop("margin", scores + rules.margin > limit)
    if rules.relative_margin is not None:
        drop("relative_margin", scores > limit - limit.abs() * rules.relative_margin)
    if rules.max_score is not None:
        drop("max_score", scores > rules.max_score)
    if rules.min_score is not None:
        drop("min_score", scores < rules.min_score)
    left = kept & (kept.cumsum(1) > rules.skip)
    taken = left & (_turns(left, rules.seed) < rules.num_negatives)
    rows = [(documents[row][mask].numpy(), scores[row][mask].numpy()) for row, mask in enumerate(taken)]
    return Choice([row[0] for row in rows], [row[1] for row in rows], dropped)


def _turns(left: Tensor, seed: int | None) -> Tensor:
    """int64 (n, count): the order, from 0, in which the remaining documents are taken. left: bool (n, count), best
    first. seed: of Rules.

    The random number of a document does not depend on which others remain, so a stricter rule changes nothing else.
    """
    if seed is None:
        return left.cumsum(1) - 1
    numbers = torch.rand(left.shape, generator=torch.Generator().manual_seed(seed))
    return numbers.masked_fill(~left, torch.inf).argsort(1).argsort(1)

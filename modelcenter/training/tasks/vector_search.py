"""The vectors of all tokens of an evaluation, and the scores of queries and documents by them."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from modelcenter.data.table import Table
from modelcenter.layers.maxsim import Documents, maxsim
from modelcenter.models.base import Model
from modelcenter.training.evaluation import token_embeddings_of
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.text_search import best_first
from modelcenter.training.tasks.vector_examples import VectorExamples, VectorTexts, token_places

_VECTORS = 1 << 20  # of queries and of documents, whose places of products are held at a time


def all_vectors(model: Model, table: Table, texts: VectorTexts, batch_size: int) -> Tensor:
    """(T, width) fp32 on the host: the vectors of all tokens of the texts, on every rank. Collective."""
    examples = VectorExamples(table, texts.tokens, texts)
    parts = rank_batches(examples, batch_size)
    places = [torch.from_numpy(token_places(texts.tokens, part)) for part in parts]
    return token_embeddings_of(model, Batches(examples, parts), places, len(texts.scored), model.vector_width)


class VectorSearch:
    """The vectors that count, of all texts: from those of all tokens (T, width), which may be on a device.

    Args:
        mean: scores are divided by the number of the query's vectors.
    """

    def __init__(self, vectors: Tensor, texts: VectorTexts, mean: bool):
        rows = torch.from_numpy(np.flatnonzero(texts.scored)).to(vectors.device)
        self.vectors, self.mean = vectors.index_select(0, rows), mean
        self.counts = texts.counts
        self._ends = np.concatenate(([0], np.cumsum(self.counts)))

    def of_text(self, number: int) -> Tensor:
        """(n, width): the vectors of a text."""
        return self.vectors[self._ends[number] : self._ends[number + 1]]

    def scores(self, queries: np.ndarray, documents: np.ndarray) -> Tensor:
        """(queries, documents) fp32. Arguments: numbers of texts."""
        device = self.vectors.device
        lengths = torch.from_numpy(self.counts[queries])
        query_of = torch.arange(len(queries)).repeat_interleave(lengths).to(device)
        asked = self._of(queries)
        parts = [
            maxsim(asked, query_of, len(queries), self._of(some), Documents.of(self.counts[some].tolist(), device))
            for some in self._chunks(documents, max(1, _VECTORS // len(asked)))
        ]
        found = torch.cat(parts, 1)
        return found / lengths.to(device)[:, None] if self.mean else found

    def nearest(self, queries: np.ndarray, documents: np.ndarray, count: int, excluded: Tensor) -> Tensor:
        """(queries, count) int64: of the documents with the highest scores, the places in `documents`; see
        text_search.nearest."""
        scores = self.scores(queries, documents)
        hidden = excluded.to(scores.device)
        scores[hidden[:, 0], hidden[:, 1]] = -torch.inf
        found, places = scores.topk(min(count, len(documents)))
        return best_first(found, places)[1]

    def _of(self, texts: np.ndarray) -> Tensor:
        lengths = self.counts[texts]
        starts = self._ends[:-1][texts] - (np.cumsum(lengths) - lengths)
        rows = torch.from_numpy(np.arange(lengths.sum()) + np.repeat(starts, lengths))
        return self.vectors.index_select(0, rows.to(self.vectors.device))

    @staticmethod
    def _chunks(documents: np.ndarray, step: int) -> Iterator[np.ndarray]:
        for start in range(0, len(documents), step):
            yield documents[start : start + step]

"""The embeddings of all texts of an evaluation, and the search for related texts."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import engine
from engine.collectives import gather_objects
from modelcenter.models.base import Model
from modelcenter.training.evaluation import embeddings_of, outputs
from modelcenter.training.metrics import Retrieval
from modelcenter.training.sparse_rows import Rows, SparseRows, dot_products, paired_products
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.related_examples import RelatedExamples, TextExamples

_QUERIES = 256  # queries processed at a time
_ELEMENTS = 1 << 24  # similarities held at a time

# Of some queries, by their numbers, the places of the best among the documents searched, best first; (k, 2) pairs of
# places of a query and a document are excluded.
Search = Callable[[np.ndarray, Tensor], Tensor]


def all_embeddings(model: Model, examples: TextExamples, batch_size: int) -> Tensor:
    """(texts, width) fp32 on the host: the embeddings of all texts of the examples, on every rank. Collective."""
    texts = TextExamples(examples.table, examples.tokens, examples.prompt_lengths)
    parts = rank_batches(texts, batch_size)
    places = [torch.from_numpy(part) for part in parts]
    return embeddings_of(model, Batches(texts, parts), places, len(texts), model.embedding_width)


def all_sparse_embeddings(model: Model, examples: TextExamples, batch_size: int) -> SparseRows:
    """As all_embeddings, of a model of task "sparse-embedding"; only weights that are not 0 are held. Collective."""
    texts = TextExamples(examples.table, examples.tokens, examples.prompt_lengths)
    places = rank_batches(texts, batch_size)
    none = np.zeros(0, np.int64)
    found: list[tuple[np.ndarray, ...]] = [(none, none, np.zeros(0, np.float32))]
    for number, out in outputs(model, Batches(texts, places)):
        rows = SparseRows.of_dense(out.embeddings.cpu())
        found.append((places[number].repeat(rows.counts.numpy()), rows.columns.numpy(), rows.values.numpy()))
    every = [part for parts in gather_objects(found) for part in parts]
    return SparseRows.of_parts(every, len(texts), model.config.vocab_size)


def similarities(embeddings: Rows, examples: RelatedExamples) -> Tensor:
    """(rows,) the similarity of the anchor and the first positive of each row."""
    positives = torch.from_numpy(examples.first_positive[:-1]).to(embeddings.device)
    return paired_products(embeddings[: len(examples)], embeddings[positives])


def nearest(queries: Rows, documents: Rows, count: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """The documents most similar to each query, by exhaustive search in chunks: (n, count) similarities, highest first,
    and (n, count) int64 numbers of the documents, ascending for equal similarities. There are fewer columns if there
    are fewer documents.

    Args:
        queries: (n, width), with a small n. documents: (m, width), possibly on another device. excluded: int64 (k, 2),
            pairs of a query and a document that get similarity -inf.
    """
    step = max(1, _ELEMENTS // max(len(queries), 1))
    found = torch.zeros(len(queries), 0, device=queries.device)
    numbers = torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(documents), step):
        part = documents[start : start + step].to(queries.device)
        alike = dot_products(queries, part)
        hidden = excluded[(excluded[:, 1] >= start) & (excluded[:, 1] < start + len(part))].to(queries.device)
        alike[hidden[:, 0], hidden[:, 1] - start] = -torch.inf
        best, places = alike.topk(min(count, len(part)))
        found, numbers = torch.cat([found, best], 1), torch.cat([numbers, places + start], 1)
        if found.shape[1] > count:
            found, order = found.topk(count)
            numbers = numbers.gather(1, order)
    return best_first(found, numbers)


def best_first(found: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Similarities (n, k) with the numbers of their documents, highest first, and for equal ones numbers ascending."""
    numbers, order = numbers.sort(1)
    found, by_score = found.gather(1, order).sort(dim=1, descending=True, stable=True)
    return found, numbers.gather(1, by_score)


def find_documents(embeddings: Rows, examples: RelatedExamples, metrics: Retrieval) -> None:
    """Search for the positives of each anchor among all positives and negatives, and add this rank's share of the
    anchors to the metrics.

    Args:
        embeddings: (texts, width), whose dot products are the similarities.
    """
    rows, first = len(examples), examples.first_positive

    def among(documents: np.ndarray) -> Search:
        held = embeddings[torch.from_numpy(rows + documents)]

        def search(queries: np.ndarray, excluded: Tensor) -> Tensor:
            return nearest(embeddings[torch.from_numpy(queries)], held, metrics.depth, excluded)[1]

        return search

    row_of = np.repeat(np.arange(rows), np.diff(first))
    judge(examples.text_ids[:rows], examples.text_ids[rows:], row_of, np.arange(len(row_of)), metrics, among)


def judge(
    ids: np.ndarray,
    document_ids: np.ndarray,
    row_of: np.ndarray,
    positives: np.ndarray,
    metrics: Retrieval,
    among: Callable[[np.ndarray], Search],
) -> None:
    """Search for the positives of queries among all documents, and add this rank's share of the queries to the metrics.
    Equal texts count once, and documents equal to a query are not searched for it.

    Args:
        ids, document_ids: int64, equal for equal texts. row_of, positives: int64 (n,), the numbers of a query and a
            document that answers it.
        among: the search among some documents, by their numbers.
    """
    queries, query_places, query_of_row = np.unique(ids, return_index=True, return_inverse=True)
    documents, places = np.unique(document_ids, return_index=True)
    belonging = np.searchsorted(documents, document_ids[positives])
    pairs = np.unique(query_of_row[row_of] * len(documents) + belonging)  # a number for each (query, document)
    relevant = np.bincount(pairs // len(documents), minlength=len(queries))
    itself = np.minimum(np.searchsorted(documents, queries), len(documents) - 1)
    stranger = ~np.isin(np.arange(len(queries)) * len(documents) + itself, pairs) & (documents[itself] == queries)
    start, stop = own_part(len(queries))
    search = among(places)
    for low in range(start, stop, _QUERIES):
        mine = np.arange(low, min(low + _QUERIES, stop))
        hidden = np.flatnonzero(stranger[mine])
        excluded = torch.from_numpy(np.stack([hidden, itself[mine][hidden]], 1))
        best = search(query_places[mine], excluded).cpu().numpy()
        found = np.isin(mine[:, None] * len(documents) + best, pairs)
        metrics.update(torch.from_numpy(found), relevant[mine].tolist())


def own_part(count: int) -> tuple[int, int]:
    """(first, end) of this rank's share of `count` items that every rank holds."""
    rank, ranks = engine.rank(), engine.world_size()
    return count * rank // ranks, count * (rank + 1) // ranks

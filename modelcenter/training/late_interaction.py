"""Losses of models with one vector per token, whose scores are layers.maxsim's.

They are computed over all texts of a global batch together (training.joint_loss), whose items are the tokens. A batch
holds its texts row by row: a query, then its documents, the one that answers it first. Which tokens have a vector, and
whose they are, the host knows: it finds their indices, so that it never waits for a GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import cross_entropy
from modelcenter.layers.host_copies import to_device
from modelcenter.layers.maxsim import Documents, maxsim

QUERY, DOCUMENT = 0, 1  # roles of texts
# In a batch beside the model's inputs: a number for each text; `scored` for each token, whether its vector counts.
TEXT_FACTS = ("roles", "text_ids", "labels")
FACTS = (*TEXT_FACTS, "scored")
_PLACES = 1 << 22  # greatest products whose places are held at once


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a global batch, on the host.

    Attributes:
        queries, documents: int64, their numbers among all texts, ascending.
        row_of: int64 (documents,), the number of each document's query among the queries.
        ids: int64 (texts,), equal for equal texts. labels: fp32 (documents,), what a teacher says.
        rows: int64, the indices among all tokens of those with a vector that counts, text by text.
        lengths: int64 (texts,), how many these are.
    """

    queries: Tensor
    documents: Tensor
    row_of: Tensor
    ids: Tensor
    labels: Tensor
    rows: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, facts: Tensor) -> "Texts":
        """From the facts of all tokens (LateInteraction.facts)."""
        first = facts[:, 0] > 0
        of_texts, text_of = facts[first], first.cumsum(0) - 1
        roles = of_texts[:, 1].long()
        queries, documents = ((roles == role).nonzero().flatten() for role in (QUERY, DOCUMENT))
        scored = facts[:, 4] > 0
        return cls(
            queries=queries,
            documents=documents,
            row_of=torch.searchsorted(queries, documents) - 1,
            ids=of_texts[:, 2].long(),
            labels=of_texts[documents, 3].float(),
            rows=scored.nonzero().flatten(),
            lengths=torch.bincount(text_of[scored], minlength=len(of_texts)),
        )

    def rows_of(self, texts: Tensor) -> Tensor:
        """int64: the indices of the vectors of these texts, which follow one another."""
        lengths = self.lengths[texts]
        starts = (self.lengths.cumsum(0) - self.lengths)[texts]
        offsets = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return self.rows[torch.repeat_interleave(starts, lengths) + offsets]


@dataclass(frozen=True, kw_only=True)
class LateInteraction(ABC):
    """Base of the losses.

    Attributes:
        mean: scores are divided by the number of the query's vectors. temperature: divides scores.
    """

    mean: bool = False
    temperature: float = 1.0

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in FACTS}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        roles = batch.get("roles")
        return {"loss": 0 if roles is None else int((roles == QUERY).sum())}

    def facts(self, batch: Mapping[str, Any]) -> Tensor:
        """(T, 5), of each token: whether it is the first of its text; the text's role, id and label; whether its vector
        counts."""
        if "roles" not in batch:  # on a rank without rows
            return torch.zeros(0, 5, dtype=torch.float64)
        ends = batch["cu_seqlens"].long()
        first = torch.zeros(int(ends[-1]), dtype=torch.float64)
        first[ends[:-1]] = 1
        labels = batch.get("labels", torch.zeros(len(batch["roles"])))
        of_texts = torch.stack([batch["roles"].double(), batch["text_ids"].double(), labels.double()], 1)
        of_tokens = of_texts.repeat_interleave(ends.diff(), 0)
        return torch.cat([first[:, None], of_tokens, batch["scored"].double()[:, None]], 1)

    def outputs(self, out: Any) -> Tensor:
        return out.token_embeddings[0]

    def share(self, outputs: Tensor, facts: Tensor, own: slice, gradient: bool = True) -> tuple[Tensor, Tensor]:
        """See joint_loss.JointLoss."""
        total, gradients = outputs.new_zeros(()), torch.zeros_like(outputs)
        texts = Texts.of(facts)
        starts = (facts[:, 0] > 0).nonzero().flatten()
        first, last = torch.searchsorted(starts[texts.queries], torch.tensor([own.start, own.stop])).tolist()
        if first == last:
            return total, gradients
        for part, at, leaves in self._parts(outputs, texts, first, last, gradient):
            if gradient:
                part.backward()
                for rows, leaf in zip(at, leaves, strict=True):
                    if leaf.grad is not None:
                        gradients.index_add_(0, rows, leaf.grad)
            total = total + part.detach()
        return total, gradients

    @abstractmethod
    def _parts(
        self, outputs: Tensor, texts: Texts, first: int, last: int, gradient: bool
    ) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        """The terms of the share of the queries `first` to `last - 1`, each with the leaves of its graph and, before
        them, which rows of the outputs these are."""

    def _scores(
        self, outputs: Tensor, texts: Texts, queries: Tensor, documents: Tensor, gradient: bool
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(queries, documents) the scores over the temperature; and the rows of the outputs of both sides, and leaves.

        Args:
            queries, documents: numbers of texts.
        """
        device, count = outputs.device, len(queries)
        lengths = texts.lengths[queries]
        rows = [to_device(texts.rows_of(side), device) for side in (queries, documents)]
        leaves = [outputs.index_select(0, side).detach().requires_grad_(gradient) for side in rows]
        query_of = to_device(torch.arange(count).repeat_interleave(lengths), device)
        found = Documents.of(texts.lengths[documents].tolist(), device)
        with torch.set_grad_enabled(gradient):
            scores = maxsim(leaves[0], query_of, count, leaves[1], found) / self.temperature
            if self.mean:
                scores = scores / to_device(lengths, device)[:, None]
        return scores, rows, leaves


@dataclass(frozen=True, kw_only=True)
class InBatchNegatives(LateInteraction):
    """The mean over the queries of the cross-entropy of finding their first document among all documents of the global
    batch, as MultiVectorMultipleNegativesRankingLoss of sentence-transformers.

    Documents that answer a query in any row, or are equal to it, are not used as its negatives.
    """

    def _parts(
        self, outputs: Tensor, texts: Texts, first: int, last: int, gradient: bool
    ) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        _, numbers = texts.ids.unique(return_inverse=True)
        of_documents, count = numbers[texts.documents], len(numbers)
        right = torch.searchsorted(texts.row_of, torch.arange(len(texts.queries)))  # the first document of each query
        known = (numbers[texts.queries] * count + of_documents[right]).unique()
        longest = int(texts.lengths[texts.queries].max())
        step = max(1, _PLACES // (longest * len(texts.documents)))
        for start in range(first, last, step):
            stop = min(start + step, last)
            queries = texts.queries[start:stop]
            scores, rows, leaves = self._scores(outputs, texts, queries, texts.documents, gradient)
            own = numbers[queries][:, None]
            same = torch.isin(own * count + of_documents, known) | (own == of_documents)
            same = same.scatter(1, right[start:stop, None], False)
            places, same = to_device(right[start:stop], scores.device), to_device(same, scores.device)
            with torch.set_grad_enabled(gradient):
                loss = cross_entropy(scores.masked_fill(same, -torch.inf), places, 1)
                yield loss / len(texts.queries), rows, leaves


@dataclass(frozen=True, kw_only=True)
class Taught(LateInteraction):
    """Losses by a teacher's scores of each row's documents, which are compared with those of their own query only."""

    def _parts(
        self, outputs: Tensor, texts: Texts, first: int, last: int, gradient: bool
    ) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        counts = torch.bincount(texts.row_of, minlength=len(texts.queries))
        ends = counts.cumsum(0)
        items = self.items(counts)
        for row in range(first, last):
            mine = slice(int(ends[row] - counts[row]), int(ends[row]))
            queries, documents = texts.queries[row : row + 1], texts.documents[mine]
            scores, rows, leaves = self._scores(outputs, texts, queries, documents, gradient)
            labels = to_device(texts.labels[mine], scores.device)
            with torch.set_grad_enabled(gradient):
                yield self.of_row(scores[0], labels) / items, rows, leaves

    @abstractmethod
    def items(self, counts: Tensor) -> int:
        """Over how many things the loss is a mean; counts: (rows,), the documents of each."""

    @abstractmethod
    def of_row(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The sum over the things of a row, 0-d; scores, labels: (documents,)."""


@dataclass(frozen=True, kw_only=True)
class Divergence(Taught):
    """The mean over the queries of the Kullback-Leibler divergence of the softmax of the scores from that of the
    teacher's, both over the temperature, times its square, as MultiVectorDistillKLDivLoss of sentence-transformers."""

    def items(self, counts: Tensor) -> int:
        return len(counts)

    def of_row(self, scores: Tensor, labels: Tensor) -> Tensor:
        wanted = (labels / self.temperature).log_softmax(0)
        loss = F.kl_div(scores.log_softmax(0), wanted, reduction="sum", log_target=True)
        return loss * self.temperature**2


@dataclass(frozen=True, kw_only=True)
class Margins(Taught):
    """The mean over all documents of a row but the first of the squared difference between two margins of the first
    over the other: that of the scores and that of the teacher's (Hofstätter et al. 2020, arXiv:2010.02666), as
    MultiVectorMarginMSELoss of sentence-transformers."""

    def items(self, counts: Tensor) -> int:
        return max(1, int((counts - 1).sum()))

    def of_row(self, scores: Tensor, labels: Tensor) -> Tensor:
        wrong = scores - labels
        return (wrong[:1] - wrong[1:]).square().sum()


LOSSES: dict[str, type[LateInteraction]] = {  # by their names in flags
    "in_batch": InBatchNegatives,
    "kl": Divergence,
    "margin_mse": Margins,
}

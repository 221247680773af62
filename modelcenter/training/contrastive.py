"""Losses for embeddings: texts that belong together should be more similar than others.

They are computed over all texts of a global batch together (training.joint_loss). A batch holds its texts row by row:
an anchor, its positive, and perhaps negatives. The host computes the indices of these texts, so it never waits for a
GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import cross_entropy
from modelcenter.layers.host_copies import to_device
from modelcenter.training.sparse_rows import Rows, dot_products, paired_products

ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2  # roles of texts
TEXT_FACTS = ("roles", "text_ids", "scores")  # in a batch beside the model's inputs: a number for each text
_ELEMENTS = 1 << 24  # similarities that are held at once
# Default temperatures. sentence-transformers multiplies cosines by 20.
TEMPERATURES = {"cosine": 0.05, "dot": 1.0}


@dataclass(frozen=True, kw_only=True)
class EmbeddingLoss(ABC):
    """Base of the losses.

    Attributes:
        similarity: "cosine" or "dot". temperature: divides similarities; None: as in TEMPERATURES.
        widths: the loss is the sum over these widths of the loss of the embeddings' first `width` elements (Kusupati et
            al. 2022, arXiv:2205.13147); (): the whole embeddings.
    """

    similarity: str = "cosine"
    temperature: float | None = None
    widths: Sequence[int] = ()

    @property
    def scale(self) -> float:
        """The factor of similarities, 1 / temperature."""
        return 1 / (TEMPERATURES[self.similarity] if self.temperature is None else self.temperature)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in TEXT_FACTS}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        roles = batch.get("roles")
        return {"loss": 0 if roles is None else int((roles == ANCHOR).sum())}

    def facts(self, batch: Mapping[str, Any]) -> Tensor:
        """(n, 3): role, id (equal texts have equal ids) and score of each text. A row's score is its anchor's."""
        if "roles" not in batch:  # on a rank without rows
            return torch.zeros(0, 3, dtype=torch.float64)
        roles = batch["roles"].double()
        return torch.stack(
            [roles, batch["text_ids"].double(), batch.get("scores", torch.zeros_like(roles)).double()], 1
        )

    def outputs(self, out: Any) -> Tensor:
        return out.embeddings

    def share(self, outputs: Tensor, facts: Tensor, own: slice, gradient: bool = True) -> tuple[Tensor, Tensor]:
        """See joint_loss.JointLoss."""
        total, gradients = outputs.new_zeros(()), torch.zeros_like(outputs)
        for width in self.widths or (outputs.shape[1],):
            leaf = outputs[:, :width].detach().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                vectors = F.normalize(leaf, dim=-1) if self.similarity == "cosine" else leaf
            held = vectors.detach().requires_grad_(gradient)
            for part in self.parts(held, facts, own, gradient):
                if gradient:
                    part.backward()
                total = total + part.detach()
            if held.grad is not None:
                with torch.enable_grad():  # from a scalar: torch imports sympy for a backward with a given gradient
                    (vectors * held.grad).sum().backward()
                assert leaf.grad is not None
                gradients[:, :width] += leaf.grad
        return total, gradients

    def value(self, outputs: Rows, facts: Tensor, own: slice) -> Tensor:
        """A rank's share of the loss, without its gradient. outputs: (N, width)."""
        if isinstance(outputs, Tensor):
            return self.share(outputs, facts, own, gradient=False)[0]
        vectors = outputs.normalized() if self.similarity == "cosine" else outputs
        return sum(self.parts(vectors, facts, own, gradient=False), torch.zeros(()))

    @abstractmethod
    def parts(self, vectors: Any, facts: Tensor, own: slice, gradient: bool) -> Iterator[Tensor]:
        """The terms of a share, each with a graph of its own back to the vectors (N, width); without a gradient, they
        may be SparseRows."""


@dataclass(frozen=True, kw_only=True)
class InBatchNegatives(EmbeddingLoss):
    """The mean over the anchors of the cross-entropy of finding their positive among all positives and negatives of the
    global batch (InfoNCE, van den Oord et al. 2018; Henderson et al. 2017, arXiv:1705.00652), as
    MultipleNegativesRankingLoss of sentence-transformers.

    Texts that are an anchor's positive in any row, or equal to the anchor, are not used as its negatives.

    Attributes:
        symmetric: also find the anchor of each positive among all anchors, and take the mean of both losses.
    """

    symmetric: bool = False

    def parts(self, vectors: Any, facts: Tensor, own: slice, gradient: bool) -> Iterator[Tensor]:
        _, texts = facts[:, 1].unique(return_inverse=True)
        anchors, positives = _pairs(facts)
        documents = (facts[:, 0] != ANCHOR).nonzero().flatten()
        place = torch.searchsorted(documents, positives)  # the place of each row's positive among the documents
        count = len(texts)  # encodes each (anchor, positive) as one number
        pairs = (texts[anchors] * count + texts[positives]).sort().values
        weight = 1 / (max(len(anchors), 1) * (2 if self.symmetric else 1))
        step = max(1, _ELEMENTS // max(len(documents), 1))
        first, last = torch.searchsorted(anchors, torch.tensor([own.start, own.stop])).tolist()
        texts, anchors, positives, documents, place, pairs = (
            to_device(x, vectors.device) for x in (texts, anchors, positives, documents, place, pairs)
        )

        def belong(first: Tensor, second: Tensor) -> Tensor:
            """Whether two texts are an anchor and its positive, or equal."""
            pair = first * count + second
            known = pairs[torch.searchsorted(pairs, pair).clamp(max=len(pairs) - 1)] == pair
            return known | (first == second)

        for start in range(first, last, step):
            rows = torch.arange(start, min(start + step, last), device=anchors.device)
            with torch.set_grad_enabled(gradient):
                same = belong(texts[anchors[rows], None], texts[documents])
                yield weight * self._entropy(vectors, anchors[rows], documents, place[rows], same)
                if self.symmetric:
                    same = belong(texts[anchors], texts[positives[rows], None])
                    yield weight * self._entropy(vectors, positives[rows], anchors, rows, same)

    def _entropy(self, vectors: Any, queries: Tensor, candidates: Tensor, right: Tensor, same: Tensor) -> Tensor:
        """The sum over the queries of the cross-entropy of the right candidate; others that are `same` do not count."""
        scores = self.scale * dot_products(vectors[queries], vectors[candidates])
        scores = scores.masked_fill(same.scatter(1, right[:, None], False), -torch.inf)
        return cross_entropy(scores, right, 1)


@dataclass(frozen=True, kw_only=True)
class RankedPairs(EmbeddingLoss):
    """Makes pairs with higher scores more similar: log(1 + the sum of exp((similarity of a - similarity of b) /
    temperature) over all pairs of pairs a and b of a global batch where b has the higher score), as CoSENTLoss of
    sentence-transformers (Su 2022). Only the order of the scores matters.
    """

    def parts(self, vectors: Any, facts: Tensor, own: slice, gradient: bool) -> Iterator[Tensor]:
        if own.start != 0 or own.stop == 0:  # one rank computes it all: it is too little work to divide
            return
        anchors, positives = _pairs(facts)
        scores, order = facts[anchors, 2].sort()
        below = torch.searchsorted(scores, scores)  # for each pair, the number of pairs with a lower score
        higher = below.nonzero().flatten()  # the pairs that have some below them
        anchors, positives, higher, last = (
            to_device(x, vectors.device) for x in (anchors[order], positives[order], higher, below[higher] - 1)
        )
        with torch.set_grad_enabled(gradient):
            alike = self.scale * paired_products(vectors[anchors], vectors[positives])
            # For each pair, the log of the sum of exp(alike of another - its own) over the pairs with lower scores.
            sums = alike.logcumsumexp(0)[last] - alike[higher]
            yield torch.cat([alike.new_zeros(1), sums]).logsumexp(0)


def _pairs(facts: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the anchors and of their positives, both (rows,) int64."""
    anchors, positives = ((facts[:, 0] == role).nonzero().flatten() for role in (ANCHOR, POSITIVE))
    return anchors, positives

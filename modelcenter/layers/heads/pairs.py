"""Heads for pretraining on pairs of texts: masked tokens, and one of two labels for each pair."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.loss import cross_entropy
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads.labels import Batch, check_labels, count_labels
from modelcenter.layers.heads.vocabulary import MaskedLM
from modelcenter.layers.linear import Linear
from modelcenter.layers.packing import Packed


class PairPretraining(nn.Module):
    """A masked language model and a classifier of pairs; the loss is the sum of both means.

    Attributes:
        label: the input with the labels of pairs, (batch,). logits: the output with their logits, (batch, 2).
        term: their term of the loss.
    """

    label: ClassVar[str]
    logits: ClassVar[str]
    term: ClassVar[str]

    def __init__(self, lm: MaskedLM):
        super().__init__()
        self.lm = lm

    def of_pairs(self, pooled: Tensor, ctx: Packed) -> Tensor:
        """The pooled first token of each pair (n, hidden_size) -> logits (n, 2)."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"masked_lm": self.lm.counts(batch)["loss"], self.term: count_labels(batch.get(self.label))}

    def forward(
        self,
        x: Tensor,
        pooled: Tensor,
        ctx: Packed,
        batch: Batch,
        counts: Mapping[str, Any],
        table: Tensor,
        want_logits: bool | str,
    ) -> dict[str, Tensor]:
        out = self.lm(x, ctx, batch, counts["masked_lm"], table, want_logits)
        out[self.logits] = self.of_pairs(pooled, ctx)
        labels = batch.get(self.label)
        if labels is not None:
            check_labels(labels, 2, self.label, sequences=pooled.shape[0])
            loss = cross_entropy(out[self.logits], labels.reshape(-1), counts[self.term])
            out["loss"] = out["loss"] + loss if "loss" in out else loss
        return out


class NextSentence(PairPretraining):
    """BERT's: whether the second text follows the first (0) or not (1)."""

    label, logits, term = "next_sentence_label", "seq_relationship_logits", "next_sentence"

    def __init__(self, lm: MaskedLM, hidden_size: int):
        super().__init__(lm)
        self.nsp = Linear(hidden_size, 2)

    def of_pairs(self, pooled: Tensor, ctx: Packed) -> Tensor:
        return self.nsp(pooled)


class SentenceOrder(PairPretraining):
    """ALBERT's: whether two consecutive texts are in order (0) or swapped (1)."""

    label, logits, term = "sentence_order_label", "sop_logits", "sentence_order"

    def __init__(self, lm: MaskedLM, hidden_size: int, dropout: float):
        super().__init__(lm)
        self.sop, self.dropout = Linear(hidden_size, 2), Dropout(dropout)

    def of_pairs(self, pooled: Tensor, ctx: Packed) -> Tensor:
        return self.sop(self.dropout(pooled, ctx, pooled=True))

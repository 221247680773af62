"""The distance between a model's logits and its teacher's, for each kind of head that returns its logits.

A comparison covers the items over which the labels' loss is a mean. If a batch has labels, items without one (-100) do
not count; if it has none, all rows count.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.layers.heads import count_labels
from modelcenter.layers.packing import in_rows

Batch = Mapping[str, Any]


class Comparison(Protocol):
    """The comparison for one kind of head. out, teacher: the outputs of the two models for a batch.

    Attributes:
        decides: whether the models make decisions, in which they can agree.
    """

    decides: bool

    def items(self, batch: Batch) -> int:
        """The number of compared items in a batch."""
        ...

    def distance(self, out: Any, teacher: Any, batch: Batch, temperature: float) -> Tensor:
        """0-d: the sum over the items, with a gradient into `out`; T^2 KL(teacher || out), or a squared difference."""
        ...

    def agreements(self, out: Any, teacher: Any, batch: Batch) -> tuple[Tensor, int] | None:
        """(number of decisions in which the two agree, number of decisions); None: they make none."""
        ...


class OneOfSeveral:
    """The class or the choice of a row. logits (rows, classes).

    Args:
        order: (classes,) the teacher's class for each of the model's, on its device; None: the same order.
    """

    decides = True

    def __init__(self, order: Tensor | None = None):
        self.order = order

    def items(self, batch: Batch) -> int:
        return _rows(batch) if batch.get("labels") is None else count_labels(batch["labels"])

    def logits(self, out: Any, teacher: Any) -> tuple[Tensor, Tensor]:
        """The logits of both models, the teacher's in the model's order."""
        return out.logits, in_order(teacher.logits, self.order)

    def counted(self, batch: Batch, shape: torch.Size) -> Tensor | None:
        """Which decisions count, in the shape of logits without their last dimension; None: all."""
        labels = batch.get("labels")
        return None if labels is None else (labels != IGNORE_INDEX).view(shape)

    def distance(self, out: Any, teacher: Any, batch: Batch, temperature: float) -> Tensor:
        own, theirs = self.logits(out, teacher)
        distances = divergence(own, theirs, temperature)
        counted = self.counted(batch, distances.shape)
        return (distances if counted is None else torch.where(counted, distances, 0.0)).sum()

    def agreements(self, out: Any, teacher: Any, batch: Batch) -> tuple[Tensor, int] | None:
        own, theirs = self.logits(out, teacher)
        same = own.argmax(-1) == theirs.argmax(-1)
        counted = self.counted(batch, same.shape)
        return (same if counted is None else same & counted).sum(), self.items(batch)


class Tags(OneOfSeveral):
    """The class of each labelled token. logits (batch, seq, classes), labels (batch, seq)."""


class SeveralOfSeveral(OneOfSeveral):
    """Multi-label classification: each label is a decision, and their mean distance is the row's. logits (rows,
    classes)."""

    def items(self, batch: Batch) -> int:
        return _rows(batch)

    def distance(self, out: Any, teacher: Any, batch: Batch, temperature: float) -> Tensor:
        own, theirs = (logits.float() / temperature for logits in self.logits(out, teacher))
        given = theirs.sigmoid() * (F.logsigmoid(theirs) - F.logsigmoid(own))
        left = (-theirs).sigmoid() * (F.logsigmoid(-theirs) - F.logsigmoid(-own))
        return temperature**2 * (given + left).sum() / max(own.shape[-1], 1)

    def agreements(self, out: Any, teacher: Any, batch: Batch) -> tuple[Tensor, int] | None:
        own, theirs = self.logits(out, teacher)
        return ((own > 0) == (theirs > 0)).sum(), own.numel()


class Scores(SeveralOfSeveral):
    """Regression: the mean squared difference of a row's values, whatever the temperature. logits (rows, values)."""

    decides = False

    def distance(self, out: Any, teacher: Any, batch: Batch, temperature: float) -> Tensor:
        own, theirs = self.logits(out, teacher)
        return F.mse_loss(own.float(), theirs.float(), reduction="sum") / max(own.shape[-1], 1)

    def agreements(self, out: Any, teacher: Any, batch: Batch) -> tuple[Tensor, int] | None:
        return None


class Spans:
    """Starts and ends of answers, each a token of its sequence. Logits (1, T) of packed sequences. An item has two
    decisions, and its distance is their mean."""

    decides = True

    def items(self, batch: Batch) -> int:
        return int(self._counted(batch).sum())

    def distance(self, out: Any, teacher: Any, batch: Batch, temperature: float) -> Tensor:
        both = [divergence(*logits, temperature) for logits in self._logits(out, teacher, batch)]
        return torch.where(self._counted(batch), both[0] + both[1], 0.0).sum() / 2

    def agreements(self, out: Any, teacher: Any, batch: Batch) -> tuple[Tensor, int] | None:
        counted = self._counted(batch)
        same = torch.zeros((), dtype=torch.int64, device=counted.device)
        for own, theirs in self._logits(out, teacher, batch):
            if len(own):
                same += ((own.argmax(-1) == theirs.argmax(-1)) & counted).sum()
        return same, 2 * self.items(batch)

    @staticmethod
    def _logits(out: Any, teacher: Any, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """The logits of both models, (sequences, tokens of the longest): those of starts, then those of ends."""
        names = ("start_logits", "end_logits")
        return [(by_sequence(out[name][0], batch), by_sequence(teacher[name][0], batch)) for name in names]

    @staticmethod
    def _counted(batch: Batch) -> Tensor:
        """(sequences,) whether both labels are tokens of the sequence."""
        lengths = batch["cu_seqlens"].diff()
        return (batch["start_positions"] < lengths) & (batch["end_positions"] < lengths)


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(logits / T)) over the last dimension, in fp32."""
    log_q = F.log_softmax(logits.float() / temperature, -1)
    log_p = F.log_softmax(teacher.float() / temperature, -1)
    p = log_p.exp()
    # At padding both logits are the lowest finite number, whose difference may not be finite.
    return temperature**2 * torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def by_sequence(values: Tensor, batch: Batch) -> Tensor:
    """(sequences, tokens of the longest): values (T,) of packed sequences, padded with the lowest finite number."""
    lengths = batch["cu_seqlens"].diff().long()
    return in_rows(values.float(), lengths, batch["max_seqlen"], torch.finfo(torch.float32).min)


def in_order(logits: Tensor, order: Tensor | None) -> Tensor:
    """The teacher's logits (..., classes) in the order of the model's classes."""
    return logits if order is None else logits.index_select(-1, order)


def _rows(batch: Batch) -> int:
    """The number of rows in a packed batch."""
    return len(batch["cu_seqlens"]) - 1

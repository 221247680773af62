"""The loss of a model that has a teacher: a share is how far its predictions are from the teacher's, the rest is the
loss of the labels."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from modelcenter.models.base import Model
from modelcenter.training.accumulation import Batch, ModelLoss, TrainingLoss
from modelcenter.training.distillation.comparisons import Comparison
from modelcenter.training.distillation.teacher import Teacher
from modelcenter.training.evaluation import Batches, MetricUpdate, evaluate
from modelcenter.training.metrics import Score, is_counted, sum_over_ranks

LABEL_LOSS, TEACHER_LOSS, TOTAL_LOSS, AGREEMENT = "label_loss", "teacher_loss", "total_loss", "teacher_agreement"
_TERM = "teacher"  # of the loss: the items that are compared


class Parts:
    """What losses are made of, added up over batches: those of the labels and of the teacher; and in how many of how
    many decisions the two models agreed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._same = self._decisions = 0

    def add(self, **losses: Tensor | None) -> None:
        """losses: 0-d, the shares of a batch in the means over the global batch; None: it has none."""
        for name, loss in losses.items():
            if loss is not None:
                value = loss.detach().double()
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_agreements(self, found: tuple[Tensor, int] | None) -> None:
        if found is not None:
            self._same += int(found[0])
            self._decisions += found[1]

    def losses(self) -> dict[str, float]:
        """{name: mean over the global batch}, of those that any rank has. Collective."""
        names = (LABEL_LOSS, TEACHER_LOSS)
        found = torch.zeros(2, len(names), dtype=torch.float64)
        if is_counted():  # of ranks that compute a batch together, one
            for i, name in enumerate(names):
                if name in self._sums:
                    found[:, i] = torch.tensor([self._sums[name].item(), 1.0])
        values, ranks = sum_over_ranks(found).tolist()
        return {name: value for name, value, n in zip(names, values, ranks, strict=True) if n}

    def agreement(self) -> float | None:
        """The share of decisions in which the models agreed; None: there were none. Collective."""
        same, of = sum_over_ranks(torch.tensor([self._same, self._decisions])).tolist()
        return same / of if of else None


@dataclass(eq=False)
class Distillation:
    """A TrainingLoss: (1 - share) of the labels' loss and a share of the teacher's, which is T^2 KL(teacher || model),
    summed over the items of a batch and divided by those of the global batch.

    Attributes:
        labels: the loss of the labels. share: above 0; at 1 rows need no labels. temperature: T.
        comparison: of the two models' logits; None: the vocabulary's head compares them, chunk by chunk.
        hidden_inputs: what batches hold for the teacher alone. parts: of the losses since they were cleared.
    """

    labels: TrainingLoss
    teacher: Teacher
    share: float
    temperature: float
    comparison: Comparison | None
    hidden_inputs: frozenset[str] = frozenset()
    parts: Parts = field(default_factory=Parts)
    _prediction: tuple[Batch, Any] | None = field(default=None, init=False)  # the teacher's, for the last batch

    @property
    def metric_names(self) -> list[str]:
        """The metrics that `evaluate` adds."""
        decides = self.comparison is not None and self.comparison.decides
        return [TOTAL_LOSS, TEACHER_LOSS, *([AGREEMENT] if decides else [])]

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Runs the teacher, before the model's activations are in memory, and on all ranks: on some of them nothing
        else is done with a batch. Collective."""
        given = {name: x for name, x in self.labels.inputs(batch).items() if name not in self.hidden_inputs}
        if self.comparison is None:
            given["soft_targets"] = self.teacher.soft_targets(batch, self.share, self.temperature)
        else:
            self._prediction = batch, self.teacher.logits(batch)
        return given

    def counts(self, batch: Batch) -> Mapping[str, int]:
        own = {} if self.comparison is None else {_TERM: self.comparison.items(batch)}
        return {**self.labels.counts(batch), **own}

    def __call__(self, out: Any, batch: Batch, totals: Mapping[str, int]) -> Tensor:
        if self.comparison is None:
            self.parts.add(**{name: out[name] for name in (LABEL_LOSS, TEACHER_LOSS)})
            return out.loss
        assert self._prediction is not None and self._prediction[0] is batch
        prediction, self._prediction = self._prediction[1], None
        distance = self.comparison.distance(out, prediction, batch, self.temperature) / max(totals[_TERM], 1)
        of_labels = None if out.loss is None else self.labels(out, batch, totals)
        self.parts.add(**{LABEL_LOSS: of_labels, TEACHER_LOSS: distance})
        if not distance.requires_grad:  # in an evaluation
            self.parts.add_agreements(self.comparison.agreements(out, prediction, batch))
        if of_labels is None or self.share == 1:  # without a graph of the labels' loss
            return distance
        return self._mixed(of_labels, distance)

    def _mixed(self, of_labels: Any, of_teacher: Any) -> Any:
        return (1 - self.share) * of_labels + self.share * of_teacher

    def evaluate(
        self, model: Model, batches: Batches, metrics: Score | None = None, feed: MetricUpdate | None = None
    ) -> dict[str, float | None]:
        """evaluation.evaluate, and how far the model is from its teacher. Collective.

        Returns:
            As there, where the loss is that of the labels, as without a teacher (None: there are none); total_loss,
            what training makes less; teacher_loss; and teacher_agreement, where the models decide something.
        """
        loss = replace(self, labels=ModelLoss(model), parts=Parts())
        result = evaluate(model, batches, metrics, feed, loss)
        parts = loss.parts.losses()
        of_labels, of_teacher = parts.get(LABEL_LOSS), parts.get(TEACHER_LOSS)
        # Not what `evaluate` gives: metrics may have a loss of their own, of the labels.
        total = of_teacher if of_labels is None or of_teacher is None else self._mixed(of_labels, of_teacher)
        result |= {"loss": of_labels, TOTAL_LOSS: total, TEACHER_LOSS: of_teacher}
        if (agreement := loss.parts.agreement()) is not None:
            result[AGREEMENT] = agreement
        return result

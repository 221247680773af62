"""The loss of a model with a teacher: a weighted mean of the distance to the teacher's predictions and the labels'
loss."""

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
_TERM = "teacher"  # the term of the loss that counts the compared items


class Parts:
    """Sums over batches of the labels' loss and the teacher's loss, and counts of decisions and of agreements between
    the two models."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._same = self._decisions = 0

    def add(self, **losses: Tensor | None) -> None:
        """losses: 0-d, the contributions of a batch to the means over the global batch; None: it has none."""
        for name, loss in losses.items():
            if loss is not None:
                value = loss.detach().double()
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_agreements(self, found: tuple[Tensor, int] | None) -> None:
        if found is not None:
            self._same += int(found[0])
            self._decisions += found[1]

    def losses(self) -> dict[str, float]:
        """{name: mean over the global batch}, for the losses that any rank has. Collective."""
        names = (LABEL_LOSS, TEACHER_LOSS)
        found = torch.zeros(2, len(names), dtype=torch.float64)
        if is_counted():  # one of the ranks that compute a batch together
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
    """A TrainingLoss: (1 - share) times the labels' loss plus share times the teacher's, which is T^2 KL(teacher ||
    model) summed over the items of a batch and divided by those of the global batch.

    Attributes:
        labels: the loss of the labels. share: above 0; at 1 rows need no labels. temperature: T.
        comparison: of the two models' logits; None: the head over the vocabulary compares them, in chunks.
        hidden_inputs: inputs in a batch that only the teacher reads. parts: of the losses since they were cleared.
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
        """The names of the metrics that `evaluate` adds."""
        decides = self.comparison is not None and self.comparison.decides
        return [TOTAL_LOSS, TEACHER_LOSS, *([AGREEMENT] if decides else [])]

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Run the teacher, before the model's activations are in memory, and on all ranks, because for some ranks it is
        the only step with a batch. Collective."""
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
        if of_labels is None or self.share == 1:  # without an autograd graph of the labels' loss
            return distance
        return self._mixed(of_labels, distance)

    def _mixed(self, of_labels: Any, of_teacher: Any) -> Any:
        return (1 - self.share) * of_labels + self.share * of_teacher

    def evaluate(
        self, model: Model, batches: Batches, metrics: Score | None = None, feed: MetricUpdate | None = None
    ) -> dict[str, float | None]:
        """evaluation.evaluate, with the distance between the model and its teacher. Collective.

        Returns:
            As there, with the labels' loss as "loss" (None: there are no labels); total_loss, which training minimises;
            teacher_loss; and teacher_agreement, if the models make decisions.
        """
        loss = replace(self, labels=ModelLoss(model), parts=Parts())
        result = evaluate(model, batches, metrics, feed, loss)
        parts = loss.parts.losses()
        of_labels, of_teacher = parts.get(LABEL_LOSS), parts.get(TEACHER_LOSS)
        # Not the loss that `evaluate` returns: metrics may compute a labels' loss of their own.
        total = of_teacher if of_labels is None or of_teacher is None else self._mixed(of_labels, of_teacher)
        result |= {"loss": of_labels, TOTAL_LOSS: total, TEACHER_LOSS: of_teacher}
        if (agreement := loss.parts.agreement()) is not None:
            result[AGREEMENT] = agreement
        return result

"""Flags of knowledge distillation: training a model to predict what a teacher predicts. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig

_NO_TEACHER = Idle(lambda c: c.teacher is None, "without a teacher; give teacher too, or leave it out")
# For flags that only affect the loss of the labels.
TEACHER_ALONE = Idle(
    lambda c: c.teacher is not None and c.teacher_weight == 1,
    "beside teacher_weight 1, where labels are not trained on; leave one out",
)
_model, _optimisation = partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class TaughtConfig(TrainConfig):
    """Flags of the tasks that support a teacher."""

    # With few classes a good teacher is nearly certain of one, and a higher temperature shows how it ranks the others.
    # Over a vocabulary its predictions are already spread out.
    usual_temperature: ClassVar[float] = 2.0
    idle: ClassVar[Mapping[str, Idle]] = {
        **TrainConfig.idle,
        "teacher_weight": _NO_TEACHER,
        "teacher_temperature": _NO_TEACHER,
        "label_smoothing": TEACHER_ALONE,
    }

    teacher: str | None = _model(None, "Hub name, local directory or run folder of a teacher, whose predictions the "
        "model is trained to match (knowledge distillation): a model for the same task, of any family with the same "
        "vocabulary",
        "teacher_model", "teacher_name_or_path")
    teacher_weight: float = _optimisation(0.5, "share of the loss, above 0, that compares the model with its teacher; "
        "the rest is the loss of the labels; at 1 classification needs no labels", "distillation_weight")
    teacher_temperature: float | None = _optimisation(None, "divides the logits of both models before they are "
        "compared; a higher value gives more weight to what the teacher thinks unlikely; if not given, 2, or 1 for "
        "language models",
        "distillation_temperature")
    # fmt: on

    def check(self) -> None:
        super().check()
        if not 0 < self.teacher_weight <= 1:
            raise ValueError(
                f"teacher_weight: got {self.teacher_weight}, expected a share of the loss above 0 and up to 1; to "
                "train on the labels only, leave teacher out"
            )
        check_positive(self, "teacher_temperature")
        if self.teacher is not None and self.teacher_temperature is None:
            self.teacher_temperature = self.usual_temperature
        if self.teacher is not None and self.pp > 1:
            raise ValueError(
                "teacher: cannot be used with --pp, because stages would need the outputs of both models; use --zero "
                "3, which shards the model and its teacher, or --tp, which splits their layers"
            )

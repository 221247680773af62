"""Flags of a teacher, whose predictions a model is trained to give (knowledge distillation). Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig

_NO_TEACHER = Idle(lambda c: c.teacher is None, "without a teacher; give teacher too, or leave it out")
# Of a flag that is about the loss of the labels.
TEACHER_ALONE = Idle(
    lambda c: c.teacher is not None and c.teacher_weight == 1,
    "beside teacher_weight 1, where labels are not trained on; leave one out",
)
_model, _optimisation = partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class TaughtConfig(TrainConfig):
    """Flags of the tasks whose models can have a teacher."""

    # For a few classes, of which a good teacher is nearly certain, a higher temperature shows how it ranks the others;
    # of a vocabulary its predictions are spread out as they are.
    usual_temperature: ClassVar[float] = 2.0
    idle: ClassVar[Mapping[str, Idle]] = {
        **TrainConfig.idle,
        "teacher_weight": _NO_TEACHER,
        "teacher_temperature": _NO_TEACHER,
        "label_smoothing": TEACHER_ALONE,
    }

    teacher: str | None = _model(None, "Hub name, local directory or run folder of a model for the same task, of any "
        "family with the same vocabulary: the model is trained to predict what it does (knowledge distillation)",
        "teacher_model", "teacher_name_or_path")
    teacher_weight: float = _optimisation(0.5, "share of the loss that compares the model with its teacher, above 0; "
        "the rest is the loss of the labels; at 1 classification needs no labels", "distillation_weight")
    teacher_temperature: float | None = _optimisation(None, "logits of both are divided by it before they are "
        "compared; higher: what the teacher thinks unlikely counts more; if not given, 2, or 1 for language models",
        "distillation_temperature")
    # fmt: on

    def check(self) -> None:
        super().check()
        if not 0 < self.teacher_weight <= 1:
            raise ValueError(
                f"teacher_weight: got {self.teacher_weight}, expected a share of the loss above 0 and up to 1; to "
                "train on the labels alone leave teacher out"
            )
        check_positive(self, "teacher_temperature")
        if self.teacher is not None and self.teacher_temperature is None:
            self.teacher_temperature = self.usual_temperature
        if self.teacher is not None and self.pp > 1:
            raise ValueError(
                "teacher: not with --pp, whose stages would need the outputs of both models; --zero 3 shards the model "
                "and its teacher, and --tp splits their layers"
            )

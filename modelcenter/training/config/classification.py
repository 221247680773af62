"""Flags of text classification. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.teacher import TEACHER_ALONE, TaughtConfig

PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
_data, _optimisation = partial(flag, "data"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class ClassificationConfig(TaughtConfig):
    """Flags of text classification and regression."""

    task: ClassVar[str] = "classification"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("text", "text_pair", "label", "group")
    idle: ClassVar[Mapping[str, Idle]] = {**TaughtConfig.idle, "class_weights": TEACHER_ALONE}

    text_column: str | None = _data(None, "column with the text; detected if not given", "sentence1_key",
        "text_column_name", "text_column_names")
    text_pair_column: str | None = _data(None, "column with a second text; detected by its usual names if not given",
        "sentence2_key")
    label_column: str | None = _data(None, "column with the label, or several comma-separated columns of 0 and 1, one "
        "per label that a row may have; if not given, detected as the column with few distinct values",
        "label_column_name")
    group_column: str | None = _data(None, "column that identifies the question a row belongs to; evaluations then "
        "also report the share of questions whose rows are all correct", "group_column_name")
    num_labels: int | None = _data(None, "number of classes (integer labels run from 0 to num_labels - 1); counted in "
        "the data if not given")
    problem_type: str | None = _data(None, "kind of labels; if not given, detected: lists mean multi-label, fractions "
        "mean regression", choices=PROBLEM_TYPES)
    class_weights: list[str] | None = _optimisation(None, "weight of the rows of each class in the training loss, such "
        "as spam=3 (all others 1); balanced: weights inversely proportional to class frequency", "class_weight")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "num_labels")
        if self.num_labels == 1 and self.problem_type not in (None, "regression"):
            raise ValueError(f"num_labels: got 1, which means regression, but problem_type is {self.problem_type}")

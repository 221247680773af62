"""Flags of text classification. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig

PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
_data, _optimisation = partial(flag, "data"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class ClassificationConfig(TrainConfig):
    """Flags of text classification and regression."""

    task: ClassVar[str] = "classification"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("text", "text_pair", "label", "group")

    text_column: str | None = _data(None, "column of the text; none: found", "sentence1_key", "text_column_name",
        "text_column_names")
    text_pair_column: str | None = _data(None, "column of a second text; none: found by its usual names",
        "sentence2_key")
    label_column: str | None = _data(None, "column of the label, or several of 0 and 1 with commas between them: the "
        "labels a row may have; none: found, the one with few distinct values", "label_column_name")
    group_column: str | None = _data(None, "column that says which rows belong to one question: an evaluation also "
        "says how many questions have all their rows right", "group_column_name")
    num_labels: int | None = _data(None, "classes: integer labels are 0 to num_labels - 1; none: counted")
    problem_type: str | None = _data(None, "kind of label; none: found (lists are multi-label, fractions regression)",
        choices=PROBLEM_TYPES)
    class_weights: list[str] | None = _optimisation(None, "how much the rows of a class count in training, such as "
        "spam=3 (the others 1); balanced: the rarer the class the more", "class_weight")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "num_labels")
        if self.num_labels == 1 and self.problem_type not in (None, "regression"):
            raise ValueError(f"num_labels: got 1, which is for regression, but problem_type is {self.problem_type}")

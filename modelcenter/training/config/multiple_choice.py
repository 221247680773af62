"""Flags of multiple choice. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.common import TrainConfig

_data = partial(flag, "data")


# fmt: off
@dataclass(kw_only=True)
class MultipleChoiceConfig(TrainConfig):
    """Flags of multiple choice. A row counts once in batch_size, with all its choices."""

    task: ClassVar[str] = "multiple-choice"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("context", "question", "choices", "label")

    context_column: str | None = _data(None, "column of the text that is asked about; none: found, if there is one",
        "context_column_name")
    question_column: str | None = _data(None, "column of the question, or of how each choice begins; none: found, if "
        "there is one", "question_column_name")
    choices_column: str | None = _data(None, "column of a list of choices, or several with commas between them: "
        "ending0,ending1; none: found", "choices_columns")
    label_column: str | None = _data(None, "column of the right choice: its number, letter, name or text; none: found",
        "label_column_name")
    first_choice: int | None = _data(None, "number of the first choice where labels are numbers; none: 1 if some row "
        "has as many as it has choices and none has 0, else 0", choices=(0, 1))
    # fmt: on

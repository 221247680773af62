"""Flags of multiple choice. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.teacher import TaughtConfig

_data = partial(flag, "data")


# fmt: off
@dataclass(kw_only=True)
class MultipleChoiceConfig(TaughtConfig):
    """Flags of multiple choice. A row counts once in batch_size, with all its choices."""

    task: ClassVar[str] = "multiple-choice"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("context", "question", "choices", "label")

    context_column: str | None = _data(None, "column with the text that the question is about; if not given, detected, "
        "if there is one", "context_column_name")
    question_column: str | None = _data(None, "column with the question, or with the beginning of each choice; if not "
        "given, detected, if there is one", "question_column_name")
    choices_column: str | None = _data(None, "column with a list of choices, or several comma-separated columns "
        "(ending0,ending1); detected if not given", "choices_columns")
    label_column: str | None = _data(None, "column with the correct choice, as a number, letter, name or text; "
        "detected if not given", "label_column_name")
    first_choice: int | None = _data(None, "number of the first choice where labels are numbers; if not given, 1 if no "
        "label is 0 and some row's label equals its number of choices, otherwise 0", choices=(0, 1))
    label_kind: str | None = _data(None, "how to read labels that fit several of these, such as numbers when the "
        "choices are numbers too; if not given, the first of these that fits all rows",
        choices=("name", "text", "letter", "number"))
    # fmt: on

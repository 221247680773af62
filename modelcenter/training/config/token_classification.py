"""Flags of token classification. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.teacher import TEACHER_ALONE, TaughtConfig

_data, _optimisation = partial(flag, "data"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class TokenClassificationConfig(TaughtConfig):
    """Flags of token classification."""

    task: ClassVar[str] = "token-classification"
    roles: ClassVar[tuple[str, ...]] = ("words", "tags")
    idle: ClassVar[Mapping[str, Idle]] = {**TaughtConfig.idle, "class_weights": TEACHER_ALONE}

    words_column: str | None = _data(None, "column with the words, a list in each row; detected if not given",
        "text_column_name", "tokens_column")
    tags_column: str | None = _data(None, "column with the tags, one per word; detected if not given",
        "label_column_name", "labels_column")
    tag_names: list[str] | None = _data(None, "names of the tags in the order of their numbers, for data that has only "
        "numbers")
    label_all_tokens: bool = _data(False, "train on every token of a word (with I- after a B-) instead of only its "
        "first token")
    too_long: str = _data("split", "what to do with training rows of more than max_length tokens: split them between "
        "words, or cut them; evaluation rows are always split", choices=("split", "cut"))
    class_weights: list[str] | None = _optimisation(None, "weight of the words of each class in the training loss, "
        "such as spam=3 (all others 1); balanced: weights inversely proportional to class frequency", "class_weight")
    # fmt: on

"""Flags of token classification. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.training.config.common import TrainConfig

_data, _optimisation = partial(flag, "data"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class TokenClassificationConfig(TrainConfig):
    """Flags of token classification."""

    task: ClassVar[str] = "token-classification"
    roles: ClassVar[tuple[str, ...]] = ("words", "tags")

    words_column: str | None = _data(None, "column of the words, a list in each row; none: found", "text_column_name",
        "tokens_column")
    tags_column: str | None = _data(None, "column of the tags, as many as words; none: found", "label_column_name",
        "labels_column")
    tag_names: list[str] | None = _data(None, "names of the tags, in the order of their numbers, where the data have "
        "numbers and no names")
    label_all_tokens: bool = _data(False, "train on every token of a word (with I- behind a B-), not on its first only")
    too_long: str = _data("split", "training rows of more than max_length tokens: split at words, or cut; rows "
        "that are judged are always split", choices=("split", "cut"))
    class_weights: list[str] | None = _optimisation(None, "how much the words of a class count in training, such as "
        "spam=3 (the others 1); balanced: the rarer the class the more", "class_weight")
    # fmt: on

"""Matching the classes of a model and its teacher, by name and in any order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelcenter.command_line.errors import flag_in_errors
from modelcenter.hub.resolve import read_config
from modelcenter.training.trained import class_names


def classes_of_teacher(name: str) -> tuple[str, list[str]]:
    """(problem_type, names of the classes in order) of a classification teacher, from its config only.

    Raises:
        ValueError: the model does not exist.
    """
    with flag_in_errors("teacher"):
        config = read_config(name)
    names = class_names(config) or [f"LABEL_{i}" for i in range(config.get("num_labels") or 2)]
    usual = "regression" if len(names) == 1 else "single_label_classification"
    return config.get("problem_type") or usual, names


def names_of(config: Any) -> list[str]:
    """The names of the classes of a model's head, in order."""
    return [(config.id2label or {}).get(i, f"LABEL_{i}") for i in range(config.num_labels)]


def class_order(names: Sequence[str], theirs: Sequence[str], teacher: str) -> Tensor | None:
    """(classes,) the teacher's class for each of the model's; None: both have the same order.

    Classes are matched by name, ignoring case. If one of the two only numbers them (0, 1; LABEL_0, LABEL_1), they are
    matched by number.

    Args:
        names: of the model's classes. theirs: of the teacher's. teacher: its name, for messages.

    Raises:
        ValueError: only one of the two has some class.
    """
    places = {name.lower(): i for i, name in enumerate(theirs)} | {name: i for i, name in enumerate(theirs)}
    order = [places.get(name, places.get(name.lower())) for name in names]
    if len(names) == len(theirs) and (_are_numbers(names) or _are_numbers(theirs)):
        return None
    missing = [name for name, place in zip(names, order, strict=True) if place is None]
    more = [name for i, name in enumerate(theirs) if i not in order]
    if missing or more:
        said = f"lacks the class {_shown(missing)}" if missing else f"also has the class {_shown(more)}"
        raise ValueError(
            f"teacher: {teacher} {said}: its {len(theirs)} classes are {_shown(theirs)}, those of the model "
            f"{_shown(names)}; give a teacher with the same classes, in any order"
        )
    return None if order == [*range(len(order))] else torch.tensor(order)


def _are_numbers(names: Sequence[str]) -> bool:
    """Whether the names of the classes are only their numbers."""
    return all(name in (str(i), f"LABEL_{i}") for i, name in enumerate(names))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")

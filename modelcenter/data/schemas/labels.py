"""From labels as written in data (names, numbers, lists, scores) to the targets of a classification head."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from modelcenter.data.readers.literals import parse_list, parse_lists
from modelcenter.data.schemas.class_names import match_order, renumbered
from modelcenter.data.schemas.columns import is_missing

Where = Callable[[int], str]
# Up to this many rows, every row may have a different whole number as its label. With more than _MANY_LABELS numbers,
# there must be two rows per number on average.
_A_FEW_LABELS, _MANY_LABELS = 10, 100


@dataclass(frozen=True)
class Labels:
    """The type of problem, and the names of the classes (for regression: of the values, usually one).

    by_id: integers in the data are ids of classes, not names. multi_hot: labels of the training rows are lists of zeros
    and ones, one per class.
    """

    problem_type: str
    names: tuple[str, ...]
    by_id: bool = False
    multi_hot: bool = False

    def encode(
        self,
        values: Sequence[Any],
        where: Where,
        known_from: str = "the training data",
        classes: Sequence[str] | None = None,
    ) -> np.ndarray:
        """Targets of the rows: int64 (n,) single label; float32 (n, classes) multi-label; float32 (n,) or (n, k)
        regression.

        where: gives the location of a row, for messages. classes: the source's own names of its classes, by id; if they
        are the same classes as here, its ids are read by these, whatever the numbering here. Raises ValueError if a row
        has no label or one outside the classes.
        """
        order = match_order(self.names, classes)
        if order is not None and any(type(v) is int for value in values for v in _members(value)):
            targets = replace(self, names=order, by_id=True).encode(values, where, known_from)
            return renumbered(targets, np.array([self._ids[name] for name in order]))
        values = _read(values, where, self.problem_type, self.names, self.by_id)
        if self.problem_type == "regression":
            return _floats(values, where, len(self.names))
        if self.problem_type == "single_label_classification":
            ids: dict[Any, int] = {}
            targets = np.empty(len(values), dtype=np.int64)
            for row, value in enumerate(values):
                if value not in ids:
                    ids[value] = self._id_of(value, row, where, known_from)
                targets[row] = ids[value]
            return targets
        lists = [_as_list(value) for value in values]
        # With names, a number is not a label: it says whether the row has the class at its position.
        if (self.multi_hot or not self.by_id) and _zeros_and_ones(lists, len(self.names)):
            return np.array([[float(v) for v in row] for row in lists], dtype=np.float32)
        targets = np.zeros((len(values), len(self.names)), dtype=np.float32)
        for row, members in enumerate(lists):
            _refuse_repeated_numbers(members, row, where)
            for value in members:
                targets[row, self._id_of(value, row, where, known_from)] = 1.0
        return targets

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _id_of(self, value: Any, row: int, where: Where, known_from: str) -> int:
        number = _as_id(value)
        if self.by_id and number is not None:
            class_id = number if 0 <= number < len(self.names) else None
        else:
            class_id = self._ids.get(str(value))
            if class_id is None and number is not None:
                class_id = self._ids.get(str(number))  # 3, "3" and "3.0" are one label
        if class_id is None:
            if self.by_id:
                expected = f"outside num_labels {len(self.names)} (labels 0 to {len(self.names) - 1})"
            else:
                shown = ", ".join(map(repr, self.names[:10])) + (", ..." if len(self.names) > 10 else "")
                expected = f"not one of the labels of {known_from} ({shown})"
            raise ValueError(f"{where(row)}: label {value!r} is {expected}")
        return class_id


def find_labels(
    values: Sequence[Any],
    where: Where,
    *,
    problem_type: str | None = None,
    num_labels: int | None = None,
    names: Sequence[str] | None = None,
    column: str = "it",
) -> Labels:
    """Find the type of problem and the classes from the training labels.

    Numbers with a fraction, or lists of such numbers, mean regression, other lists multi-label, anything else single
    label. Integer labels 0..k-1 keep their ids; other integers and strings are numbered in sorted order. names: class
    names given by the source (or a fine-tuned model), by id. column: its name, for messages.
    Raises ValueError if a row has no label, if the labels do not fit num_labels or problem_type, and, without these, if
    there are whole numbers that hardly recur.
    """
    given, problem_type = problem_type, problem_type or _guess_type(values, where)
    values = _read(values, where, problem_type, names or (), names is not None)
    if given is None and problem_type == "single_label_classification" and names is None:
        _check_single(values, where)
        if num_labels is None:
            _check_recurring_numbers(values, where, column)
    if problem_type == "regression":
        return _scores_of(values, where, num_labels)
    multi = problem_type == "multi_label_classification"
    lists = [_as_list(value) for value in values] if multi else [[value] for value in values]
    if names is not None:
        return _named_classes(lists, problem_type, num_labels, tuple(names))
    if multi and _is_multi_hot(lists):
        return _classes_by_place(lists, where, num_labels)
    if num_labels is None and not any(lists):
        raise ValueError(
            f"label_column: all lists of labels in {column} are empty (first at {where(0)}), expected some labels; is "
            "it the right column?"
        )
    return _classes_of(lists, where, problem_type, num_labels)


def unsaid(
    values: Sequence[Any],
    where: Where,
    labels: Labels,
    *,
    problem_type: str | None,
    num_labels: int | None,
    names: Sequence[str] | None,
) -> dict[str, Any]:
    """The problem_type and num_labels that would be detected if they were not given; `labels` is the result of
    `find_labels` with the same arguments. A value without which the labels cannot be read is left out."""
    found: dict[str, Any] = {"problem_type": labels.problem_type, "num_labels": len(labels.names)}
    if problem_type is not None:
        try:
            found["problem_type"] = _guess_type(values, where)
        except ValueError:
            del found["problem_type"]
    if num_labels is not None:
        try:
            kept = find_labels(values, where, problem_type=labels.problem_type, names=names)
        except ValueError:
            del found["num_labels"]
        else:
            found["num_labels"] = len(kept.names)
    return found


def _scores_of(values: Sequence[Any], where: Where, num_labels: int | None) -> Labels:
    width = num_labels or (len(values[0]) if isinstance(values[0], list) else 1)
    _floats(values, where, width)  # raises for other values
    return Labels("regression", ("score",) if width == 1 else tuple(f"score_{i}" for i in range(width)))


def _named_classes(lists: list[list[Any]], problem_type: str, num_labels: int | None, names: tuple[str, ...]) -> Labels:
    """The classes with these names; the labels give the names or the ids."""
    if num_labels not in (None, len(names)):
        raise ValueError(f"num_labels is {num_labels}, but the labels have {len(names)} names: {', '.join(names)}")
    ids = {v: _as_id(v) for members in lists for v in members}
    # "1.0" also means the class called 1: see Labels.encode.
    named = all(str(v) in names or str(number) in names for v, number in ids.items())
    # How a model's training rows were written is unknown; this rule does not depend on other rows.
    multi_hot = problem_type == "multi_label_classification" and _zeros_and_ones(lists, len(names))
    return Labels(problem_type, names, by_id=None not in ids.values() and not named, multi_hot=multi_hot)


def _classes_by_place(lists: list[list[Any]], where: Where, num_labels: int | None) -> Labels:
    """The classes for lists with a zero or a one per class."""
    width = len(lists[0])
    if num_labels not in (None, width):
        raise ValueError(f"{where(0)}: the label lists {width} zeros and ones, but num_labels is {num_labels}")
    return Labels("multi_label_classification", tuple(map(str, range(width))), by_id=True, multi_hot=True)


def _classes_of(lists: list[list[Any]], where: Where, problem_type: str, num_labels: int | None) -> Labels:
    """The classes of the distinct labels: whole numbers are ids, others are numbered in sorted order."""
    first_row: dict[Any, int] = {}
    for row, members in enumerate(lists):
        for value in members:
            first_row.setdefault(value, row)
    numbers = {value: _as_id(value) for value in first_row}
    if first_row and all(number is not None for number in numbers.values()):
        distinct = sorted({number for number in numbers.values() if number is not None})
        if num_labels is not None or distinct == list(range(len(distinct))):
            count = num_labels or len(distinct)
            outside = next((v for v, number in numbers.items() if number is None or not 0 <= number < count), None)
            if outside is not None:
                raise ValueError(
                    f"{where(first_row[outside])}: label {outside!r} is outside num_labels {count} (0 to {count - 1}); "
                    f"without num_labels, the {len(distinct)} distinct labels are numbered in order"
                )
            return _at_least_two(Labels(problem_type, tuple(map(str, range(count))), by_id=True), where)
        return _at_least_two(Labels(problem_type, tuple(map(str, distinct))), where)
    names = sorted(set(map(str, first_row)))
    if num_labels is not None and len(names) > num_labels:
        shown = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
        raise ValueError(f"num_labels is {num_labels}, but the data has {len(names)} labels: {shown}")
    if len(names) > 2 and 2 * len(names) > len(lists) and problem_type != "multi_label_classification":
        raise ValueError(
            f"label_column: got {len(names)} labels in {len(lists)} rows ({names[0]!r:.40}, ...), "
            f"expected a few that recur; is it the right column?"
        )
    spare = (f"LABEL_{i}" for i in range(len(names), num_labels or 0))
    return _at_least_two(Labels(problem_type, (*names, *spare)), where)


def _at_least_two(labels: Labels, where: Where) -> Labels:
    if len(labels.names) < 2 and labels.problem_type == "single_label_classification":
        raise ValueError(
            f"all rows have the same label, {labels.names[0]!r} (first at {where(0)}), so there is nothing to learn"
        )
    return labels


def _only_ids(problem_type: str | None, names: Sequence[str]) -> bool:
    """Whether a number can only be the id of a class; -1 then means that a row has no label."""
    return problem_type != "regression" and "-1" not in names


def _normalise(value: Any, names: Sequence[str] = ()) -> Any:
    """Booleans and whole floats as integers, so that 1, 1.0 and True are the same label; texts without surrounding
    spaces.

    names: of the classes; a boolean means the class of that name ("True", "false"), whatever its id.
    """
    if isinstance(value, bool):
        return next((name for name in names if name.lower() == str(value).lower()), int(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return value.strip()
    return [_normalise(v) for v in value] if isinstance(value, (list, tuple)) else value


def _read(values: Sequence[Any], where: Where, problem_type: str, names: Sequence[str], by_id: bool) -> list[Any]:
    """The labels of the rows: a text, a number or a list of these, which may be written as a text.

    by_id: -1 means no label: the Hub marks such rows this way if labels are ids of named classes.
    Raises ValueError if a row has no label, an empty one in its list, or a label of another type.
    """
    single = problem_type == "single_label_classification"
    values = values if single else [_unspelled(value) for value in parse_lists(values, where)]
    values = [_normalise(value, names) for value in values]
    for row, value in enumerate(values):
        if any(isinstance(v, (dict, list, bytes)) for v in _members(value)):
            raise ValueError(f"{where(row)}: the label is {value!r:.60}, expected a text, a number, or a list of these")
        if single and isinstance(value, list):
            raise ValueError(f"{where(row)}: the label is a list ({value!r:.60}), but problem_type is {problem_type}")
    absent = _absent(values, names, by_id and _only_ids(problem_type, names))
    missing = [row for row, value in enumerate(values) if any(map(absent, _members(value)))]
    if missing:
        row, value = missing[0], values[missing[0]]
        others = f" ({len(missing)} of {len(values)} rows have none)" if len(missing) > 1 else ""
        place = f" at one position of its list {value!r:.60}" if isinstance(value, list) else ""
        raise ValueError(f"{where(row)}: the row has no label{place}{others}; label these rows or remove them")
    return values


def _absent(values: Sequence[Any], names: Sequence[str], by_id: bool) -> Callable[[Any], bool]:
    """Whether a label is missing. So is a text "nan" if all others are numbers: programs write it for a missing
    number."""

    def absent(v: Any) -> bool:
        return is_missing(v) or (by_id and v == -1)

    def is_nan(v: Any) -> bool:
        return isinstance(v, str) and v.lower() == "nan"

    members = {v for value in values for v in _members(value)}
    nans = {v for v in members if is_nan(v)} - set(names)
    others = [v for v in members - nans if not absent(v)]
    if not nans or not others or any(_as_float(v) is None for v in others):
        return absent
    return lambda v: absent(v) or is_nan(v)


def _members(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _unspelled(value: Any) -> Any:
    """The list that a text represents; any other value unchanged."""
    members = parse_list(value) if isinstance(value, str) else None
    return value if members is None else members


def _guess_type(values: Sequence[Any], where: Where) -> str:
    values = [_normalise(value) for value in parse_lists(values, where)]
    if any(isinstance(value, list) for value in values):
        members = [v for value in values for v in _members(value)]
        fraction = all(isinstance(v, (int, float)) for v in members) and any(isinstance(v, float) for v in members)
        return "regression" if fraction else "multi_label_classification"
    numbers = [_as_float(value) for value in values]
    if all(number is not None for number in numbers) and any(not float(number or 0).is_integer() for number in numbers):
        return "regression"
    return "single_label_classification"


def _check_single(values: Sequence[Any], where: Where) -> None:
    """Raise ValueError if a text looks like several labels, such as "a|b" if there are "a" and "b", or numbers, as
    "2,27"."""
    names = {str(value) for value in values}
    for name in sorted(names):
        parts = re.split(r"[|,]", name)
        if len(parts) > 1 and all(part.strip() in names or part.strip().isdecimal() for part in parts):
            row = next(row for row, value in enumerate(values) if str(value) == name)
            raise ValueError(
                f"{where(row)}: is the label {name!r} one or several? Give problem_type: multi_label_classification "
                "splits it, single_label_classification keeps it as one; fractions are written with a point, not a "
                "comma"
            )


def _check_recurring_numbers(values: Sequence[Any], where: Where, column: str) -> None:
    """Raise ValueError for whole numbers that hardly recur: they number the rows, or are values to predict."""
    numbers = {_as_id(value) for value in values}
    few = len(numbers) == len(values) if len(numbers) <= _MANY_LABELS else 2 * len(numbers) > len(values)
    if None not in numbers and len(numbers) > _A_FEW_LABELS and few:
        raise ValueError(
            f"label_column: {column} has {len(numbers)} different whole numbers in {len(values)} rows, such as "
            f"{values[0]!r} ({where(0)}), expected labels that recur; name the column of the labels, or give "
            "problem_type: regression predicts the numbers, single_label_classification makes each a class (as "
            "num_labels does for numbers from 0)"
        )


def _as_id(value: Any) -> int | None:
    """The integer that a label is or represents in the usual notation; None for "0111" and "1e3", which are names."""
    if isinstance(value, int):
        return value
    number = _as_float(value) if isinstance(value, str) else None
    if number is None or not number.is_integer() or value.removesuffix(".0") != str(int(number)):
        return None
    return int(number)


def _as_float(value: Any) -> float | None:
    if isinstance(value, str) and not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return None  # float() would also read "nan", "infinity" and "1_000"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _floats(values: Sequence[Any], where: Where, width: int) -> np.ndarray:
    out = np.empty((len(values), width), dtype=np.float32)
    largest = float(np.finfo(out.dtype).max)
    for row, value in enumerate(values):
        numbers = [_as_float(v) for v in _members(value)]
        if len(numbers) != width or any(number is None for number in numbers):
            expected = "a number" if width == 1 else f"a list of {width} numbers"
            raise ValueError(f"{where(row)}: label {value!r:.60} is not {expected}, as regression needs")
        if beyond := [number for number in numbers if number is not None and abs(number) > largest]:
            raise ValueError(f"{where(row)}: label {beyond[0]:g} is beyond {largest:.3g}; scale the labels")
        out[row] = numbers
    return out[:, 0] if width == 1 else out


def _as_list(value: Any) -> list[Any]:
    """The labels of a multi-label row: a list, or names separated by | or commas."""
    if isinstance(value, str):
        return [part.strip() for part in re.split(r"[|,]", value) if part.strip()]
    return value if isinstance(value, list) else [value]


def _refuse_repeated_numbers(members: Sequence[Any], row: int, where: Where) -> None:
    """Raise ValueError for a number that occurs twice: if one row of zeros and ones has another length, all rows are
    read as class ids."""
    numbers = [value for value in members if not isinstance(value, str)]
    twice = next((value for value in numbers if numbers.count(value) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{where(row)}: the label {list(members)!r:.60} has {twice!r} twice, expected each class once, or in all "
            "rows a list with a zero or a one per class"
        )


def _zeros_and_ones(lists: Sequence[list[Any]], width: int) -> bool:
    """Whether these are rows of `width` zeros and ones."""
    return width > 1 and all(
        len(row) == width and all(v in (0, 1) and not isinstance(v, str) for v in row) for row in lists
    )


def _is_multi_hot(lists: Sequence[list[Any]]) -> bool:
    """Whether rows are zeros and ones that cannot be ids: ids do not repeat in a row, and do not come in two orders."""
    return _zeros_and_ones(lists, len(lists[0])) and (
        any(len(set(row)) < len(row) for row in lists) or any(row != lists[0] for row in lists)
    )

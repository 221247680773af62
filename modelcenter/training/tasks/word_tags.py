"""Rows of words with a tag for each: finding their columns, reading words and tags, and numbering the tags."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from modelcenter.data.characters import is_mark
from modelcenter.data.readers.literals import parse_lists
from modelcenter.data.schemas.class_names import ids_to_names, reordered_ids_to_names
from modelcenter.data.schemas.entity_spans import has_entity_spans, spans_to_tags
from modelcenter.data.table import Table
from modelcenter.training.metrics.qa import is_han
from modelcenter.training.metrics.tagging import tag_separator
from modelcenter.training.tasks.column_roles import find_named

WORDS = ("words", "tokens", "token", "word", "sentence", "text")
TAGS = ("tags", "ner_tags", "ner", "ner_tag", "tag", "labels", "label", "pos_tags", "bio", "entities", "spans", "ents")
_FEW_WORDS = 10  # up to so many rows may have one word each


def find_word_columns(table: Table, words: str | None, tags: str | None, tagged: bool = True) -> tuple[str, str | None]:
    """The columns of the words and the tags; see column_roles.find_named. In the table, lists written as strings become
    lists, and entities given by character offsets become words and tags."""
    roles = {"words": (words, WORDS), "tags": (tags, TAGS)}
    found = find_named(table, roles if tagged or tags is not None else {"words": roles["words"]})
    tags_column = found.get("tags")
    if tags_column is None:
        return found["words"], None
    for column in (found["words"], tags_column):
        table.columns[column] = list(parse_lists(table.columns[column], table.where))
    if has_entity_spans(table.columns[tags_column], table.columns[found["words"]]):
        words_and_tags = spans_to_tags(table, found["words"], tags_column, split_text)
        table.columns[found["words"]], table.columns[tags_column] = words_and_tags
    return found["words"], tags_column


def words_of(table: Table, column: str, tagged: bool) -> list[list[str]]:
    """The words of each row: of a list, also if written as a string; other texts are split at spaces or, without tags
    that must match the words, into words, signs and Chinese characters.

    Raises:
        ValueError: a row is neither; or each of more than a few tagged rows has one word, so that rows are not
            sentences.
    """
    rows = []
    for i, value in enumerate(parse_lists(table.columns[column], table.where)):
        if isinstance(value, str):
            value = value.split() if tagged else split_text(value)
        wrong = not isinstance(value, (list, tuple)) or any(not isinstance(word, (str, int, float)) for word in value)
        if wrong or any(word == "" for word in value):
            raise ValueError(
                f"{table.where(i)}: got {value!r:.60} in column {column!r}, expected a list of non-empty words"
            )
        rows.append([str(word) for word in value])
    if tagged and sum(map(len, rows)) > _FEW_WORDS and max(map(len, rows)) == 1:
        raise ValueError(
            f"{table.name}: each of {len(rows)} rows has one word in column {column!r}, expected a sentence in each; a "
            "file with one row per word needs empty lines between sentences (.conll, .tsv, .csv) or a column "
            "sentence_id (.tsv, .csv)"
        )
    return rows


def split_text(text: str) -> list[str]:
    """The words of a plain text, including signs inside words; Chinese characters and other signs are words by
    themselves. Marks, such as the vowel signs of Hindi, belong to the character before them."""
    spaced = "".join(f" {character} " if is_han(character) else character for character in text)
    marks = "" if text.isascii() else "".join(sorted(filter(is_mark, set(text))))
    return _word_pattern(marks).findall(spaced)


@lru_cache(maxsize=64)
def _word_pattern(marks: str) -> re.Pattern[str]:
    """A pattern that matches words. marks: those in the text, because `re` has no class for them."""
    return re.compile(rf"[\w{marks}]+(?:[-'\u2019.][\w{marks}]+)*|[^\w\s{marks}]" + (f"[{marks}]*" if marks else ""))


def joined(words: list[str]) -> str:
    """Words joined to a text, with spaces except between Chinese characters."""
    text = ""
    for word in words:
        close = text and is_han(text[-1]) and is_han(word[0])
        text += word if close or not text else f" {word}"
    return text


def tags_of(table: Table, column: str | None, rows: list[list[str]], names: Sequence[str] = ()) -> list[list[Any]]:
    """The tags of each row, as names or numbers; always names if the data number the tags differently from `names`.

    Raises:
        ValueError: a row has more or fewer tags than words.
    """
    assert column is not None
    all_tags = []
    for i, (value, words) in enumerate(zip(parse_lists(table.columns[column], table.where), rows, strict=True)):
        tags = value.split() if isinstance(value, str) else value
        if not isinstance(tags, (list, tuple)) or len(tags) != len(words):
            count = f"{len(tags)} tags" if isinstance(tags, (list, tuple)) else f"{value!r:.40}"
            raise ValueError(f"{table.where(i)}: got {count} in column {column!r} for {len(words)} words")
        all_tags.append(list(tags))
    return list(reordered_ids_to_names(all_tags, table.classes.get(column), names))


def names_of_tags(table: Table, column: str | None, tags: list[list[Any]], given: list[str] | None) -> tuple[str, ...]:
    """The names of the tags by number: the given ones, those that come with the data, else those that occur, sorted.

    Raises:
        ValueError: the tags are numbers without names.
    """
    names = given or table.classes.get(column or "")
    return tuple(names or sorted({tag for row in named_tags(table, column, tags) for tag in row} - {None}))


def named_tags(table: Table, column: str | None, tags: list[list[Any]]) -> list[list[Any]]:
    """The tags by name; numbers index the names that come with the data.

    Raises:
        ValueError: the tags are numbers without names.
    """
    tags = ids_to_names(tags, table.classes.get(column or "", ()))
    odd = [tag for row in tags for tag in row if tag is not None and not isinstance(tag, str)]
    if odd:
        raise ValueError(
            f"tag_names: {table.name} has the tag {odd[0]!r} in column {column!r}, a number without a name; give the "
            "names of the tags in order, such as tag_names O B-PER I-PER"
        )
    return tags


def encode_tags(
    table: Table, rows: list[list[str]], tags: list[list[Any]], names: tuple[str, ...], known_from: str = "the tags"
) -> np.ndarray:
    """The tags of all rows as numbers, concatenated, int64.

    Raises:
        ValueError: a tag is not in names; the message gives file, line and word.
    """
    number: dict[Any, int] = {name: i for i, name in enumerate(names)}
    flat = np.empty(sum(map(len, tags)), np.int64)
    at = 0
    for i, row in enumerate(tags):
        for j, tag in enumerate(row):
            known = number.get(tag) if isinstance(tag, str) else tag if type(tag) is int else None
            if known is None or not 0 <= known < len(names):
                shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                source = "of the training data" if known_from == "the tags" else f"of {known_from}"
                raise ValueError(
                    f"{table.where(i)}, word {j + 1} ({rows[i][j]!r}): the tag {tag!r} is not one of the tags {source} "
                    f"({shown})"
                )
            flat[at] = known
            at += 1
    return flat


def inside_tags(names: tuple[str, ...]) -> np.ndarray:
    """For each tag, the tag of the following tokens of its word: I-PER after B-PER, if that tag exists."""
    number, separator = {name: i for i, name in enumerate(names)}, tag_separator(names)
    begin, inside = f"B{separator}", f"I{separator}"
    return np.array([number.get(inside + n[2:], i) if n[:2] == begin else i for i, n in enumerate(names)])

"""CoNLL's format of tagged words: one word per line with its tags, and an empty line between sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelcenter.data.readers.parsed import ParsedFile
from modelcenter.data.readers.text_encoding import decode_text

_TAG = re.compile(r"O|[BIESMLU]-\S+")
_COMMENT = re.compile(r"#\s?(id|sent_id|text|newdoc|newpar|global\.columns)\b")
_BOUNDARY = "-DOCSTART-"


def read_conll(path: Path, raw: bytes) -> ParsedFile:
    """One row per sentence: see `parse_conll`."""
    return ParsedFile(*parse_conll(path, decode_text(path, raw)))


def is_conll(text: str) -> bool:
    """Whether a text is clearly in this format: every line has a word and ends with a tag such as O or B-PER."""
    tagged = False
    for line in text.split("\n"):
        fields = _fields(line)
        if not fields or fields[0] == _BOUNDARY or _COMMENT.match(line):
            continue
        if len(fields) < 2 or not _TAG.fullmatch(fields[-1]):
            return False
        tagged = True
    return tagged


def parse_conll(path: Path, text: str) -> tuple[dict[str, list[Any]], Sequence[int]]:
    """{"words": [[word, ...], ...], "tags": likewise, from the last column}, and the line at which each sentence
    begins.

    Columns are separated by tabs or, without any, by spaces; those between the first and the last are ignored. Files
    with one column have no tags. Sentences end at empty lines and at -DOCSTART-. Tags of any scheme are kept as they
    are.

    Raises:
        ValueError: a line has another number of columns than the first (both are named), or the first column holds the
            numbers of the words instead of the words.
    """
    words: list[list[str]] = []
    tags: list[list[str]] = []
    starts: list[int] = []
    width, between_sentences = 0, True
    for number, line in enumerate(text.split("\n"), 1):
        fields = _fields(line)
        if not fields or fields[0] == _BOUNDARY:
            between_sentences = True
            continue
        if between_sentences and _COMMENT.match(line):
            continue
        if not width:
            width, first = len(fields), number
        if len(fields) != width or not fields[0]:
            raise ValueError(
                f"{path}, line {number}: got {len(fields)} columns ({line.strip()[:60]!r}), expected {width} as in "
                f"line {first}: a word and its tags, with an empty line between sentences"
            )
        if between_sentences:
            words.append([])
            tags.append([])
            starts.append(number)
            between_sentences = False
        words[-1].append(fields[0])
        tags[-1].append(fields[-1])
    if width > 2 and _are_numbers_of_words(words):
        raise ValueError(
            f"{path}, line {starts[0]}: the first column numbers the words of each sentence, as in CoNLL-U, but should "
            "hold the words; keep only the columns of words and tags, for example with `cut -f 2,4`"
        )
    return ({"words": words, "tags": tags} if width > 1 else {"words": words}), starts


def _are_numbers_of_words(sentences: list[list[str]]) -> bool:
    """Whether the "words" of each sentence are 1, 2, 3 and so on, perhaps with 2-3 or 2.1 between them, as in
    CoNLL-U."""
    longest = 0
    for words in sentences:
        counted = [word for word in words if re.fullmatch(r"\d+[-.]\d+", word) is None]
        if counted != [str(i) for i in range(1, len(counted) + 1)]:
            return False
        longest = max(longest, len(counted))
    return longest > 1  # a file may consist of the word "1"


def _fields(line: str) -> list[str]:
    if not line or line.isspace():
        return []
    if "\t" in line:
        return [field.strip(" ") for field in line.rstrip("\r").split("\t")]
    return re.split(" +", line.strip(" \r"))  # other spaces do not separate: U+3000 is a character in Chinese corpora

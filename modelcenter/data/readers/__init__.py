"""Files of rows: json, jsonl (ndjson), csv, tsv, parquet, txt and conll, read into columns with the place every row
came from.

Plain readers of the standard library: importing `datasets` costs seconds, and its readers lose the line numbers that an
error needs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modelcenter.data.readers.compression import COMPRESSED, read_bytes, suffix_of
from modelcenter.data.readers.conll import is_conll, read_conll
from modelcenter.data.readers.literals import from_json, pandas_columns
from modelcenter.data.readers.parquet import read_columns
from modelcenter.data.readers.squad import flatten, is_nested
from modelcenter.data.schemas.class_names import ids_to_names, match_order

# Names that say "this is a header" and, in columns.py, what a column is for. Lower case.
LABEL_NAMES = (
    "label",
    "labels",
    "gold_label",
    "class",
    "category",
    "sentiment",
    "target",
    "intent",
    "score",
    "rating",
    "stars",
    "y",
)
TEXT_NAMES = (
    "text",
    "sentence",
    "content",
    "review",
    "document",
    "comment",
    "utterance",
    "question",
    "body",
    "passage",
    "sms",
    "tweet",
)
TEXT_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("sentence_a", "sentence_b"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "document"),
)
ID_NAMES = ("id", "idx", "index", "guid", "uid")
LONGEST_FIELD = 2**31 - 1  # of csv, whose 128 kB refuse long documents; a C long has no more bits on Windows
_WORD_LISTS = frozenset(("words", "tokens"))  # columns that hold a list in each row
_TURNS = ({"role", "content"}, {"from", "value"})  # what a message of a conversation has
_TEXT_WORDS = frozenset((*TEXT_NAMES, *itertools.chain.from_iterable(TEXT_PAIRS)))
_LABELLED = re.compile(r"(?:^|(?<=\s))__label__(\S+)")
_SENTENCE = re.compile(r"sent(ence)?[ _]?(#|id|idx|no|num|number)", re.IGNORECASE)
_WORD_NAMES, _TAG_NAMES = ("word", "words", "token", "tokens"), ("tag", "tags", "ner", "ner_tag", "label", "labels")
_OTHER_WORDS = ("prompt", "instruction", "input", "source", "messages", "conversations", "conversation")
_HEADER_WORDS = _TEXT_WORDS.union(LABEL_NAMES, ID_NAMES, _OTHER_WORDS)


@dataclass(frozen=True)
class Origin:
    """One file (or Hub split) behind a table: `rows` rows, row i at line `lines[i]` where the format has lines."""

    path: str
    rows: int
    sha256: str
    lines: Sequence[int] | None = None


class Share(NamedTuple):
    """A part of a mixture: so many rows of the origins."""

    name: str
    rows: int
    weight: float


@dataclass
class Table:
    """Rows as named columns of equal length, and where each row came from.

    columns: name -> list of `len(self)` values (str, int, float, bool, list or None).
    classes: class names of the integer columns for which the source tells them (Hub ClassLabel features).
    shares: of the parts of a mixture (see mixture.mixed), in the order of the origins.
    like: the name of a table whose columns this one has to have; None: of none.
    """

    columns: dict[str, list[Any]]
    origins: list[Origin]
    classes: dict[str, list[str]] = field(default_factory=dict)
    index: np.ndarray | None = None  # row of this table -> row of the origins laid end to end; None: the same
    shares: Sequence[Share] = ()
    like: str | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each origin, and the end of the last."""
        return list(itertools.accumulate((origin.rows for origin in self.origins), initial=0))

    @property
    def origin_rows(self) -> int:
        """Rows of all its origins, of which its own are made."""
        return sum(origin.rows for origin in self.origins)

    @property
    def name(self) -> str:
        """How messages call the table: its file, or the first of them."""
        files = sum(origin.rows > 0 for origin in self.origins)
        more = f" and {files - 1} more" if files > 1 else ""
        return f"{self.origins[0].path}{more}" if self.origins else "the data"

    def where(self, row: int) -> str:
        """The file and line of a row: "train.tsv, line 12"."""
        row = int(row if self.index is None else self.index[row])
        starts = self._starts
        place = bisect_right(starts, row) - 1
        origin, row = self.origins[place], row - starts[place]
        return f"{origin.path}, row {row + 1}" if origin.lines is None else f"{origin.path}, line {origin.lines[row]}"

    def take(self, rows: np.ndarray) -> Table:
        """The table of the given rows, in that order."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        rows = rows if self.index is None else self.index[rows]
        return Table(columns, self.origins, self.classes, rows, self.shares)

    def part_of_rows(self) -> np.ndarray:
        """The part of a mixture that each row belongs to, int64 (n,)."""
        ends = np.cumsum([part.rows for part in self.shares])
        return np.searchsorted(ends, np.arange(len(self)) if self.index is None else self.index, side="right")

    def fingerprint(self) -> dict[str, Any]:
        """What a run's summary keeps about its data: rows, the SHA-256 of each file, and the weights of a mixture."""
        about = {"rows": len(self), "sha256": {origin.path: origin.sha256 for origin in self.origins}}
        return about | ({"weights": [part.weight for part in self.shares]} if self.shares else {})


def concatenate(tables: list[Table]) -> Table:
    """One table of all rows; a column that some table lacks holds None there.

    Classes that the tables number differently are spelled out.
    """
    if len(tables) == 1:
        return tables[0]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    parts = {n: [t.columns[n] if n in t.columns else [None] * len(t) for t in tables] for n in names}
    classes: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table.classes):
        parts[name], known = _of_one_numbering(parts[name], [table.classes.get(name) for table in tables])
        if known is not None:
            classes[name] = known
    columns = {name: [value for part in found for value in part] for name, found in parts.items()}
    starts = itertools.accumulate((table.origin_rows for table in tables), initial=0)
    index = None
    if any(table.index is not None for table in tables):
        own = [np.arange(len(table)) if table.index is None else table.index for table in tables]
        index = np.concatenate([rows + start for rows, start in zip(own, starts, strict=False)])
    return Table(columns, [origin for table in tables for origin in table.origins], classes, index)


def _of_one_numbering(
    parts: list[list[Any]], classes: list[list[str] | None]
) -> tuple[list[list[Any]], list[str] | None]:
    """(the column in each of the tables, the names of its numbers if these have one meaning in all of them).

    Where they have not, or some table holds names, numbers become names; which are numbered as the first table does it
    where all have the same.
    """
    first, *others = (known for known in classes if known is not None)
    unnamed = [part for part, known in zip(parts, classes, strict=True) if known is None]
    alike = not any(_is_name(value, first or []) for part in unnamed for value in part)
    if alike and all(known == first for known in others):
        return parts, first
    found = []
    for part, known in zip(parts, classes, strict=True):
        if known is not None:
            names = match_order(first, known) or known
            part = [
                None if value == -1 else value for value in ids_to_names(part, names)
            ]  # -1 is how the Hub says none
        found.append(part)
    same = alike and all(match_order(first, known) is not None for known in others)
    return found, first if same else None


def _is_name(value: Any, names: list[str]) -> bool:
    """Whether a label is a class by its name: csv has numbers as texts, too."""
    return isinstance(value, str) and (value.strip() in names or re.fullmatch(r"\s*(\d+(\.0)?)?\s*", value) is None)


def read_file(path: Path) -> Table:
    """Read one file by its suffix.

    Raises ValueError: suffix not known, text not UTF-8, a malformed line (with file and line), a file without rows.
    """
    suffix = suffix_of(path)
    if suffix not in READERS:
        more = f" (and {', '.join(COMPRESSED)} after these)"
        raise ValueError(f"{path}: data files end in {', '.join(READERS)}{more}, not in {path.suffix or 'nothing'!r}")
    raw = read_bytes(path)
    columns, lines, classes = READERS[suffix](path, raw)
    rows = len(next(iter(columns.values()))) if columns else 0
    if not rows:
        raise ValueError(f"{path}: the file holds no rows")
    return Table(columns, [Origin(str(path), rows, hashlib.sha256(raw).hexdigest(), lines)], classes)


_Parsed = tuple[dict[str, list[Any]], Sequence[int] | None, dict[str, list[str]]]


def _decode(path: Path, raw: bytes) -> str:
    """The text of a file. Where lines end as on old Macs (Excel still offers it), they end in line feeds."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16")
    try:
        text = raw.decode("utf-8-sig")
        return text.replace("\r", "\n") if "\r" in text and "\n" not in text else text
    except UnicodeDecodeError as error:
        bad, lines = _undecodable(raw.split(b"\n")), raw.count(b"\n") + (raw[-1:] != b"\n")
        line, byte = raw.count(b"\n", 0, error.start) + 1, raw[error.start]
        utf8 = any(not piece.isascii() for i, piece in enumerate(raw.split(b"\n")) if i not in bad)
        fix = (
            "other lines are UTF-8, so the file mixes encodings: convert these lines to UTF-8"
            if utf8
            else f"convert the file, e.g. `iconv -f {_guess(raw)} -t UTF-8`"
        )
        raise ValueError(
            f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}; {len(bad)} of {lines} lines); {fix}"
        ) from None


def _undecodable(lines: list[bytes]) -> set[int]:
    bad = set()
    for i, line in enumerate(lines):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            bad.add(i)
    return bad


def _guess(raw: bytes) -> str:
    try:
        raw.decode("gb18030")
    except UnicodeDecodeError:
        return "LATIN1"
    # Chinese two-byte text has nearly all its high bytes in pairs; accented Latin letters stand alone.
    pairs = len(re.findall(rb"[\x81-\xfe]{2}", raw))
    return "GB18030" if 4 * pairs > len(re.findall(rb"[\x80-\xff]", raw)) else "LATIN1"


# ---------------------------------------------------------------------------------------------------------------- json
def _read_json(path: Path, raw: bytes) -> _Parsed:
    """JSON lines, an array of objects or of lists of one length, {column: [values]}, an object with one list of objects
    ({"data": [...]}), or one as pandas writes tables.

    Of objects as SQuAD nests them (data.squad) each question becomes a row.
    """
    text = _decode(path, raw)
    if text.lstrip()[:1] == "[":
        try:
            rows = from_json(text)
        except json.JSONDecodeError as error:
            several = "; expected one array, or one JSON object a line" if error.msg == "Extra data" else ""
            raise ValueError(
                f"{path}, line {error.lineno}: not valid JSON ({error.msg}, column {error.colno}){several}"
            ) from None
        if rows and all(isinstance(row, list) and len(row) == len(rows[0]) > 0 for row in rows):
            return {str(i): list(values) for i, values in enumerate(zip(*rows, strict=True))}, None, {}
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: expected one JSON object a line, or an array of objects")
        return _columns(flatten(path, rows) if is_nested(rows) else rows), None, {}
    lines: Sequence[int] | None = None
    try:
        columns, lines, _ = _json_lines(path, text)
    except ValueError as error:
        try:
            whole = from_json(text)  # one object over many lines
        except ValueError:
            raise error from None
    else:
        if lines is None or len(lines) != 1 or not _WORD_LISTS.isdisjoint(columns):
            return columns, lines, {}
        whole = {name: values[0] for name, values in columns.items()}
    table = pandas_columns(whole)
    if table is not None:
        return table, None, {}
    lists = [value for value in whole.values() if isinstance(value, list)]
    tables = [value for value in lists if value and all(isinstance(row, dict) for row in value)]
    texts = [name for name, value in whole.items() if isinstance(value, str) and name.lower() in _TEXT_WORDS]
    if texts or any(turn <= row.keys() for table in tables for row in table for turn in _TURNS):
        pass  # a row with its answers or entities, or a conversation
    elif len(tables) == 1:
        return _columns(flatten(path, tables[0]) if is_nested(tables[0]) else tables[0]), None, {}
    elif lists and len(lists) == len(whole) and len({len(value) for value in lists}) == 1:
        return whole, None, {}
    return {name: [value] for name, value in whole.items()}, lines, {}


def _json_lines(path: Path, text: str) -> _Parsed:
    rows, numbers = [], []
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.isspace():
            continue
        try:
            row = from_json(line)
        except json.JSONDecodeError as error:
            shown = line.strip() if len(line) < 80 else line.strip()[:77] + "..."
            raise ValueError(
                f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno}): {shown}"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number}: got {line.strip()[:60]}, "
                'expected a JSON object such as {"text": ..., "label": ...}'
            )
        rows.append(row)
        numbers.append(number)
    return _columns(rows), numbers, {}


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return {name: [row.get(name) for row in rows] for name in names}


# ------------------------------------------------------------------------------------------------------------ csv, tsv
def _read_csv(path: Path, raw: bytes) -> _Parsed:
    text = _decode(path, raw)
    first = text.split("\n", 1)[0]
    delimiter = max((",", ";", "\t"), key=lambda d: (first.count(d) > 0, d == ",", first.count(d)))
    return _with_header(path, *_quoted_rows(path, text, delimiter, spaced(text, delimiter)))


def _read_tsv(path: Path, raw: bytes) -> _Parsed:
    """Tab-separated rows, one a line. A quote is a character like any other unless the file plainly quotes as CSV does.

    Corpora such as SST-2 hold stray quotes; a CSV reader takes them for the start of a field and merges rows.
    """
    text = _decode(path, raw)
    rows, numbers = [], []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if line and not line.isspace():
            rows.append(line.split("\t"))
            numbers.append(number)
    quoted = [value for row in rows for value in row if value[:1] == '"']
    whole = [v[1:-1] for v in quoted if len(v) > 1 and v[-1] == '"' and '"' not in v[1:-1].replace('""', "")]
    ragged = len({len(row) for row in rows}) > 1
    plainly = len(whole) == len(quoted) and (any('""' in v for v in whole) or len(quoted) == sum(map(len, rows)))
    if quoted and (ragged or plainly):
        try:
            as_csv = _quoted_rows(path, text, "\t")
        except ValueError:
            as_csv = None
        if as_csv is not None and len({len(row) for row in as_csv[0]}) == 1:
            rows, numbers = as_csv
    return _with_header(path, rows, numbers)


def spaced(text: str, delimiter: str) -> bool:
    """Whether csv has spaces before its quotes: a, "b". Else a space belongs to the text behind it."""
    return re.search(rf"{delimiter} +\"(?=[^\s\"{delimiter}])", text) is not None


def _quoted_rows(path: Path, text: str, delimiter: str, spaces: bool = False) -> tuple[list[list[str]], list[int]]:
    rows, numbers, start = [], [], 1
    limit = csv.field_size_limit(LONGEST_FIELD)
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=spaces, strict=True)
    try:
        for row in reader:
            if any(row):
                rows.append(row)
                numbers.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f'{path}, line {start}: a quoted field is not closed properly ({error}); inside quotes write " as ""'
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows, numbers


def _with_header(path: Path, rows: list[list[str]], numbers: list[int]) -> _Parsed:
    if not rows:
        return {}, numbers, {}
    width = len(rows[0])
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != width:
            raise ValueError(
                f"{path}, line {number}: {len(row)} fields where the first line has {width}"
                f" (a separator inside a text needs quotes in csv, and may not occur in tsv)"
            )
    if is_header(rows):
        header, first, rows, numbers = names_in(path, rows[0]), rows[0], rows[1:], numbers[1:]
        again = next((number for row, number in zip(rows, numbers, strict=True) if row == first), None)
        if again is not None and width > 1:  # of one column, a text may be its name
            raise header_again(path, f"line {again}")
    else:
        header = [str(i) for i in range(width)]
    columns = {name: list(values) for name, values in zip(header, zip(*rows, strict=True), strict=False)}
    return (*_sentences(columns, numbers), {})


def _sentences(columns: dict[str, list[Any]], numbers: list[int]) -> tuple[dict[str, list[Any]], list[int]]:
    """The same, with lists in the place of tagged words that have a row each beside the name of their sentence, which
    may stand in its first row alone; the numbers are those of the first rows."""
    known = {name.lower() for name in columns}
    found = next((name for name in columns if _SENTENCE.fullmatch(name)), None)
    words = next((columns[name] for name in columns if name.lower() in _WORD_NAMES), None)
    if found is None or words is None or known.isdisjoint(_TAG_NAMES) or any(len(w.split()) > 1 for w in words):
        return columns, numbers
    named = [value.strip() for value in columns[found]]
    filled = list(itertools.accumulate(named, lambda before, name: name or before))
    starts = [i for i in range(len(filled)) if i == 0 or filled[i] != filled[i - 1]]
    if len(starts) == len(filled):  # a row for each sentence
        return columns, numbers
    ends = [*starts[1:], len(filled)]
    lists = {name: [values[a:b] for a, b in zip(starts, ends, strict=True)] for name, values in columns.items()}
    return {**lists, found: [filled[i] for i in starts]}, [numbers[i] for i in starts]


def names_in(path: Path, header: list[str]) -> list[str]:
    """The columns that a header names; one without a name has its number. Raises ValueError: one twice."""
    names = [name.strip() or str(i) for i, name in enumerate(header)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}, line 1: the header names {', '.join(map(repr, sorted(twice)))} twice")
    return names


def header_again(path: Path, place: str) -> ValueError:
    """What to raise for a row that is the header once more."""
    return ValueError(f"{path}, {place}: the header again, as where files are joined; remove it from all but the first")


def is_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: short unlike names, none of which is a value further down."""
    later = rows[1:1001]
    names = {i: name.strip() for i, name in enumerate(rows[0]) if name.strip()}
    if any(_is_number(name) for name in names.values()):
        return False
    if not names or any(i not in names and not _needs_no_name(later, i) for i in range(len(rows[0]))):
        return False
    known = [name.lower() in _HEADER_WORDS for name in names.values()]
    if all(known) and len(names) > 1:
        return True
    if len(set(names.values())) < len(names):
        return False
    if any(known) and len(names) > 1:
        later = [row for row in later if row != rows[0]]  # the header once more, which is an error of its own
    if any(row[i].strip() == name for row in later for i, name in names.items()):
        return False
    if any(known):
        return True
    # One column: only a known name is a header, else the first text of a list would be lost.
    return len(rows[0]) > 1 and all(
        len(name) <= 40 and re.fullmatch(r"\w[\w.#()/-]*( [\w.#()/-]+){0,2}", name) for name in names.values()
    )


def _needs_no_name(rows: list[list[str]], column: int) -> bool:
    """Whether a header may leave a column without a name: the first, where it numbers the rows as an index that pandas
    writes; one that is empty throughout, as behind a separator at the end of each line."""
    values = [row[column].strip() for row in rows]
    numbers = column == 0 and all(map(str.isdecimal, values)) and 2 < len(set(values)) == len(values)
    return numbers or not any(values)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- parquet, text
def _read_parquet(path: Path, raw: bytes) -> _Parsed:
    columns, classes = read_columns(path, raw)
    return columns, None, classes


def _read_txt(path: Path, raw: bytes) -> _Parsed:
    """A text a line, with its labels if every line begins with one as fastText writes it (__label__good); tagged words
    (data.conll) if every line is one."""
    text = _decode(path, raw)
    if is_conll(text):
        return (*read_conll(path, text), {})
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1)]
    kept = [(i, line) for i, line in lines if line and not line.isspace()]
    texts, numbers = [line for _, line in kept], [i for i, _ in kept]
    if not all(map(_LABELLED.match, texts)):
        return {"text": texts}, numbers, {}
    labels: list[Any] = [_LABELLED.findall(line) for line in texts]
    if all(len(of_row) == 1 for of_row in labels):
        labels = [of_row[0] for of_row in labels]
    return {"text": [_LABELLED.sub("", line).strip() for line in texts], "label": labels}, numbers, {}


def _read_conll(path: Path, raw: bytes) -> _Parsed:
    """Tagged words, a word a line: see data.conll."""
    return (*read_conll(path, _decode(path, raw)), {})


READERS: dict[str, Callable[[Path, bytes], _Parsed]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
    ".conll": _read_conll,
    ".bio": _read_conll,
}


def read_files(paths: Iterable[Path]) -> Table:
    """All rows of several files as one table (see `read_file`)."""
    return concatenate([read_file(path) for path in paths])

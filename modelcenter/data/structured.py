"""Rows of CPM-Bee: objects of keys and texts as tokens, following convert_data_to_id of OpenBMB/CPM-Bee.

    {"input": "今天天气真<mask_0>", "<ans>": {"<mask_0>": "好"}}

The row is a tree: a root, below it the keys, below a key its text or the keys of its object. Each key and each text is
a segment, numbered in reading order (the root, `<root>`, is 0). A segment is `<s>`, its tokens and `</s>`. Everything
is context except the texts below the key `<ans>`: these are the answers. They have no `</s>` (the model predicts it in
place of the token that follows, if any), and each of their tokens attends only to earlier tokens.

- The relation of segment a to b is 0 if they are the same, else 1 + 8 * up + down: `up` steps from a to their lowest
  common ancestor and `down` steps from there to b, each at most 7. Segments of different samples have the relation 1.
- A token whose meaning is local to the row (`<mask_0>`, `<option_3>`, unknown characters) is the token of its kind
  (`<mask>`, `<option>`, `<unk>`) and a number: 0 for the first of a kind, 1 for the next, and so on.
- Such a token with a number above 0 is, as a label or output, vocab_size + its place in the batch's extension table.
- Further rows may follow one as samples 1, 2, ...: they are context, to which the row attends, but not they to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

IGNORED = -100
ANSWER = "<ans>"
_DEEPEST = 7
FIELDS = ("input_ids", "input_id_sub", "context", "segment", "num_segments", "segment_rel_offset", "sample_ids")

Token = tuple[int, int]  # id in the vocabulary, and number


@dataclass(frozen=True)
class Answer:
    """A text for the model to generate. path: the keys from `<ans>` to it. segment: its number."""

    path: tuple[str, ...]
    segment: int


@dataclass(frozen=True)
class StructuredRow:
    """One row and its samples as tokens.

    Attributes:
        values: int32 (T, 7), with the columns FIELDS; offsets count from the beginning of `relations`.
        relations: int32 (size,). texts: the texts of tokens whose meaning is local to the row. answers: in the order of
            their segments, without those of samples.
        end: the token `</s>`. answered: whether the answers are part of the tokens.
    """

    values: np.ndarray
    relations: np.ndarray
    texts: Mapping[Token, str]
    answers: tuple[Answer, ...]
    end: int
    answered: bool

    def __len__(self) -> int:
        return len(self.values)

    def targets(self) -> np.ndarray:
        """int32 (T, 2): the token and number to predict at each token, or -100."""
        out = np.full((len(self), 2), IGNORED, np.int32)
        if self.answered:
            after = 1 + np.flatnonzero(self.values[:-1, 2] == 0)  # an answer (begins with <s>), or the segment after it
            out[after] = self.values[after, :2]
            begins = self.values[after, 3] != self.values[after - 1, 3]
            out[after[begins]] = self.end, 0
        return out

    def numbered(self) -> set[Token]:
        """The tokens with a number above 0, which are not in the vocabulary."""
        return {(int(a), int(b)) for a, b in self.values[:, :2] if b > 0}


class StructuredEncoder:
    """Encodes objects as rows, and decodes generated answers."""

    def __init__(self, tokenizer: Any):
        """tokenizer: CPM-Bee's. Raises ValueError for any other."""
        if not hasattr(tokenizer, "parts"):
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} cannot encode CPM-Bee's structured input; use CPM-Bee's"
            )
        self.tokenizer, self.vocabulary = tokenizer, tokenizer.get_vocab()
        lacking = [token for token in ("<root>", ANSWER, "<s>", "</s>") if token not in self.vocabulary]
        if lacking:
            raise ValueError(f"tokenizer: its vocabulary lacks {', '.join(lacking)} of structured input")
        self.start, self.end = self.vocabulary["<s>"], self.vocabulary["</s>"]

    def encode(
        self, data: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = (), *, answered: bool = True
    ) -> StructuredRow:
        """The tokens of an object, whose values are texts or nested objects.

        Args:
            samples: further objects as examples, with their answers.
            answered: False leaves the answers out, for a model to generate them.

        Raises:
            ValueError: an object has no "<ans>", a value is neither text nor object, or a "<" does not begin a token.
        """
        if not isinstance(data, Mapping) or ANSWER not in data:
            raise ValueError(f"got {data!r:.80}, expected an object with the key {ANSWER!r}")
        numbers: dict[str, dict[str, int]] = {}  # kind -> text -> number
        answers: tuple[Answer, ...] = ()
        parts: list[tuple[int, ...]] = []
        relations: list[np.ndarray] = []
        size = 0
        for number, row in enumerate((data, *samples)):
            segments = [_Segment("<root>", 0, None)]
            _add_segments(segments, row, 1, ())
            if not number:
                answers = tuple(Answer(s.path, i) for i, s in enumerate(segments) if s.path is not None)
            for i, segment in enumerate(segments):
                if segment.path is not None and not number and not answered:
                    continue
                ids = self._tokens(segment.text, numbers)
                is_context = segment.path is None or number > 0
                if segment.path is None:
                    ids.append((self.end, 0))
                marks = (int(is_context), i, len(segments), size, number)
                parts += [(*token, *marks) for token in ((self.start, 0), *ids)]
            if not number and answered and segments[-1].path is not None and not samples:
                parts.append((self.end, 0, *parts[-1][2:]))  # so that there is a place to predict the end
            relations.append(_relations(tuple(s.depth for s in segments)))
            size += len(relations[-1])
        if not answers:
            raise ValueError(f"{ANSWER!r}: got {data[ANSWER]!r}, expected a text, or an object of texts")
        texts = {(self.vocabulary[kind], n): text for kind, of in numbers.items() for text, n in of.items()}
        return StructuredRow(np.array(parts, np.int32), np.concatenate(relations), texts, answers, self.end, answered)

    def _tokens(self, text: str, numbers: dict[str, dict[str, int]]) -> list[Token]:
        out = []
        for token, meant in self.tokenizer.parts(text):
            number = 0
            if meant:
                known = numbers.setdefault(token, {})
                number = known.setdefault(meant, len(known))
            out.append((self.vocabulary[token], number))
        return out

    def decode(self, tokens: Iterable[Token], texts: Mapping[Token, str]) -> str:
        """The text of an answer's tokens up to its `</s>`. texts: those of its row."""
        out = []
        for token in tokens:
            if token[0] == self.end:
                break
            out.append(texts[token] if token in texts else self.tokenizer.written(token[0]))
        return "".join(out)


@dataclass(frozen=True)
class _Segment:
    text: str
    depth: int
    path: tuple[str, ...] | None  # below <ans>; None: the segment is not an answer


def _add_segments(segments: list[_Segment], value: Any, depth: int, path: tuple[str, ...]) -> None:
    """Append the segments below the last one; path: the keys from the root to it."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            segments.append(_Segment(str(key), depth, None))
            _add_segments(segments, below, depth + 1, (*path, str(key)))
    elif isinstance(value, str):
        segments.append(_Segment(value, depth, path[1:] if path[:1] == (ANSWER,) else None))
    else:
        raise ValueError(f"{'.'.join(path)!r}: got {value!r:.60}, expected a text, or an object of texts")


@lru_cache(maxsize=4096)
def _relations(depths: tuple[int, ...]) -> np.ndarray:
    """int32 (n * n,): the relations of segments. Their depths, in reading order, determine the tree."""
    paths: list[tuple[int, ...]] = []  # from the root to each segment, inclusive
    for i, depth in enumerate(depths):
        paths.append((*(paths[i - 1][:depth] if i else ()), i))
    out = np.zeros((len(depths), len(depths)), np.int32)
    for a, to_a in enumerate(paths):
        for b, to_b in enumerate(paths):
            common = sum(x == y for x, y in zip(to_a, to_b, strict=False))
            up, down = min(len(to_a) - common, _DEEPEST), min(len(to_b) - common, _DEEPEST)
            out[a, b] = 0 if a == b else 1 + (_DEEPEST + 1) * up + down
    out.flags.writeable = False
    return out.ravel()


def extension_table(rows: Iterable[StructuredRow]) -> tuple[Token, ...]:
    """The tokens that extend the vocabulary for these rows; sorted, so that the order of the rows does not matter."""
    return tuple(sorted(set().union(*(row.numbered() for row in rows))))


def target_ids(row: StructuredRow, table: Sequence[Token], vocab_size: int) -> np.ndarray:
    """int32 (T,): the token to predict at each token; vocab_size + its index in the table if it is in there."""
    place = {token: vocab_size + i for i, token in enumerate(table)}
    return np.array([place.get((int(a), int(b)), int(a)) for a, b in row.targets()], np.int32)


def structured_batch(
    rows: Sequence[StructuredRow], vocab_size: int, table: Sequence[Token] | None = None
) -> dict[str, Any]:
    """Rows laid end to end, as keyword arguments of mc.CPMBee's forward.

    Args:
        vocab_size: the model's. table: see `extension_table`; None: that of these rows. With one table for all
            batches, the loss of a row does not depend on the other rows of its batch.
    """
    table = extension_table(rows) if table is None else table
    lengths = [len(row) for row in rows]
    sizes = np.cumsum([0, *(len(row.relations) for row in rows)])
    values = np.concatenate([np.zeros((0, len(FIELDS)), np.int32), *(row.values for row in rows)]).astype(np.int64)
    values[:, FIELDS.index("segment_rel_offset")] += np.repeat(sizes[:-1], lengths)
    relations = np.concatenate([row.relations for row in rows] or [np.zeros(1)]).astype(np.int64)
    batch: dict[str, Any] = {name: torch.from_numpy(values[:, i].copy())[None] for i, name in enumerate(FIELDS)}
    batch["segment_rel"] = torch.from_numpy(relations)[None]
    batch["cu_seqlens"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    batch["max_seqlen"] = max(lengths, default=0)
    if table:
        batch["ext_table_ids"], batch["ext_table_sub"] = torch.tensor(table).unbind(1)
    if all(row.answered for row in rows):
        labels = [target_ids(row, table, vocab_size) for row in rows]
        batch["labels"] = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *labels]).astype(np.int64))[None]
    return batch

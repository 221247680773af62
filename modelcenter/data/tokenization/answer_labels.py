"""From conversations to tokens and labels, with labels for answers only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from modelcenter.data.cache import cached, special_tokens, tokenizer_state
from modelcenter.data.schemas.conversations import Conversation
from modelcenter.data.tokenization.chat_templates import ChatTemplate, Rendered
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.data.tokenization.tokenize import Tokens

IGNORED = -100  # the label of a token that is not trained on
_VERSION = 3  # part of the cache's key: raise it when the way of rendering, tokenising or marking changes
_CHUNK = 1024  # rows that are rendered and tokenised together
_CHECKED = 32  # rows whose {% generation %} marks are checked


@dataclass(frozen=True)
class LabelledTokens:
    """Rows with a label for each token.

    tokens: of the kept rows; its `truncated` counts the truncated ones. labels: int32 (T,), the token if it is trained
    on, else -100. rows: int64 (n,), the numbers of the kept rows among the given ones. unanswered, unfitting: int64,
    rows left out because they have no answer, or no part of it within max_length (with too_long "drop": because they
    are longer). stops: tokens that end the answers. cut: bool (n,), which of the kept rows were truncated; None: none.
    """

    tokens: Tokens
    labels: np.ndarray
    rows: np.ndarray
    unanswered: np.ndarray
    unfitting: np.ndarray
    stops: list[int]
    cut: np.ndarray | None = None


def label_conversations(
    template: ChatTemplate,
    rows: Sequence[Conversation] | Sequence[str],
    where: Callable[[int], str],
    *,
    max_length: int,
    too_long: str = "cut",
    train_on: str = "all",
) -> LabelledTokens:
    """Tokens and labels of conversations, or of plain texts, which are trained on as a whole; cached.

    Args:
        where: the location of a row, for messages. max_length: maximum tokens of a row. too_long: what to do with
            longer rows: "cut" them from the right, "drop" them, or raise an "error". train_on: "all" answers, or the
            "last" of each row.

    Raises:
        ValueError: the template cannot render a row, or answers cannot be found in it; a row is too long (with
            "error"); no row has an answer.
    """
    plain = bool(rows) and isinstance(rows[0], str)
    how = [plain, template.text, template.text_with_tools, template.prefix, max_length, too_long, train_on]
    about = json.dumps([*how, special_tokens(template.tokenizer), sorted(template.special_words)])
    # The order of fields matters: templates write calls and tools in that order.
    texts = [row if isinstance(row, str) else json.dumps(row, default=str) for row in rows]
    key = ["conversations", _VERSION, about, tokenizer_state(template.tokenizer), texts]
    arrays = cached(key, lambda: _label(template, rows, where, max_length, too_long, train_on, plain))
    labelled = LabelledTokens(
        Tokens(arrays["ids"], arrays["offsets"], None, int(arrays["cut"].sum())),
        arrays["labels"],
        arrays["rows"],
        arrays["unanswered"],
        arrays["unfitting"],
        arrays["stops"].tolist(),
        arrays["cut"],
    )
    if not len(labelled.rows):
        left_out = labelled.unanswered if len(labelled.unanswered) else labelled.unfitting
        fits = "some of its answer in" if too_long == "cut" else "at most"
        reason = "has an answer to train on" if len(labelled.unanswered) else f"has {fits} {max_length} tokens"
        raise ValueError(f"{where(int(left_out[0]))}: neither this row nor any other {reason}")
    return labelled


@dataclass(frozen=True)
class _Row:
    """A kept row. number: among the given rows. stops: the tokens that end its answers."""

    number: int
    ids: np.ndarray
    labels: np.ndarray
    stops: tuple[int, ...]
    cut: bool = False

    @classmethod
    def of(cls, number: int, prefix: Sequence[int], tokens: list[int], answers: list[tuple[int, int]]) -> _Row:
        """prefix: tokens before all others; answers: their ranges in `tokens`."""
        ids = np.array([*prefix, *tokens], np.int32)
        labels = np.full(len(ids), IGNORED, np.int32)
        for start, end in ((start + len(prefix), end + len(prefix)) for start, end in answers):
            labels[start:end] = ids[start:end]
        return cls(number, ids, labels, tuple(tokens[end - 1] for _, end in answers if end))

    @property
    def has_answer(self) -> bool:
        """Whether any token is trained on; the first one never is, because nothing predicts it."""
        return bool((self.labels[1:] != IGNORED).any())

    def cut_to(self, length: int) -> _Row:
        return replace(self, ids=self.ids[:length], labels=self.labels[:length], cut=True)


def _label(
    template: ChatTemplate,
    rows: Sequence[Any],
    where: Callable[[int], str],
    max_length: int,
    too_long: str,
    train_on: str,
    plain: bool,
) -> dict[str, np.ndarray]:
    kept: list[_Row] = []
    unanswered: list[int] = []
    unfitting: list[int] = []
    prefix = SpecialTokens.of(template.tokenizer).before if plain else template.prefix
    check_marks = template.has_generation_marks and not plain and train_on == "all"
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        rendered = [_render(template, row, train_on, where, start + i) for i, row in enumerate(chunk)]
        for i, (tokens, answers) in enumerate(template.tokenize(rendered), start):
            if check_marks and i < _CHECKED and answers and not any(turn.get("weight") == 0 for turn in rows[i]):
                _naming_row(where, i, partial(template.check_generation_marks, rows[i], tokens, answers))
            row = _Row.of(i, prefix, tokens, answers)
            if not row.has_answer:
                unanswered.append(i)
                continue
            if len(row.ids) > max_length:
                if too_long == "error":
                    raise ValueError(
                        f"{where(i)}: the row has {len(row.ids)} tokens, but max_length is {max_length}; give "
                        "--too_long cut or drop, or a larger --max_length"
                    )
                row = row.cut_to(max_length)
                if too_long == "drop" or not row.has_answer:
                    unfitting.append(i)
                    continue
            kept.append(row)
    return _arrays(kept, unanswered, unfitting)


def _arrays(kept: list[_Row], unanswered: list[int], unfitting: list[int]) -> dict[str, np.ndarray]:
    none = np.zeros(0, np.int32)
    return {
        "ids": np.concatenate([none, *(row.ids for row in kept)]),
        "labels": np.concatenate([none, *(row.labels for row in kept)]),
        "offsets": np.concatenate(([0], np.cumsum([len(row.ids) for row in kept], dtype=np.int64))).astype(np.int64),
        "rows": np.array([row.number for row in kept], np.int64),
        "unanswered": np.array(unanswered, np.int64),
        "unfitting": np.array(unfitting, np.int64),
        "stops": np.array(sorted({stop for row in kept for stop in row.stops}), np.int64),
        "cut": np.array([row.cut for row in kept], bool),
    }


def _render(template: ChatTemplate, row: Any, train_on: str, where: Callable[[int], str], number: int) -> Rendered:
    if isinstance(row, str):
        end = template.tokenizer.eos_token
        text = row if row.endswith(end) else row + end
        return Rendered(text, [(0, len(text))] if row.strip() else [])
    return _naming_row(where, number, lambda: template.render_answers(row, train_on))


def _naming_row(where: Callable[[int], str], row: int, function: Callable[[], Any]) -> Any:
    """Call a function, adding the row to its ValueError."""
    try:
        return function()
    except ValueError as error:
        raise ValueError(f"{where(row)}: {error}") from error

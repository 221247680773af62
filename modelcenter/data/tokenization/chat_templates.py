"""Conversations as text and tokens, by the tokenizer's chat template or a plain layout, and which tokens are answers.

What is an answer is found by differences: a conversation up to an answer, rendered with the template's generation
prompt, is what the model sees when it is to answer; what the whole rendering has beyond it, up to the token that ends
the turn, is what it is to write.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelcenter.data.cache import cached, special_tokens, tokenizer_state
from modelcenter.data.schemas.conversations import TOOLS, Conversation
from modelcenter.data.tokenization.tokenize import Tokens

IGNORED = -100  # the label of what is not trained on
TOO_LONG = ("cut", "drop", "error")
TRAIN_ON = ("all", "last")
# For tokenizers without a chat template: "plain" puts each turn on a line of its own, "none" adds nothing. Both end
# every answer by the end token.
LAYOUTS = {
    "plain": "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}",
    "none": "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}",
}
_VERSION = 3  # part of the cache's key: raise it when the way of rendering, tokenising or marking changes
_CHUNK = 1024  # rows that are rendered and tokenised together
_COMPARED = 32  # rows whose {% generation %} marks are compared
_MARK = "\u2e281f3e9\u2e29"  # a content that no other has: where a template puts it is where it puts the content


@dataclass(frozen=True)
class Rendered:
    """A text and which parts of it are answers to train on, as (start, end) in characters."""

    text: str
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class LabelledTokens:
    """Rows with labels for each token.

    tokens: of the rows that were kept; its `truncated` counts those that were cut. labels: int32 (T,), the token where
    it is trained on, else -100. rows: int64 (n,), which of the given rows these are. unanswered, unfitting: int64,
    rows left out as they have no answer, or none of it within max_length (with too_long "drop": that are longer).
    stops: tokens that end the answers. cut: bool (n,), which of the kept rows were cut; None: none was.
    """

    tokens: Tokens
    labels: np.ndarray
    rows: np.ndarray
    unanswered: np.ndarray
    unfitting: np.ndarray
    stops: list[int]
    cut: np.ndarray | None = None


class Template:
    """How conversations become text, with a tokenizer."""

    def __init__(self, tokenizer: Any, choice: str = "auto"):
        """choice: "chat", "plain", "none" or a Jinja file, which becomes the tokenizer's chat template. "auto":
        "chat" where the tokenizer has a chat template, else "plain".

        Raises:
            ValueError: no such template, a tokenizer without the one that is asked for, or without an end token.
        """
        self.tokenizer = tokenizer
        own = getattr(tokenizer, "chat_template", None)
        with_tools = None
        if isinstance(own, dict):  # several, by name
            own, with_tools = own.get("default"), own.get("tool_use")
        self.name = choice if choice != "auto" else "chat" if own is not None else "plain"
        if self.name == "chat" and own is None:
            raise ValueError(
                "template: this tokenizer has no chat template; give --template plain, none or a Jinja file"
            )
        if self.name not in ("chat", *LAYOUTS):
            own = tokenizer.chat_template = _read(self.name)
        self.text: str = LAYOUTS.get(self.name) or own
        self.text_with_tools: str = with_tools if self.name == "chat" and with_tools else self.text
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: it has no end token (eos_token), so no answer could end; give one that has")
        # A template writes the tokens at the start itself; before a plain layout they are what the tokenizer puts.
        self.front = _front(tokenizer) if self.name in LAYOUTS else []
        self._added = set(tokenizer.get_added_vocab())  # what no other token reaches over
        self.reserved = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.reserved.update(tokenizer.all_special_tokens)
        self._ends = sorted((word for word in self._added | self.reserved if word.strip()), key=len, reverse=True)

    def render(self, turns: Conversation, prompt: bool = False) -> str:
        """The text of some turns. prompt: with what comes before an answer."""
        try:
            return self._apply(turns, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            # A template that adds what is no text to one raises Python's own error.
            if not type(error).__module__.startswith("jinja2") and not isinstance(error, TypeError):
                raise
            raise ValueError(f"template {self.name}: cannot be applied to this conversation: {error}") from error

    def _apply(self, turns: Conversation, **options: Any) -> Any:
        tools = turns[0].get(TOOLS) if turns else None
        if tools is None:
            return self.tokenizer.apply_chat_template(turns, chat_template=self.text, **options)
        first = {name: value for name, value in turns[0].items() if name != TOOLS}
        return self.tokenizer.apply_chat_template(
            [first, *turns[1:]], tools=tools, chat_template=self.text_with_tools, **options
        )

    @property
    def uses_tools(self) -> bool:
        """Whether it writes the tools that a conversation may call."""
        return re.search(r"\btools\b", self.text_with_tools) is not None

    def prompt(self, turns: Conversation) -> np.ndarray:
        """Tokens, int64 (n,), of what a model is given to answer: all turns but an answer at the end."""
        asked = turns[:-1] if turns and turns[-1]["role"] == "assistant" else turns
        if not asked:
            raise ValueError("the conversation has nothing to answer")
        return np.array([*self.front, *self._ids([self.render(asked, prompt=True)])[0]], np.int64)

    def text_prompt(self, text: str) -> np.ndarray:
        """Tokens, int64 (n,), of a plain text to go on from."""
        return np.array([*_front(self.tokenizer), *self._ids([text])[0]], np.int64)

    def mark(self, turns: Conversation, train_on: str = "all") -> Rendered:
        """The text of a conversation and its answers: all that are not marked "weight": 0, or the last one. A turn that
        says nothing is no answer.

        Raises:
            ValueError: the template writes earlier turns in another way than before, so that it cannot be told where
                an answer begins; or an answer that no special token ends.
        """
        whole = self.render(turns)
        places = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if train_on == "last":
            places = places[-1:]
        answers = []
        for i in places:
            if turns[i].get("weight") == 0 or _silent(turns[i]):
                continue
            before = self.render(turns[:i], prompt=True) if i else self._opening(whole, turns[0])
            if not whole.startswith(before):
                begins, other = whole[: len(before)][-200:], " Give --train_on last." if i < max(places) else ""
                raise ValueError(
                    f"template {self.name}: the conversation up to its turn {i + 1} is rendered as "
                    f"{before[-200:]!r}, but the whole begins with {begins!r}, so it cannot be told what is an answer."
                    f"{other} Or change the template (--template FILE)"
                )
            answers.append((len(before), self._end(turns, i, whole, len(before))))
        return Rendered(whole, answers)

    def _opening(self, whole: str, first: dict[str, Any]) -> str:
        """What comes before the answer that a conversation begins with: many templates render no turns at all not."""
        tools = {TOOLS: first[TOOLS]} if TOOLS in first else {}
        opening = self.render([{"role": "assistant", "content": _MARK, **tools}]).partition(_MARK)[0]
        return opening if whole.startswith(opening) else ""

    def _end(self, turns: Conversation, i: int, whole: str, start: int) -> int:
        """Where the answer in turn i ends: after the special token that ends it."""
        upto = whole if i + 1 == len(turns) else self.render(turns[: i + 1])
        if not whole.startswith(upto):
            # Some templates write an answer in another way once a question follows. The token that ends it does not
            # change.
            stop = self._stop(upto)
            at = whole.find(stop, start) if stop else -1
            # Unless it stands at the end of the conversation alone, behind the turns that follow.
            followed = self.render([*turns[: i + 1], {**turns[i + 1], "content": _MARK}])
            if at < 0 or stop not in followed[start:].partition(_MARK)[0]:
                raise ValueError(
                    f"template {self.name}: writes turn {i + 1} in another way when turns follow, and no special token "
                    "ends it there, so it cannot be told where the answer ends; give --train_on last, or change the "
                    "template (--template FILE)"
                )
            return at + len(stop)
        end = len(upto.rstrip())
        stop, said = self._stop(whole[start:end]), turns[i]["content"].rstrip()
        # A word of --add_tokens ends an answer where the template puts it, not where it is the last that is said.
        its_own = stop not in self.reserved and said.endswith(stop) and whole[:end].endswith(said)
        if stop == "" or its_own:
            raise ValueError(
                f"template {self.name}: no special token ends the answer {whole[start:end][-80:]!r}, so a model would "
                "not learn to stop; write {{ eos_token }} after the answers (--template FILE)"
            )
        return end

    def _stop(self, text: str) -> str:
        """The special token that a text ends with, white space apart; "" if there is none."""
        text = text.rstrip()
        return next((word for word in self._ends if text.endswith(word)), "")

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def tokens(self, rendered: Sequence[Rendered]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(tokens, answers as ranges of tokens) of each text.

        What comes before an answer has the tokens that it has by itself, as when the model is to answer: where a token
        would reach over the boundary, or the boundary changes those before it, the parts are tokenised one by one.
        """
        cuts = [self._cuts(r) for r in rendered]
        parts = [
            r.text[cut:at]
            for r, row in zip(rendered, cuts, strict=True)
            for pair, cut in zip(r.answers, row, strict=False)
            for at in pair
            if at < len(r.text)
        ]
        flat = iter(self._ids([r.text for r in rendered] + parts))
        whole = [next(flat) for _ in rendered]
        found = []
        for r, ids, row in zip(rendered, whole, cuts, strict=True):
            places: list[tuple[int, int]] = []
            fits = True
            for pair, cut in zip(r.answers, row, strict=False):
                base = places[-1][1] - 1 if cut else 0
                bounds = [len(ids), len(ids)]
                for side, part in enumerate(next(flat) for at in pair if at < len(r.text)):
                    bounds[side] = base + len(part)
                    fits = fits and ids[base : bounds[side]] == part
                places.append((bounds[0], bounds[1]))
            found.append((ids, places) if fits else self._apart(r, row))
        return found

    def _cuts(self, r: Rendered) -> list[int]:
        """From where the text before each answer, and behind the last, is tokenised: from the token that ends the
        answer before it, as no other reaches over that one (else from the beginning of the text, 0)."""
        stops = [self._stop(r.text[start:end]) for start, end in r.answers]
        ends = zip(r.answers, stops, strict=True)
        return [0, *(end - len(stop) if stop in self._added else 0 for (_, end), stop in ends)]

    def _apart(self, r: Rendered, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        places, last = [], 0

        def between(cut: int, end: int) -> list[int]:
            """Tokens of the text from `last` on. Some tokenizers put a space before a text: behind the token that ended
            an answer they put none."""
            return self._ids([r.text[cut:end]])[0][1:] if cut else self._ids([r.text[last:end]])[0]

        for (start, end), cut in zip(r.answers, cuts, strict=False):
            before, (answer,) = between(cut, start), self._ids([r.text[start:end]])
            places.append((len(ids) + len(before), len(ids) + len(before) + len(answer)))
            ids += [*before, *answer]
            last = end
        return ids + (between(cuts[-1], len(r.text)) if last < len(r.text) else []), places

    def compare_marks(self, turns: Conversation, ids: list[int], places: list[tuple[int, int]]) -> None:
        """Raise ValueError where the template's own {% generation %} marks say something else, white space apart."""
        out = self._apply(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        theirs = {i for i, marked in enumerate(out["assistant_masks"]) if marked}
        ours = {i for start, end in places for i in range(start, end)}
        other = [i for i in sorted(theirs ^ ours) if self.tokenizer.decode([out["input_ids"][i]]).strip()]
        if list(out["input_ids"]) == ids and other:
            said = "leaves out" if other[0] in ours else "takes in"
            token = self.tokenizer.decode([ids[other[0]]])
            raise ValueError(
                f"template {self.name}: its generation block {said} {token!r} (token {other[0]}), but an answer goes "
                "from the generation prompt to the token that ends the turn; put the block around just that"
            )

    @property
    def marks(self) -> bool:
        """Whether the template says itself what is an answer, in a way that can be read."""
        return self.tokenizer.is_fast and re.search(r"\{%-?\s*generation\b", self.text) is not None


def label_conversations(
    template: Template,
    rows: Sequence[Conversation] | Sequence[str],
    where: Callable[[int], str],
    *,
    max_length: int,
    too_long: str = "cut",
    train_on: str = "all",
) -> LabelledTokens:
    """Tokens and labels of conversations, or of plain texts, all of which is trained on; kept in the cache.

    Args:
        where: the place of a row, for errors. max_length: tokens of a row. too_long: what is done with longer ones:
            "cut" from the right, "drop" or "error". train_on: "all" answers, or the "last" of each row.

    Raises:
        ValueError: a row that the template cannot render or mark, one that is too long (with "error"), or no row with
            an answer.
    """
    plain = bool(rows) and isinstance(rows[0], str)
    how = [plain, template.text, template.text_with_tools, template.front, max_length, too_long, train_on]
    about = json.dumps([*how, special_tokens(template.tokenizer), sorted(template.reserved)])
    # The order of fields is part of a row: templates write calls and tools as they come.
    texts = [row if isinstance(row, str) else json.dumps(row, default=str) for row in rows]
    key = ["conversations", _VERSION, about, tokenizer_state(template.tokenizer), texts]
    arrays = cached(key, lambda: _label(template, rows, where, max_length, too_long, train_on, plain))
    found = LabelledTokens(
        Tokens(arrays["ids"], arrays["offsets"], None, int(arrays["cut"].sum())),
        *(arrays[name] for name in ("labels", "rows", "unanswered", "unfitting")),
        arrays["stops"].tolist(),
        arrays["cut"],
    )
    if not len(found.rows):
        some = found.unanswered if len(found.unanswered) else found.unfitting
        why = "has an answer to train on" if len(found.unanswered) else f"has some of its answer in {max_length} tokens"
        raise ValueError(f"{where(int(some[0]))}: neither this row nor any other {why}")
    return found


def _label(
    template: Template,
    rows: Sequence[Any],
    where: Callable[[int], str],
    max_length: int,
    too_long: str,
    train_on: str,
    plain: bool,
) -> dict[str, np.ndarray]:
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    kept: list[int] = []
    unanswered: list[int] = []
    unfitting: list[int] = []
    stops: set[int] = set()
    cut: list[bool] = []
    front = _front(template.tokenizer) if plain else template.front
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        rendered = [_rendered(template, row, train_on, where, start + i) for i, row in enumerate(chunk)]
        for i, (tokens, places) in enumerate(template.tokens(rendered), start):
            if i < _COMPARED and template.marks and not plain and train_on == "all" and places:
                with_weights = any(turn.get("weight") == 0 for turn in rows[i])
                if not with_weights:
                    _at(where, i, lambda t=tokens, p=places, i=i: template.compare_marks(rows[i], t, p))
            row = np.array([*front, *tokens], np.int32)
            label = np.full(len(row), IGNORED, np.int32)
            for a, b in places:
                label[a + len(front) : b + len(front)] = row[a + len(front) : b + len(front)]
            if not (label[1:] != IGNORED).any():
                unanswered.append(i)
                continue
            ends = [int(row[b + len(front) - 1]) for _, b in places]
            long = len(row) > max_length
            if long:
                if too_long == "error":
                    raise ValueError(
                        f"{where(i)}: the row has {len(row)} tokens, max_length is {max_length}; give --too_long cut "
                        "or drop, or a larger --max_length"
                    )
                if too_long == "drop" or not (label[1:max_length] != IGNORED).any():
                    unfitting.append(i)
                    continue
                row, label = row[:max_length], label[:max_length]
            stops.update(ends)
            ids.append(row), labels.append(label), kept.append(i), cut.append(long)
    none = np.zeros(0, np.int32)
    return {
        "ids": np.concatenate([none, *ids]),
        "labels": np.concatenate([none, *labels]),
        "offsets": np.concatenate(([0], np.cumsum([len(row) for row in ids], dtype=np.int64))).astype(np.int64),
        "rows": np.array(kept, np.int64),
        "unanswered": np.array(unanswered, np.int64),
        "unfitting": np.array(unfitting, np.int64),
        "stops": np.array(sorted(stops), np.int64),
        "cut": np.array(cut, bool),
    }


def _rendered(template: Template, row: Any, train_on: str, where: Callable[[int], str], number: int) -> Rendered:
    if isinstance(row, str):
        end = template.tokenizer.eos_token
        text = row if row.endswith(end) else row + end
        return Rendered(text, [(0, len(text))] if row.strip() else [])
    return _at(where, number, lambda: template.mark(row, train_on))


def _at(where: Callable[[int], str], row: int, work: Callable[[], Any]) -> Any:
    """What `work` returns; its ValueError says of which row it is."""
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{where(row)}: {error}") from error


def _silent(turn: dict[str, Any]) -> bool:
    """Whether a turn has neither a text nor anything else that a template could write, such as calls of tools."""
    others = turn.keys() - {"role", "content", "weight", "name", TOOLS}
    return not turn["content"].strip() and not any(turn[name] for name in others)


def _front(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text of its own accord."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return list(whole[:at])


def _read(path: str) -> str:
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(path, ["chat", *LAYOUTS], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"template: got {path!r}, expected auto, chat, plain, none or a Jinja file ({reason}).{hint}"
        ) from None

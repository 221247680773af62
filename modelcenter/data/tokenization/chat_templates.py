"""Conversations as text and tokens, by the tokenizer's chat template or a plain layout, and which parts are answers.

Answers are found by differences: a conversation up to an answer, rendered with the template's generation prompt, is the
model's input at inference; the text after it in the whole rendering, up to the token that ends the turn, is the answer
to learn.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np

from modelcenter.data.schemas.conversations import TOOLS, Conversation
from modelcenter.data.tokenization.special_tokens import SpecialTokens

# For tokenizers without a chat template: "plain" puts each turn on a line of its own, "none" adds nothing. Both end
# every answer by the end token.
LAYOUTS = {
    "plain": "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}",
    "none": "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}",
}
_PLACEHOLDER = "\u2e281f3e9\u2e29"  # occurs in no message, so it shows where a template puts the content


def is_of_template(error: Exception) -> bool:
    """Whether a chat template is at fault: its error is Jinja's or, if it adds something else to a text, Python's."""
    return type(error).__module__.startswith("jinja2") or isinstance(error, TypeError)


@dataclass(frozen=True)
class Rendered:
    """A text and the answers to train on in it, as (start, end) in characters."""

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """How conversations become text and tokens with one tokenizer.

    name: "chat", "plain", "none" or the Jinja file. text, text_with_tools: the template, and the one for conversations
    with tools. prefix: tokens before the rendered text. special_words: the special tokens, as text.
    """

    def __init__(self, tokenizer: Any, choice: str = "auto"):
        """choice: "chat", "plain", "none" or a Jinja file, which becomes the tokenizer's chat template. "auto":
        "chat" if the tokenizer has a chat template, else "plain".

        Raises:
            ValueError: the template does not exist, or the tokenizer lacks it or an end token.
        """
        self.tokenizer = tokenizer
        own: Any = getattr(tokenizer, "chat_template", None)
        named = own if isinstance(own, dict) else {"default": own}  # several, by name
        text, with_tools = named.get("default"), named.get("tool_use")
        self.name = choice if choice != "auto" else "chat" if text is not None else "plain"
        if self.name in LAYOUTS:
            text = LAYOUTS[self.name]
        elif self.name != "chat":
            text = tokenizer.chat_template = _read(self.name)
        elif text is None:
            raise ValueError(
                "template: this tokenizer has no chat template; give --template plain, none or a Jinja file"
            )
        self.text: str = text
        self.text_with_tools: str = with_tools if self.name == "chat" and with_tools else self.text
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: it has no end token (eos_token), so answers could not end; give one that has")
        # A template writes the tokens at the start itself; a plain layout gets the tokenizer's.
        self.prefix = list(SpecialTokens.of(tokenizer).before) if self.name in LAYOUTS else []
        self._added_words = set(tokenizer.get_added_vocab())  # no token crosses the boundary of one of these
        self.special_words = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special_words.update(tokenizer.all_special_tokens)
        words = (word for word in self._added_words | self.special_words if word.strip())
        self._end_words = sorted(words, key=len, reverse=True)

    def render(self, turns: Conversation, prompt: bool = False) -> str:
        """The text of some turns. prompt: add what the template writes before an answer."""
        try:
            return self._apply(turns, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            if not is_of_template(error):
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
        """Whether the template writes the tools that a conversation may call."""
        return re.search(r"\btools\b", self.text_with_tools) is not None

    def prompt(self, turns: Conversation) -> np.ndarray:
        """The tokens, int64 (n,), of the prompt for an answer: all turns except an answer at the end."""
        return np.array([*self.prefix, *self._encode([self.render(_asked(turns), prompt=True)])[0]], np.int64)

    def context_length(self, turns: Conversation, train_on: str = "all") -> int:
        """The number of tokens of `prompt` before the first answer that would be trained on; all, if none would be.
        train_on: as in render_answers."""
        asked = _asked(turns)
        earlier = enumerate(asked) if train_on == "all" else ()
        first = next((i for i, turn in earlier if turn["role"] == "assistant" and _is_trained(turn)), len(asked))
        before = self.render(asked[:first], prompt=True) if first else self._opening(self.render(asked), asked[0])
        return len(self.prefix) + len(self._encode([before])[0])

    def text_prompt(self, text: str) -> np.ndarray:
        """The tokens, int64 (n,), of a plain text to continue."""
        return np.array([*SpecialTokens.of(self.tokenizer).before, *self._encode([text])[0]], np.int64)

    def render_answers(self, turns: Conversation, train_on: str = "all") -> Rendered:
        """The text of a conversation and its answers: all that are not marked "weight": 0, or the last one. An empty
        turn is not an answer.

        Raises:
            ValueError: the template renders earlier turns differently if others follow, so that the start of an answer
                is unknown; or no special token ends an answer.
        """
        whole = self.render(turns)
        places = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if train_on == "last":
            places = places[-1:]
        answers = []
        for i in places:
            if not _is_trained(turns[i]):
                continue
            before = self.render(turns[:i], prompt=True) if i else self._opening(whole, turns[0])
            if not whole.startswith(before):
                begins, other = whole[: len(before)][-200:], " Give --train_on last." if i < max(places) else ""
                raise ValueError(
                    f"template {self.name}: the conversation up to its turn {i + 1} is rendered as {before[-200:]!r}, "
                    f"but the whole conversation begins with {begins!r}, so the answers cannot be found.{other} Or "
                    "change the template (--template FILE)"
                )
            answers.append((len(before), self._answer_end(turns, i, whole, len(before))))
        return Rendered(whole, answers)

    def _opening(self, whole: str, first: dict[str, Any]) -> str:
        """The text before an answer at the start of a conversation: many templates cannot render zero turns."""
        tools = {TOOLS: first[TOOLS]} if TOOLS in first else {}
        opening = self.render([{"role": "assistant", "content": _PLACEHOLDER, **tools}]).partition(_PLACEHOLDER)[0]
        return opening if whole.startswith(opening) else ""

    def _answer_end(self, turns: Conversation, i: int, whole: str, start: int) -> int:
        """The end of the answer in turn i: after the special token that ends it."""
        upto = whole if i + 1 == len(turns) else self.render(turns[: i + 1])
        end = len(upto.rstrip())
        if not whole.startswith(upto):
            shared = self._end_of_shared(upto, whole, start)
            if shared is None:
                return self._end_once_followed(turns, i, upto, whole, start)
            end = shared
        stop, content = self._end_word(whole[start:end]), turns[i]["content"].rstrip()
        # A token of --add_tokens ends an answer only if the template wrote it, not if the content ends with it.
        in_content = stop not in self.special_words and content.endswith(stop) and whole[:end].endswith(content)
        if stop == "" or in_content:
            raise ValueError(
                f"template {self.name}: no special token ends the answer {whole[start:end][-80:]!r}, so a model would "
                "not learn to stop; write {{ eos_token }} after the answers (--template FILE)"
            )
        return end

    def _end_of_shared(self, upto: str, whole: str, start: int) -> int | None:
        """The end of an answer if the template writes another special token after the last one, as Phi's template ends
        a conversation. None: the conversation up to it and the whole begin differently."""
        text = upto.rstrip()
        while word := self._end_word(text):
            text = text.removesuffix(word).rstrip()
            if whole.startswith(text) and self._end_word(text[start:]):
                return len(text)
        return None

    def _end_once_followed(self, turns: Conversation, i: int, upto: str, whole: str, start: int) -> int:
        """The end of an answer if the template renders it differently before a question, with the same end token."""
        stop = self._end_word(upto)
        at = whole.find(stop, start) if stop else -1
        # Unless that token is only at the end of the conversation, after the turns that follow.
        followed = self.render([*turns[: i + 1], {**turns[i + 1], "content": _PLACEHOLDER}])
        if at < 0 or stop not in followed[start:].partition(_PLACEHOLDER)[0]:
            raise ValueError(
                f"template {self.name}: turn {i + 1} is rendered differently if turns follow, and then ends with no "
                "special token, so the end of the answer is unknown; give --train_on last, or change the template "
                "(--template FILE)"
            )
        return at + len(stop)

    def _end_word(self, text: str) -> str:
        """The special token at the end of a text, ignoring white space; "" if there is none."""
        text = text.rstrip()
        return next((word for word in self._end_words if text.endswith(word)), "")

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def tokenize(self, rendered: Sequence[Rendered]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(tokens, answers as ranges of tokens) of each text.

        The text before an answer has the same tokens as a prompt at inference: if a token would cross the boundary, or
        the boundary changes the tokens before it, the parts are tokenised separately.
        """
        cuts = [self._part_starts(r) for r in rendered]
        parts = [
            r.text[cut:at]
            for r, row in zip(rendered, cuts, strict=True)
            for pair, cut in zip(r.answers, row, strict=False)
            for at in pair
            if at < len(r.text)
        ]
        encoded = iter(self._encode([r.text for r in rendered] + parts))
        whole = [next(encoded) for _ in rendered]
        tokenized = []
        for r, ids, row in zip(rendered, whole, cuts, strict=True):
            places: list[tuple[int, int]] = []
            fits = True
            for pair, cut in zip(r.answers, row, strict=False):
                base = places[-1][1] - 1 if cut else 0
                bounds = [len(ids), len(ids)]
                for side, part in enumerate(next(encoded) for at in pair if at < len(r.text)):
                    bounds[side] = base + len(part)
                    fits = fits and ids[base : bounds[side]] == part
                places.append((bounds[0], bounds[1]))
            tokenized.append((ids, places) if fits else self._tokenize_separately(r, row))
        return tokenized

    def _part_starts(self, r: Rendered) -> list[int]:
        """The start of the part to tokenise before each answer, and after the last: the token that ends the previous
        answer if no other token crosses it, else the start of the text, 0."""
        stops = [self._end_word(r.text[start:end]) for start, end in r.answers]
        ends = zip(r.answers, stops, strict=True)
        return [0, *(end - len(stop) if stop in self._added_words else 0 for (_, end), stop in ends)]

    def _tokenize_separately(self, r: Rendered, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        places, last = [], 0

        def between(cut: int, end: int) -> list[int]:
            """The tokens of the text from `last` on. Some tokenizers put a space before a text, but not after the end
            token of an answer."""
            return self._encode([r.text[cut:end]])[0][1:] if cut else self._encode([r.text[last:end]])[0]

        for (start, end), cut in zip(r.answers, cuts, strict=False):
            before, (answer,) = between(cut, start), self._encode([r.text[start:end]])
            places.append((len(ids) + len(before), len(ids) + len(before) + len(answer)))
            ids += [*before, *answer]
            last = end
        return ids + (between(cuts[-1], len(r.text)) if last < len(r.text) else []), places

    @property
    def has_generation_marks(self) -> bool:
        """Whether the template itself marks the answers, in a readable way."""
        return self.tokenizer.is_fast and re.search(r"\{%-?\s*generation\b", self.text) is not None

    def check_generation_marks(self, turns: Conversation, ids: list[int], answers: list[tuple[int, int]]) -> None:
        """Raise ValueError if the template's own {% generation %} marks differ from the answers, white space aside."""
        out = self._apply(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        marked = {i for i, mark in enumerate(out["assistant_masks"]) if mark}
        answered = {i for start, end in answers for i in range(start, end)}
        differing = [i for i in sorted(marked ^ answered) if self.tokenizer.decode([out["input_ids"][i]]).strip()]
        if list(out["input_ids"]) == ids and differing:
            verb = "leaves out" if differing[0] in answered else "takes in"
            token = self.tokenizer.decode([ids[differing[0]]])
            raise ValueError(
                f"template {self.name}: its generation block {verb} {token!r} (token {differing[0]}), but an answer "
                "goes from the generation prompt to the token that ends the turn; put the block around exactly that"
            )


def _asked(turns: Conversation) -> Conversation:
    """All turns except an answer at the end. Raises ValueError if there are none."""
    asked = turns[:-1] if turns and turns[-1]["role"] == "assistant" else turns
    if not asked:
        raise ValueError("the conversation has no turn to answer")
    return asked


def _is_trained(turn: dict[str, Any]) -> bool:
    """Whether an answer is trained on."""
    return turn.get("weight") != 0 and not _is_silent(turn)


def _is_silent(turn: dict[str, Any]) -> bool:
    """Whether a turn has neither text nor anything else for a template to write, such as tool calls."""
    others = turn.keys() - {"role", "content", "weight", "name", TOOLS}
    return not turn["content"].strip() and not any(turn[name] for name in others)


def _read(path: str) -> str:
    file = Path(expanduser(path))
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(path, ["chat", *LAYOUTS], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"template: got {path!r}, expected auto, chat, plain, none or a Jinja file ({reason}).{hint}"
        ) from None

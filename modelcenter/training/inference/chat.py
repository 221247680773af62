"""A conversation with a model at the terminal."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from modelcenter.data.schemas.conversations import Conversation
from modelcenter.generation.generate import continues
from modelcenter.generation.prompts import positions_left
from modelcenter.layers.cache import KVCache
from modelcenter.models.base import Model
from modelcenter.training.inference.streaming import TerminalStreamer

HELP = "/clear starts over, /exit or Ctrl-D leaves, Ctrl-C ends an answer"
# The words of other chat tools too: ollama's and those of `transformers chat`.
_COMMANDS = {
    **dict.fromkeys(("/clear", "!clear", "/reset"), "clear"),
    **dict.fromkeys(("/exit", "!exit", "/bye", "/quit"), "exit"),
    **dict.fromkeys(("/help", "!help", "/?"), "help"),
}
_COMMAND = re.compile(r"[/!](\w+|\?)\s*")


class Chat:
    """A conversation that is kept, so that each message continues it.

    Keys and values of the tokens at its start that a model has read before are used again. Those are all earlier ones
    if the template writes them as before; some templates leave out the reasoning in earlier answers, for example.

    Args:
        encode: a conversation -> the tokens of the prompt for its next answer.
        generate: (tokens of the prompt, number of the answer, other arguments of model.generate) -> the tokens of the
            texts. Ctrl-C while it runs ends the answer.
        texts: how many texts an answer has; the first becomes part of the conversation. streams: whether they can be
            shown while they are generated.
        least: how many new tokens must fit after a prompt.
        system: the system prompt; None: none.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        encode: Callable[[Conversation], list[int]],
        generate: Callable[..., list[list[int]]],
        *,
        streams: bool,
        least: int,
        system: str | None = None,
    ):
        self.model, self.tokenizer, self._encode, self._generate = model, tokenizer, encode, generate
        self._streams, self._least = streams, least
        self._continues = streams and continues(model)
        self._opening: Conversation = [] if system is None else [{"role": "system", "content": system}]
        self._answers = 0
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self.turns: Conversation = list(self._opening)
        self._forget()

    def _forget(self) -> None:
        self._cache, self._read = KVCache(), list[int]()  # the keys, and their tokens

    def run(self, lines: Iterator[str]) -> None:
        """Answer lines until the user leaves. Neither an error in one nor Ctrl-C ends the conversation."""
        print(f"chat: {HELP}", file=sys.stderr, flush=True)
        for line in lines:
            command = _COMMANDS.get(line.strip().lower())
            try:
                if command == "exit":
                    return
                if command == "clear":
                    self.clear()
                elif command == "help":
                    print(HELP, file=sys.stderr, flush=True)
                elif _COMMAND.fullmatch(line):
                    raise ValueError(
                        f"{line.strip()}: no such command; {HELP}. A space before it makes it part of the conversation"
                    )
                else:
                    self.answer(line)
            except KeyboardInterrupt:
                print()
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)

    def answer(self, text: str) -> None:
        """Print the answer to a message, and add both to the conversation; if Ctrl-C ends the answer, what there is of
        it, or neither.

        Raises:
            ValueError: the conversation cannot be written or no longer fits the model; it stays as it was.
            KeyboardInterrupt: Ctrl-C came before or after the answer was generated; it stays as it was, too.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        prompt = self._encode(turns)
        self._check_room(len(prompt), len(turns) > len(self._opening) + 1)
        answer = self._stream(prompt) if self._streams else self._print(prompt)
        self._answers += 1
        if answer is not None:
            self.turns = [*turns, {"role": "assistant", "content": answer}]

    def _check_room(self, tokens: int, follows: bool) -> None:
        """follows: there are earlier messages."""
        left = positions_left(self.model, tokens)
        if left is None or left >= self._least:
            return
        remedy = "start over with /clear, or" if follows else "write a shorter one, or"
        remedy = f"{remedy} give a smaller --max_new_tokens" if left > 0 else remedy.removesuffix(", or")
        raise ValueError(
            f"chat: the conversation has {tokens} tokens with this message, and an answer of {self._least} more "
            f"exceeds the {self.model.config.max_written_tokens} positions of this model; {remedy}"
        )

    def _print(self, prompt: list[int]) -> str:
        """The first of the texts, all of which are printed."""
        texts = [self._text(tokens) for tokens in self._generate(prompt, self._answers)]
        print("\n".join(texts), flush=True)
        return texts[0]

    def _stream(self, prompt: list[int]) -> str | None:
        """The text, which is printed while it is generated; None if it ended before its first token."""
        start = 1 if self.model.is_encoder_decoder else len(prompt)
        terminal, options = _Recorder(self.tokenizer, start), dict[str, Any]()
        if self._continues:
            self._keep(prompt)
            options["past_key_values"] = self._cache
        try:
            self._generate(prompt, self._answers, streamer=terminal, **options)
        except KeyboardInterrupt:
            terminal.end()
        finally:
            # Also after an error, which may have come before a token was shown.
            self._read = (terminal.written or prompt)[: len(self._cache)]
        new = terminal.written[start:]
        return self._text(new) if new else None

    def _keep(self, prompt: list[int]) -> None:
        """Keep the keys of the tokens with which a prompt begins, except its last one, which gives the first scores."""
        shared = _shared(self._read, prompt[:-1])
        if shared:
            self._cache.crop(shared)
        else:
            self._forget()

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal items at the start of both."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class _Recorder(TerminalStreamer):
    """A TerminalStreamer that keeps all tokens.

    written: the prompt, or the decoder's start, and the tokens of the answer so far.
    """

    def __init__(self, tokenizer: Any, skip: int):
        super().__init__(tokenizer, skip)
        self.written: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.written += tokens.flatten().tolist()
        super().put(tokens)

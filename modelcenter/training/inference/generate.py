"""generate: texts from prompts, as they come on a terminal or a JSON line each, on any number of ranks."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import engine
import modelcenter
from modelcenter.training.config import GenerateConfig
from modelcenter.training.inference.predict import check_output, write_lines
from modelcenter.training.inference.text_generation import complete, map_over_ranks, with_batch_seed
from modelcenter.training.output.json_text import json_text
from modelcenter.training.setup.resolve import resolve_precision
from modelcenter.training.structured import write_answers
from modelcenter.training.trained import Trained

# What decoding may join to the word before it, by what comes next: "it '" and "s" make "it's".
_UNSURE = re.compile(r"( n)?( '?)? ?\Z")
_CONTEXT = 64  # tokens that newer ones are decoded behind: decoding all at each of them would take the square of them


class _Terminal:
    """A streamer that prints text as soon as it is certain: what the newest tokens decode to may still change."""

    def __init__(self, tokenizer: Any, skip: int):
        self.tokenizer, self.skip = tokenizer, skip
        self.tokens: list[int] = []
        self.shown = ""

    def put(self, tokens: torch.Tensor) -> None:
        new = tokens.flatten().tolist()
        drop = min(self.skip, len(new))
        self.skip -= drop
        self.tokens += new[drop:]
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character
            self._show(_UNSURE.sub("", text))
        if len(self.tokens) >= 2 * _CONTEXT:
            self._forget()

    def _forget(self) -> None:
        """Keep the newest tokens alone, if what they decode to by themselves is what was shown of them."""
        newest = self.tokens[-_CONTEXT:]
        text = self.tokenizer.decode(newest, skip_special_tokens=True)
        if text and self.shown.endswith(text):
            self.tokens, self.shown = newest, text

    def end(self) -> None:
        self._show(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _show(self, text: str) -> None:
        sys.stdout.write(text[len(self.shown) :])
        sys.stdout.flush()
        self.shown = text


def run_generate(cfg: GenerateConfig) -> None:
    """Print the text of each prompt, or write a JSON line for each.

    Raises:
        ValueError: flags that do not fit together, a model that writes no text, or no prompt.
    """
    cfg.require("run")
    check_output(cfg.output)
    engine.init_distributed(zero_level=cfg.zero)
    typed = _typed(cfg)
    prompts = None if typed else _prompts(cfg)
    if typed and engine.world_size() > 1:
        raise ValueError("prompt: is read from the terminal by one process; with several, give --prompts_file")
    if typed and cfg.output is not None:
        raise ValueError(
            "output: a typed prompt is answered on the terminal; give prompts or --prompts_file, or a pipe"
        )
    writer = _Writer(cfg)
    if typed:
        writer.answer(_lines())
        return
    assert prompts is not None
    texts = writer.write(prompts)
    if engine.rank() == 0:
        if cfg.output is not None:
            rows = zip(prompts, texts, strict=True)
            write_lines(cfg.output, (json_text({"prompt": p, "texts": t}) for p, t in rows))
        elif not writer.streamed:
            for several in texts:
                print("\n".join(several))
    engine.synchronize()


class _Writer:
    """A model and its tokenizer."""

    def __init__(self, cfg: GenerateConfig):
        self.cfg, self.streamed = cfg, False
        trained = Trained.find(cfg.run or "")
        policy = engine.Policy(zero_level=cfg.zero, precision=resolve_precision(cfg.precision))
        self.model = modelcenter.from_pretrained(trained.source, None, revision=cfg.revision, policy=policy)
        if self.model.task not in ("causal-lm", "seq2seq-lm"):
            raise ValueError(
                f"{cfg.run}: a model for {self.model.task} writes no text; expected causal-lm or seq2seq-lm"
            )
        revision = {"revision": cfg.revision} if cfg.revision and cfg.tokenizer is None else {}
        self.tokenizer = modelcenter.AutoTokenizer.from_pretrained(cfg.tokenizer or trained.source, **revision)
        size = len(self.tokenizer)
        if size > self.model.config.vocab_size:
            raise ValueError(
                f"tokenizer: has {size} tokens, the model's vocabulary {self.model.config.vocab_size}; give the one "
                "the model was trained with"
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        if self.cfg.chat:
            if getattr(self.tokenizer, "chat_template", None) is None:
                raise ValueError("chat: this tokenizer has no chat template; leave --chat out")
            turns = [[{"role": "user", "content": text}] for text in texts]
            texts = [self._in_template(turn) for turn in turns]
        ids = [self._prompt(text) for text in texts]
        for text, one in zip(texts, ids, strict=True):
            if not one:
                raise ValueError(f"prompt: {text!r} has no token; give a text to continue")
        return ids

    def _in_template(self, turns: list[dict[str, str]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            if not type(error).__module__.startswith("jinja2"):
                raise
            raise ValueError(f"chat: the tokenizer's chat template cannot be applied: {error}") from error

    def _prompt(self, text: str) -> list[int]:
        """The tokens of a text, for a decoder without the end that some tokenizers (BERT's) put after it."""
        ids = list(self.tokenizer(text, add_special_tokens=not self.cfg.chat)["input_ids"])
        own = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id}
        if not self.model.is_encoder_decoder and ids != own and ids[-1] in ends and own[-1:] != ids[-1:]:
            return ids[:-1]
        return ids

    def reads_objects(self, prompts: list[str]) -> bool:
        """Whether some prompt is a JSON object and the model reads those."""
        objects = any(prompt.lstrip().startswith("{") for prompt in prompts)
        return objects and getattr(self.model, "structured", False) and not self.cfg.chat

    def texts(self, prompts: list[str], number: int, streamer: Any = None) -> list[list[str]]:
        """What is written for each prompt, the first of which is the prompt `number` of all."""
        search = with_batch_seed(self.cfg.search(), number)
        if self.reads_objects(prompts):
            return write_answers(self.model, self.tokenizer, prompts, **search)
        return complete(self.model, self.tokenizer, self.encode(prompts), streamer=streamer, **search)

    def show(self, prompt: str, number: int = 0) -> None:
        """Answer a prompt, as it comes where the search allows."""
        one = self.cfg.num_beams == 1 and self.cfg.num_return_sequences == 1
        if one and not self.reads_objects([prompt]):
            skip = 1 if self.model.is_encoder_decoder else len(self.encode([prompt])[0])
            self.texts([prompt], number, _Terminal(self.tokenizer, skip))
        else:
            print("\n".join(self.texts([prompt], number)[0]))

    def answer(self, lines: Iterator[str]) -> None:
        """As `show`, for a person: Ctrl-C ends an answer, what is wrong with a prompt does not end the session."""
        for number, line in enumerate(lines):
            try:
                self.show(line, number)
            except KeyboardInterrupt:
                print()
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)

    def write(self, prompts: list[str]) -> list[list[str]]:
        """The texts of all prompts, on rank 0. Every rank takes as many turns, for which some repeat a prompt."""
        ranks, size = engine.data_size(), self.cfg.batch_size
        if len(prompts) == 1 and ranks == 1 and self.cfg.output is None:
            self.streamed = True
            self.show(prompts[0])
            return [[]]
        return map_over_ranks(len(prompts), size, lambda numbers: self.texts([prompts[i] for i in numbers], numbers[0]))


def _typed(cfg: GenerateConfig) -> bool:
    """Whether prompts are typed at a terminal."""
    return not cfg.prompt and not cfg.prompts_file and sys.stdin.isatty()


def _prompts(cfg: GenerateConfig) -> list[str]:
    if cfg.prompt:
        return cfg.prompt
    if cfg.prompts_file:
        path = Path(cfg.prompts_file).expanduser()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompts_file: {path} cannot be read as UTF-8 text: {error}") from None
    elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError("prompt: none was given; with several processes give texts or --prompts_file")
    else:
        text = sys.stdin.read()
    lines = [line for line in text.split("\n") if line.strip()]  # not splitlines, which knows other ends than these
    if not lines:
        raise ValueError(f"prompt: none was given ({cfg.prompts_file or 'standard input'} has no line with text)")
    return lines


def _lines() -> Iterator[str]:
    """What a person types, until the end of input or Ctrl-C."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line

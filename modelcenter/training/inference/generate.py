"""generate: texts from prompts, streamed to a terminal or written to a file, on any number of ranks."""

import os
import sys
from collections.abc import Iterator
from os.path import expanduser
from pathlib import Path
from typing import Any

import engine
from modelcenter.data.tokenization.chat_templates import LAYOUTS, ChatTemplate, is_of_template
from modelcenter.training.config import DPOConfig, GenerateConfig, LMConfig, Seq2SeqConfig
from modelcenter.training.inference.loading import load_model, load_tokenizer, start_ranks
from modelcenter.training.inference.output_file import check_output, write_rows
from modelcenter.training.inference.streaming import TerminalStreamer
from modelcenter.training.inference.text_generation import complete, complete_rows, map_over_ranks, with_batch_seed
from modelcenter.training.structured import parse_objects, write_answers
from modelcenter.training.target_tokens import begin_texts, choose_languages
from modelcenter.training.tasks.base import plain_text_context
from modelcenter.training.trained import TrainedModel


def run_generate(cfg: GenerateConfig) -> None:
    """Print the text of each prompt, or write a row for each.

    Raises:
        ValueError: flags do not fit together, the model cannot generate text, or there is no prompt.
    """
    cfg.require("run")
    check_output(cfg.output)
    start_ranks(cfg)
    interactive = _is_interactive(cfg)
    prompts = [] if interactive else _read_prompts(cfg)
    if interactive and engine.world_size() > 1:
        raise ValueError("prompt: only one process can read from the terminal; with several, give --prompts_file")
    if interactive and cfg.output is not None:
        raise ValueError(
            "output: prompts typed at the terminal are answered there; give prompts, --prompts_file or a pipe"
        )
    generator = _Generator(cfg)
    if interactive:
        generator.answer(_typed_lines())
    elif len(prompts) == 1 and engine.data_size() == 1 and cfg.output is None:
        generator.show(prompts[0])
    else:
        _write(cfg, prompts, generator.generate_all(prompts))
    if not interactive:
        engine.synchronize()


def _write(cfg: GenerateConfig, prompts: list[str], texts: list[list[str]]) -> None:
    """Write the texts of all prompts, from rank 0."""
    if engine.rank() != 0:
        return
    if cfg.output is not None:
        write_rows(cfg.output, [{"prompt": p, "texts": t} for p, t in zip(prompts, texts, strict=True)])
        return
    for of_prompt in texts:
        print("\n".join(of_prompt))


class _Generator:
    """A model that generates text, its tokenizer, and the encoding of prompts."""

    def __init__(self, cfg: GenerateConfig):
        self.cfg = cfg
        trained = TrainedModel.find(cfg.run or "")
        self.model, self.run = load_model(cfg, trained), trained.run
        if self.model.task not in ("causal-lm", "seq2seq-lm"):
            raise ValueError(
                f"{cfg.run}: a model for {self.model.task} cannot generate text; expected causal-lm or seq2seq-lm"
            )
        self.tokenizer = load_tokenizer(cfg, trained)
        size = self.tokenizer.vocab_size  # added tokens may have no row; a prompt with one raises its own error
        if size > self.model.config.vocab_size:
            raise ValueError(
                f"tokenizer: got {size} tokens, but the model's vocabulary has {self.model.config.vocab_size}; give "
                "the tokenizer the model was trained with"
            )
        self._choose_languages()
        self.prefix = trained.run.prefix if isinstance(trained.run, Seq2SeqConfig) and not cfg.chat else ""

    def _choose_languages(self) -> None:
        """Set the source and target languages: those of the flags, else of the run that trained the model, else of the
        tokenizer's files."""
        cfg, run = self.cfg, self.run if isinstance(self.run, Seq2SeqConfig) else Seq2SeqConfig()
        source, target = cfg.source_lang or run.source_lang, cfg.target_lang or run.target_lang
        choose_languages(cfg, self.tokenizer, source, target, "here")
        if self.model.is_encoder_decoder:
            begin_texts(self.model, self.tokenizer)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        if self.cfg.chat:
            chats = [[{"role": "user", "content": text}] for text in texts]
            if (layout := self._layout_of_run()) is not None:
                return [layout.prompt(turns).tolist() for turns in chats]
            if getattr(self.tokenizer, "chat_template", None) is None:
                raise ValueError("chat: this tokenizer has no chat template; leave --chat out")
            texts = [self._apply_template(turns) for turns in chats]
        texts = [text if text.startswith(self.prefix) else self.prefix + text for text in texts]
        prompts = [self._encode(text) for text in texts]
        for text, ids in zip(texts, prompts, strict=True):
            if not ids:
                raise ValueError(f"prompt: {text!r} has no token; give a text to continue")
        return prompts

    def _layout_of_run(self) -> ChatTemplate | None:
        """How the run that trained the model wrote conversations, if it used no chat template of the tokenizer's."""
        run = self.run
        if isinstance(run, LMConfig) and run.text_column is not None:  # it read plain texts
            return None
        if isinstance(run, (LMConfig, DPOConfig)) and run.template in LAYOUTS:
            return ChatTemplate(self.tokenizer, run.template)
        return None

    def _apply_template(self, turns: list[dict[str, str]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            if not is_of_template(error):
                raise
            raise ValueError(f"chat: the tokenizer's chat template cannot be applied: {error}") from error

    def _encode(self, text: str) -> list[int]:
        """The tokens of a text; for a decoder, without the end token that some tokenizers (BERT's) add."""
        ids = list(self.tokenizer(text, add_special_tokens=not self.cfg.chat)["input_ids"])
        bare = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = {self.tokenizer.eos_token_id, self.tokenizer.sep_token_id}
        if not self.model.is_encoder_decoder and ids != bare and ids[-1] in ends and bare[-1:] != ids[-1:]:
            return ids[:-1]
        return ids

    def reads_objects(self, prompts: list[str]) -> bool:
        """Whether some prompt is a JSON object, and the model reads objects."""
        objects = any(prompt.lstrip().startswith("{") for prompt in prompts)
        return objects and getattr(self.model, "structured", False) and not self.cfg.chat

    def generate(self, prompts: list[str], number: int, streamer: Any = None) -> list[list[str]]:
        """The texts for each prompt of a batch. number: the index of its first prompt among all."""
        search = with_batch_seed(self.cfg.search(), number)
        if self.reads_objects(prompts):
            return write_answers(self.model, self.tokenizer, prompts, **search)
        context = self._context(len(prompts))
        return complete(self.model, self.tokenizer, self.encode(prompts), context=context, streamer=streamer, **search)

    def generate_all(self, prompts: list[str]) -> list[list[str]]:
        """The texts for all prompts, on every rank. Collective.

        Raises ValueError if only some are objects: ranks with different kinds would run different collectives.
        """
        if self.reads_objects(prompts):
            parse_objects(prompts)
            return map_over_ranks(
                len(prompts),
                self.cfg.batch_size,
                lambda numbers: self.generate([prompts[i] for i in numbers], numbers[0]),
            )
        tokens, context = self.encode(prompts), self._context(len(prompts))
        return complete_rows(
            self.model, self.tokenizer, tokens, self.cfg.batch_size, context=context, **self.cfg.search()
        )

    def _context(self, prompts: int) -> list[int] | None:
        """The tokens of each prompt that attend to each other in both directions; None: the model's default."""
        plain = plain_text_context(self.model, self.run, self.tokenizer)
        return None if plain is None else [plain] * prompts

    def show(self, prompt: str, number: int = 0) -> None:
        """Print the texts for a prompt, streamed if the search allows it."""
        one_text = self.cfg.num_beams == 1 and self.cfg.num_return_sequences == 1
        if one_text and not self.reads_objects([prompt]):
            skip = 1 if self.model.is_encoder_decoder else len(self.encode([prompt])[0])
            self.generate([prompt], number, TerminalStreamer(self.tokenizer, skip))
        else:
            print("\n".join(self.generate([prompt], number)[0]))

    def answer(self, lines: Iterator[str]) -> None:
        """Run an interactive session: Ctrl-C ends an answer, and an error in a prompt does not end the session."""
        for number, line in enumerate(lines):
            try:
                self.show(_as_utf8(line), number)
            except KeyboardInterrupt:
                print()
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)


def _is_interactive(cfg: GenerateConfig) -> bool:
    """Whether prompts are typed at a terminal."""
    return not cfg.prompt and not cfg.prompts_file and sys.stdin.isatty()


def _read_prompts(cfg: GenerateConfig) -> list[str]:
    if cfg.prompt:
        return [_as_utf8(prompt) for prompt in cfg.prompt]
    if cfg.prompts_file:
        path = Path(expanduser(cfg.prompts_file))
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompts_file: {path} cannot be read as UTF-8 text: {error}") from None
    elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError("prompt: none was given; with several processes, give texts or --prompts_file")
    else:
        text = _as_utf8(sys.stdin.read())
    place = cfg.prompts_file or "standard input"
    lines = text.split("\n")  # not splitlines(), which also splits at U+2028 and similar
    while lines and not lines[-1].strip():  # after the last prompt
        lines.pop()
    if not lines:
        raise ValueError(f"prompt: none was given ({place} has no line with text)")
    # Skipping one would shift prompts against texts.
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        more = f", like {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ValueError(f"prompt: line {empty[0]} of {place} is empty{more}; each line is a prompt, so remove it")
    return lines


def _as_utf8(text: str) -> str:
    """Decode an external text whose bytes are not valid in the locale, which may be C, as UTF-8.

    Raises:
        ValueError: the bytes are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # it contains surrogates for bytes that Python could not decode
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise ValueError(f"prompt: {text!r:.200} is not UTF-8; convert it, e.g. with iconv") from None
    return text


def _typed_lines() -> Iterator[str]:
    """Lines typed by the user, until the end of input or Ctrl-C."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line

"""generate: texts from prompts, streamed to a terminal or written to a file, on any number of ranks."""

import os
import sys
from collections.abc import Iterator
from os.path import expanduser
from pathlib import Path
from typing import Any, TypeGuard

import engine
from modelcenter.data.readers import read_file
from modelcenter.data.readers.compression import suffix_of
from modelcenter.data.schemas.conversations import TOOLS, Conversation, conversations, find_chat_columns
from modelcenter.data.tokenization.chat_templates import LAYOUTS, ChatTemplate, is_of_template
from modelcenter.training.config import DPOConfig, GenerateConfig, LMConfig, Seq2SeqConfig
from modelcenter.training.global_tokens import choose_global_tokens
from modelcenter.training.inference.chat import Chat
from modelcenter.training.inference.loading import load_model, load_tokenizer, start_ranks
from modelcenter.training.inference.output_file import check_output, write_rows
from modelcenter.training.inference.streaming import TerminalStreamer
from modelcenter.training.inference.text_generation import (
    complete,
    complete_ids,
    complete_rows,
    map_over_ranks,
    with_batch_seed,
)
from modelcenter.training.structured import parse_objects, write_answers
from modelcenter.training.target_tokens import begin_texts, choose_languages
from modelcenter.training.tasks.base import plain_text_context
from modelcenter.training.trained import TrainedModel

# A text to continue or, with --chat, a conversation to answer.
_Prompt = str | Conversation
# Files that hold one conversation in each row.
_TABLES = (".jsonl", ".json", ".parquet")


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
    if interactive and cfg.chat:
        generator.chat().run(map(_as_utf8, _typed_lines()))
    elif interactive:
        generator.answer(_typed_lines())
    elif len(prompts) == 1 and engine.data_size() == 1 and cfg.output is None:
        generator.show(prompts[0])
    else:
        _write(cfg, prompts, generator.generate_all(prompts))
    if not interactive:
        engine.synchronize()


def _write(cfg: GenerateConfig, prompts: list[_Prompt], texts: list[list[str]]) -> None:
    """Write the texts of all prompts, from rank 0."""
    if engine.rank() != 0:
        return
    if cfg.output is not None:
        given = [{"prompt": p} if isinstance(p, str) else {"messages": _without_tools(p)} for p in prompts]
        write_rows(cfg.output, [{**row, "texts": t} for row, t in zip(given, texts, strict=True)])
        return
    for of_prompt in texts:
        print("\n".join(of_prompt))


def _without_tools(turns: Conversation) -> Conversation:
    """A conversation without the tools in its first turn."""
    return [{name: value for name, value in turns[0].items() if name != TOOLS}, *turns[1:]]


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
        if cfg.chat:
            self._check_template()

    def _choose_languages(self) -> None:
        """Set the source and target languages: those of the flags, else of the run that trained the model, else of the
        tokenizer's files."""
        cfg, run = self.cfg, self.run if isinstance(self.run, Seq2SeqConfig) else Seq2SeqConfig()
        source, target = cfg.source_lang or run.source_lang, cfg.target_lang or run.target_lang
        choose_languages(cfg, self.tokenizer, source, target, "here")
        if self.model.is_encoder_decoder:
            begin_texts(self.model, self.tokenizer)
        choose_global_tokens(self.model, self.tokenizer, cfg.global_tokens)

    def encode(self, prompt: _Prompt) -> list[int]:
        """The tokens of a prompt."""
        if self.cfg.chat:
            return self._encode_chat(self._turns(prompt))
        assert isinstance(prompt, str)
        return self._encode(prompt if prompt.startswith(self.prefix) else self.prefix + prompt)

    def _turns(self, prompt: _Prompt) -> Conversation:
        """The conversation of a prompt, after the system prompt of the flags unless it has one of its own."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = self.cfg.system_prompt
        if system is None or turns[0]["role"] == "system":
            return turns
        tools = {TOOLS: turns[0][TOOLS]} if TOOLS in turns[0] else {}  # they are in the first turn, whichever it is
        return [{"role": "system", "content": system, **tools}, *_without_tools(turns)]

    def _encode_chat(self, turns: Conversation) -> list[int]:
        if (layout := self._layout_of_run()) is not None:
            return layout.prompt(turns).tolist()
        return self._encode(self._apply_template(turns))

    def _check_template(self) -> None:
        """Raise ValueError if conversations cannot be written, or the template leaves the system prompt out."""
        if self._layout_of_run() is not None:
            return
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("chat: this tokenizer has no chat template; leave --chat out")
        if self.cfg.system_prompt is None:
            return
        message = {"role": "user", "content": "a"}
        if self._apply_template(self._turns([message])) == self._apply_template([message]):
            raise ValueError(
                "system_prompt: the tokenizer's chat template does not write it; leave it out, and put it in a message"
            )

    def _layout_of_run(self) -> ChatTemplate | None:
        """How the run that trained the model wrote conversations, if it used no chat template of the tokenizer's."""
        run = self.run
        if isinstance(run, LMConfig) and run.text_column is not None:  # it read plain texts
            return None
        if isinstance(run, (LMConfig, DPOConfig)) and run.template in LAYOUTS:
            return ChatTemplate(self.tokenizer, run.template)
        return None

    def _apply_template(self, turns: Conversation) -> str:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if TOOLS in turns[0]:
            options["tools"] = turns[0][TOOLS]
        try:
            return self.tokenizer.apply_chat_template(_without_tools(turns), **options)
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
            ids = ids[:-1]
        if not ids:
            raise ValueError(f"prompt: {text!r} has no token; give a text to continue")
        return ids

    def reads_objects(self, prompts: list[_Prompt]) -> TypeGuard[list[str]]:
        """Whether some prompt is a JSON object, and the model reads objects; conversations are none."""
        objects = any(isinstance(prompt, str) and prompt.lstrip().startswith("{") for prompt in prompts)
        return objects and getattr(self.model, "structured", False) and not self.cfg.chat

    def generate(self, prompts: list[_Prompt], number: int, streamer: Any = None) -> list[list[str]]:
        """The texts for each prompt of a batch. number: the index of its first prompt among all."""
        if self.reads_objects(prompts):
            search = with_batch_seed(self.cfg.search(), number)
            return write_answers(self.model, self.tokenizer, prompts, **search)
        options = {**self._search(len(prompts), number), "streamer": streamer}
        return complete(self.model, self.tokenizer, [self.encode(prompt) for prompt in prompts], **options)

    def _search(self, prompts: int, number: int) -> dict[str, Any]:
        """Arguments of `complete` for a batch of that many texts. number: as of `generate`."""
        plain = plain_text_context(self.model, self.run, self.tokenizer)
        return {**with_batch_seed(self.cfg.search(), number), "context": None if plain is None else [plain] * prompts}

    def chat(self) -> Chat:
        """A conversation at the terminal."""

        def generate(prompt: list[int], number: int, **options: Any) -> list[list[int]]:
            return complete_ids(self.model, self.tokenizer, [prompt], **self._search(1, number), **options)[0]

        cfg = self.cfg
        return Chat(
            self.model,
            self.tokenizer,
            self._encode_chat,
            generate,
            streams=self._one_text,
            least=cfg.max_new_tokens or 1,
            system=cfg.system_prompt,
        )

    @property
    def _one_text(self) -> bool:
        """Whether each prompt has one text that grows token by token."""
        return self.cfg.num_beams == 1 and self.cfg.num_return_sequences == 1

    def generate_all(self, prompts: list[_Prompt]) -> list[list[str]]:
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
        tokens = [self.encode(prompt) for prompt in prompts]
        return complete_rows(self.model, self.tokenizer, tokens, self.cfg.batch_size, **self._search(len(prompts), 0))

    def show(self, prompt: _Prompt, number: int = 0) -> None:
        """Print the texts for a prompt, streamed if the search allows it."""
        if self._one_text and not self.reads_objects([prompt]):
            skip = 1 if self.model.is_encoder_decoder else len(self.encode(prompt))
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


def _read_conversations(path: Path) -> list[Conversation]:
    """The conversations in the rows of a file, each without an answer at its end.

    Raises:
        ValueError: the file cannot be read, or a row has no conversation or only an answer.
    """
    table = read_file(path)
    columns = find_chat_columns(table, {}, answered=False)
    if columns.messages is None and columns.prompt is None:
        raise ValueError(
            f"prompts_file: {path} has the columns {', '.join(table.columns)}, expected messages or prompt with --chat"
        )
    rows = conversations(table, columns)
    asked = [turns[:-1] if turns and turns[-1]["role"] == "assistant" else turns for turns in rows]
    if [] in asked:
        raise ValueError(f"prompts_file: {table.where(asked.index([]))}: the conversation has no message to answer")
    return asked


def _read_prompts(cfg: GenerateConfig) -> list[_Prompt]:
    if cfg.prompt:
        return [_as_utf8(prompt) for prompt in cfg.prompt]
    if cfg.prompts_file and cfg.chat and suffix_of(Path(cfg.prompts_file)) in _TABLES:
        return list(_read_conversations(Path(expanduser(cfg.prompts_file))))
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
    return [*lines]


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
    """Lines typed by the user, until the end of input or Ctrl-C. Several lines that are pasted at once are one."""
    _use_readline()
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line


def _use_readline() -> None:
    """Let `input` edit lines, if this Python was built with readline.

    A terminal itself drops what a line has beyond 4,095 bytes without a word, and ends lines at pasted line breaks.
    """
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
    # In the locale C, bytes beyond ASCII would be keys, and shown as numbers.
    readline.parse_and_bind("set convert-meta off")
    readline.parse_and_bind("set output-meta on")

"""Texts from texts by an encoder-decoder: summaries, translations, sentences from data."""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.batching.collate import pack_pairs
from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.schemas.text_pairs import PairColumns, column_texts, find_pair_columns
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens, tokenize, tokenize_targets
from modelcenter.models.base import Model
from modelcenter.training.config import Seq2SeqConfig, TrainConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.inference.text_generation import complete, map_over_ranks, with_batch_seed
from modelcenter.training.metrics import Generation, Score
from modelcenter.training.tasks.base import (
    LossBatches,
    Task,
    TokenExamples,
    decoder_token,
    group_column,
    has_several_answers,
    inference_columns,
    inference_form,
    rank_batches,
    read_splits,
    shortened,
)

log = logging.getLogger("modelcenter")

_SEARCH = ("max_new_tokens", "num_beams", "length_penalty", "no_repeat_ngram_size")
_USE = ("source_lang", "target_lang", "prefix", "metrics", "language")


@dataclass(frozen=True)
class SourceTargetExamples(TokenExamples):
    """Rows of a text to read, `tokens`, and, where it is known, the text to write (target None: it is not).

    first: int64 (rows + 1,), the first target of each row, where rows have several right ones: training takes them in
    turn, epoch by epoch; None: each row has one.
    """

    columns: PairColumns
    target: Tokens | None = None
    first: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Of both sides; of several targets the longest counts, as a batch of any epoch has to fit."""
        if self.target is None:
            return self.tokens.lengths
        longest = self.target.lengths
        return self.tokens.lengths + (longest if self.first is None else np.maximum.reduceat(longest, self.first[:-1]))

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        if self.target is None:
            return super().batch(rows)
        return pack_pairs(self.tokens, self.target, rows, self.target_rows(rows, epoch))

    def target_rows(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """The targets that rows have in an epoch."""
        return rows if self.first is None else self.first[rows] + epoch % np.diff(self.first)[rows]

    def show(self, row: int, tokenizer: Any) -> str:
        text = super().show(row, tokenizer)
        if self.target is None:
            return text
        (target,) = self.target_rows(np.array([row]), 0)
        return f"{text} -> {_marked(tokenizer.decode(self.target.row(target)))}"

    def references(self) -> list[list[str]]:
        """All texts that are right for each row."""
        if self.first is None:
            return [[text.strip()] for text in self.texts("target")]
        return self.table.columns["answers"]

    def texts(self, role: str) -> list[str]:
        """The sources or the targets, as they are in the data."""
        column, lang = getattr(self.columns, role), getattr(self.columns, f"{role}_lang")
        return [text or "" for text in column_texts(self.table, column, lang)]


class LossAlone:
    """No metric beside the loss."""

    main = "loss"

    def result(self) -> dict[str, float | None]:
        return {}


class SequenceToSequence(Task):
    """Texts from texts. Flags: Seq2SeqConfig."""

    name: ClassVar[str] = "seq2seq"
    head: ClassVar[str] = "seq2seq-lm"
    cfg: Seq2SeqConfig
    train: Table
    columns: PairColumns
    group: str | None
    search: dict[str, Any]  # arguments of model.generate in evaluations
    model: Model | None = None
    tokenizer: Any = None
    written: list[str] | None = None  # by the last evaluation

    def __init__(self, cfg: Seq2SeqConfig):
        """Read the data, find its columns, leave out rows that lack a text.

        Raises:
            ValueError: no such data or column, no row with both texts, a metric whose package is missing.
        """
        self.cfg = cfg
        cfg.max_new_tokens = cfg.max_new_tokens or cfg.max_target_length
        self.search = {name: getattr(cfg, name) for name in _SEARCH}
        self.metrics()
        train, held = read_splits(cfg)
        self.group = cfg.group_column = group_column(train, cfg.group_column, cfg.form)
        self.columns = find_pair_columns(train, cfg.source_column, cfg.target_column, cfg.source_lang, cfg.target_lang)
        # The columns that were found count as given from here on: in config.yaml, and for the evaluation data.
        cfg.source_column, cfg.target_column = self.columns.source, self.columns.target
        self.train, self.eval = whole_rows(train, self.columns), None
        if held is not None:
            find_pair_columns(held, *dataclasses.astuple(self.columns))
            check_columns(held, {"group": self.group})
            self.eval = whole_rows(held, self.columns)

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        pad, end = decoder_token(tokenizer, "pad", "starts"), decoder_token(tokenizer, "eos", "ends")
        return {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}

    def attach(self, model: Model) -> None:
        self.model = model

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[SourceTargetExamples, SourceTargetExamples | None]:
        return self._rows(self.train, tokenizer, max_length), self.eval and self._rows(self.eval, tokenizer, max_length)

    def _rows(self, table: Table, tokenizer: Any, max_length: int) -> SourceTargetExamples:
        self.tokenizer = tokenizer
        check_end(tokenizer, self.model)
        columns, prefix, most = self.columns, self.cfg.prefix, self.cfg.max_target_length
        texts = [prefix + (text or "") for text in column_texts(table, columns.source, columns.source_lang)]
        source = tokenize(tokenizer, texts, max_length=max_length)
        if not source.lengths.all():
            empty = int(np.flatnonzero(source.lengths == 0)[0])
            raise ValueError(f"{table.where(empty)}: {texts[empty]!r:.60} has no token, expected a text to read")
        if columns.target is None:
            return SourceTargetExamples(table, source, columns)
        targets = [text or "" for text in column_texts(table, columns.target, columns.target_lang)]
        first = None
        if has_several_answers(table, self.cfg.form):
            answers = table.columns["answers"]
            first = np.concatenate(([0], np.cumsum(list(map(len, answers)))))
            targets = [text for several in answers for text in several]
        target = tokenize_targets(tokenizer, targets, max_length=most)
        if target.truncated and engine.rank() == 0:
            log.warning("%s: %d targets cut at max_target_length %d", table.name, target.truncated, most)
        return SourceTargetExamples(table, source, columns, target, first)

    def about_columns(self) -> str:
        return self.columns.shown() + (f", prefix {self.cfg.prefix!r}" if self.cfg.prefix else "")

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        if not self.cfg.eval_generate:
            return LossAlone()
        return Generation(self.cfg.metrics or (), self.cfg.language)

    def metric_names(self, examples: Any) -> list[str]:
        grouped = self.cfg.eval_generate and self.group is not None and "accuracy" in (self.cfg.metrics or ())
        return super().metric_names(examples) + (["exact_match"] if grouped else [])

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """The loss; with eval_generate also the metrics of what the model writes for each row."""
        found = evaluate(model, LossBatches(examples, rank_batches(examples, batch_size)))
        if not self.cfg.eval_generate:
            return found
        self.written = [several[0] for several in self.write(model, examples, batch_size, self.search)]
        metrics: Any = self.metrics()
        # All ranks have all texts by now: each counts some of them.
        mine = slice(engine.rank(), None, engine.world_size())
        groups = None if self.group is None else [str(value) for value in examples.table.columns[self.group][mine]]
        metrics.update(self.written[mine], examples.references()[mine], groups)
        return {**found, **metrics.result()}

    def write(
        self, model: Model, examples: SourceTargetExamples, batch_size: int, search: dict[str, Any]
    ) -> list[list[str]]:
        """What the model writes for each row, in order, on every rank. Collective."""
        order = np.argsort(-examples.tokens.lengths, kind="stable")  # rows of similar length together

        def work(numbers: list[int]) -> list[list[str]]:
            sources: Any = [examples.tokens.row(int(order[i])) for i in numbers]
            return complete(model, self.tokenizer, sources, **with_batch_seed(search, numbers[0]))

        texts = map_over_ranks(len(order), batch_size, work)
        placed = dict(zip(order.tolist(), texts, strict=True))
        return [[text.strip() for text in placed[row]] for row in range(len(order))]

    def samples(self, model: Model, tokenizer: Any, examples: Any) -> list[dict[str, Any]]:
        """What the last evaluation wrote for its first rows."""
        if self.written is None:
            return []
        count = min(self.cfg.eval_samples, len(examples))
        texts = zip(examples.texts("source"), self.written, examples.texts("target"), strict=True)
        return [
            {"where": examples.where(row), "source": source, "prediction": written, "reference": target}
            for row, (source, written, target) in zip(range(count), texts, strict=False)
        ]

    # -- use of a trained model --------------------------------------------------------------------------------------

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        task = cls.__new__(cls)
        own = {name: value for name in _USE if (value := getattr(cfg, name)) is not None}
        own |= {"eval_generate": True} if cfg.metrics is not None else {}
        form = inference_form(cfg, run)
        task.cfg = dataclasses.replace(run if isinstance(run, Seq2SeqConfig) else Seq2SeqConfig(form=form), **own)
        task.search = {**cfg.search(run), "num_return_sequences": 1}
        given = inference_columns(cfg, run, table, Seq2SeqConfig.roles, needed="source")
        task.group = group_column(table, given.pop("group"), form)
        if not labelled:
            given["target"] = None
        langs = {"source_lang": task.cfg.source_lang, "target_lang": task.cfg.target_lang}
        task.columns = find_pair_columns(table, **given, **langs, labelled=labelled)
        task.train = whole_rows(table, task.columns) if labelled else table
        task.eval = None
        if labelled:
            task.metrics()
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> SourceTargetExamples:
        self.attach(model)
        return self._rows(self.train, tokenizer, max_length)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """source and prediction of each row; with num_return_sequences above 1 predictions."""
        search = {**self.search, "num_return_sequences": cfg.num_return_sequences}
        texts = self.write(model, examples, cfg.batch_size, search)
        if engine.rank() != 0:
            return iter(())
        names = ("prediction", "predictions")
        return (
            {"source": source, **({names[0]: said[0]} if len(said) == 1 else {names[1]: said})}
            for source, said in zip(examples.texts("source"), texts, strict=True)
        )


def whole_rows(table: Table, columns: PairColumns) -> Table:
    """The rows that have a source and a target; how many have not is said.

    Raises:
        ValueError: there are none.
    """
    assert columns.target is not None
    sources = column_texts(table, columns.source, columns.source_lang)
    targets = column_texts(table, columns.target, columns.target_lang)
    good = np.array([bool((a or "").strip() and (b or "").strip()) for a, b in zip(sources, targets, strict=True)])
    if good.all():
        return table
    lacking = np.flatnonzero(~good)
    if not good.any():
        raise ValueError(f"{table.name}: no row has both texts ({columns.shown()}); first: {table.where(lacking[0])}")
    if engine.rank() == 0:
        log.warning(
            "%s: %d of %d rows have no source or no target and are left out (first: %s)",
            *(table.name, len(lacking), len(table), table.where(lacking[0])),
        )
    return table.take(np.flatnonzero(good))


def check_end(tokenizer: Any, model: Model | None) -> None:
    """Raise ValueError for a tokenizer that ends texts otherwise than the model."""
    config: Any = None if model is None else model.config
    named = (
        None if model is None else model.generation_config.get("eos_token_id", getattr(config, "eos_token_id", None))
    )
    ends = [] if named is None else [named] if isinstance(named, int) else list(named)
    if tokenizer.eos_token_id is None or (ends and tokenizer.eos_token_id not in ends):
        shown = "none" if tokenizer.eos_token_id is None else f"{tokenizer.eos_token_id} ({tokenizer.eos_token!r})"
        models = " or ".join(map(str, ends)) or "not known"
        raise ValueError(
            f"tokenizer: its token that ends a text is {shown}, the model's {models}: they do not belong together; "
            "give the tokenizer of the model"
        )


def _marked(text: str) -> str:
    """A text that is trained on: green on a terminal, else between marks."""
    start, end = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("⟦", "⟧")
    return f"{start}{shortened(text)}{end}".replace("\n", "\\n")

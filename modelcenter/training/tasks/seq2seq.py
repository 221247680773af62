"""Sequence-to-sequence tasks for encoder-decoders: summarisation, translation, data to text."""

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.batching.collate import pack_pairs
from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.schemas.text_pairs import PairColumns, column_texts, find_pair_columns, translation_keys
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens, tokenize, tokenize_targets
from modelcenter.models.base import Model
from modelcenter.training.config import Seq2SeqConfig, TrainConfig
from modelcenter.training.config.seq2seq import EVALUATION_SEARCH
from modelcenter.training.distillation.loss import Distillation
from modelcenter.training.global_tokens import choose_global_tokens
from modelcenter.training.inference.text_generation import complete_rows
from modelcenter.training.metrics import Generation, LossOnly, Score
from modelcenter.training.target_tokens import begin_texts, check_end, choose_languages
from modelcenter.training.tasks.base import Task, decoder_token
from modelcenter.training.tasks.column_roles import (
    group_column,
    groups_of,
    has_several_answers,
    inference_columns,
    inference_form,
)
from modelcenter.training.tasks.examples import Batches, TokenExamples, rank_batches
from modelcenter.training.tasks.preview import highlighted, on_one_line, shortened
from modelcenter.training.tasks.splits import read_splits

log = logging.getLogger("modelcenter")

_INFERENCE_FLAGS = ("source_lang", "target_lang", "prefix", "global_tokens", "metrics", "language")


@dataclass(frozen=True)
class SourceTargetExamples(TokenExamples):
    """Source texts (`tokens`) and target texts; target None: unknown.

    first: int64 (rows + 1,), the first target of each row, if rows may have several right ones, which epochs use in
    turn; None: each row has one.
    """

    columns: PairColumns
    target: Tokens | None = None
    first: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of both sides; the longest of several targets counts, because batches must fit in any epoch."""
        if self.target is None:
            return self.tokens.lengths
        longest = self.target.lengths
        return self.tokens.lengths + (longest if self.first is None else np.maximum.reduceat(longest, self.first[:-1]))

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        if self.target is None:
            return super().batch(rows)
        return pack_pairs(self.tokens, self.target, rows, self.target_rows(rows, epoch))

    def target_rows(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """The numbers of the targets that an epoch uses for rows."""
        return rows if self.first is None else self.first[rows] + epoch % np.diff(self.first)[rows]

    def show(self, row: int, tokenizer: Any) -> str:
        text = super().show(row, tokenizer)
        if self.target is None:
            return text
        (target,) = self.target_rows(np.array([row]), 0)
        return f"{text} -> {on_one_line(highlighted(shortened(tokenizer.decode(self.target.row(target)))))}"

    def references(self) -> list[list[str]]:
        """All right texts of each row."""
        if self.first is None:
            return [[text.strip()] for text in self.texts("target")]
        return self.table.columns["answers"]

    def texts(self, role: str) -> list[str]:
        """The sources or the targets, as in the data."""
        column, lang = getattr(self.columns, role), getattr(self.columns, f"{role}_lang")
        return [text or "" for text in column_texts(self.table, column, lang)]


@dataclass(eq=False, kw_only=True, repr=False)
class SequenceToSequence(Task):
    """Texts from texts. Flags: Seq2SeqConfig.

    Attributes:
        table: rows for training or inference. group: column of the groups of rows that are judged together. search:
            arguments of model.generate. given: at inference, the flags of the verb. generated: the texts of the last
            evaluation.
    """

    name: ClassVar[str] = "seq2seq"
    head: ClassVar[str] = "seq2seq-lm"
    cfg: Seq2SeqConfig
    table: Table
    columns: PairColumns
    search: dict[str, Any]
    group: str | None = None
    given: Any = None
    eval_table: Table | None = None
    model: Model | None = None
    tokenizer: Any = None
    generated: list[str] | None = None

    @classmethod
    def from_flags(cls, cfg: Seq2SeqConfig) -> Self:
        """See Task; rows that lack a text are left out.

        Raises:
            ValueError: also if no row has both texts, or the package of a metric is missing.
        """
        cfg.max_new_tokens = cfg.max_new_tokens or cfg.max_target_length
        _metrics(cfg)
        table, eval_table = read_splits(cfg)
        group = cfg.group_column = group_column(table, cfg.group_column, cfg.form)
        columns = find_pair_columns(table, cfg.source_column, cfg.target_column, cfg.source_lang, cfg.target_lang)
        cfg.set_role_columns(columns.roles(cfg.source_lang, cfg.target_lang))
        table = rows_with_both_texts(table, columns)
        if eval_table is not None:
            find_pair_columns(eval_table, *dataclasses.astuple(columns))
            check_columns(eval_table, {"group": group})
            eval_table = rows_with_both_texts(eval_table, columns)
            groups_of(eval_table, group)  # only evaluations need it, but errors should come before the first epoch
        search = {name: getattr(cfg, name) for name in EVALUATION_SEARCH}
        return cls(cfg=cfg, table=table, columns=columns, search=search, group=group, eval_table=eval_table)

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        pad, end = decoder_token(tokenizer, "pad", "starts"), decoder_token(tokenizer, "eos", "ends")
        return {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}

    def on_tokenizer_loaded(self, tokenizer: Any) -> None:
        self._choose_languages(self.cfg, tokenizer)

    def _choose_languages(self, given: Any, tokenizer: Any) -> None:
        """Set the languages of the tokenizer. given: the flags of a run or of a verb."""
        self.tokenizer, columns, cfg = tokenizer, self.columns, self.cfg
        alone = cfg.source_lang not in (columns.source, columns.source_lang)
        why_idle = f"because column {columns.source!r} has only texts" if alone else None
        choose_languages(given, tokenizer, cfg.source_lang, cfg.target_lang, why_idle)

    def on_model_built(self, model: Model) -> None:
        self.model = model
        check_end(self.tokenizer, model)
        begin_texts(model, self.tokenizer)
        choose_global_tokens(model, self.tokenizer, self.cfg.global_tokens)

    def learn_from(self, distillation: Distillation) -> None:
        super().learn_from(distillation)
        choose_global_tokens(distillation.teacher.model, self.tokenizer, None)

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[SourceTargetExamples, SourceTargetExamples | None]:
        train_set = self._examples(self.table, tokenizer, max_length)
        if self.eval_table is None:
            return train_set, None
        return train_set, self._examples(self.eval_table, tokenizer, max_length)

    def _examples(self, table: Table, tokenizer: Any, max_length: int) -> SourceTargetExamples:
        columns = self.columns
        texts = [self.cfg.prefix + (text or "") for text in column_texts(table, columns.source, columns.source_lang)]
        source = tokenize(tokenizer, texts, max_length=max_length)
        if not source.lengths.all():
            empty = int(np.flatnonzero(source.lengths == 0)[0])
            raise ValueError(f"{table.where(empty)}: {texts[empty]!r:.60} has no token, expected a text to read")
        if columns.target is None:
            return SourceTargetExamples(table, source, columns)
        target, first = self._targets(table, tokenizer, columns.target)
        return SourceTargetExamples(table, source, columns, target, first)

    def _targets(self, table: Table, tokenizer: Any, column: str) -> tuple[Tokens, np.ndarray | None]:
        """`target` and `first` of SourceTargetExamples."""
        targets = [text or "" for text in column_texts(table, column, self.columns.target_lang)]
        first, longest = None, self.cfg.max_target_length
        if has_several_answers(table, self.cfg.form):
            answers = table.columns["answers"]
            first = np.concatenate(([0], np.cumsum(list(map(len, answers)))))
            targets = [text for of_row in answers for text in of_row]
        tokens = tokenize_targets(tokenizer, targets, max_length=longest)
        if tokens.truncated and engine.rank() == 0:
            log.warning("%s: %d targets truncated at max_target_length %d", table.name, tokens.truncated, longest)
        return tokens, first

    def describe_columns(self) -> str:
        return self.columns.shown() + (f", prefix {self.cfg.prefix!r}" if self.cfg.prefix else "")

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return _metrics(self.cfg)

    def metric_names(self, examples: Any) -> list[str]:
        grouped = self.cfg.eval_generate and self.group is not None and "accuracy" in (self.cfg.metrics or ())
        return super().metric_names(examples) + (["exact_match"] if grouped else [])

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """The loss; with eval_generate also the metrics of generated texts."""
        loss = self.run_evaluation(model, Batches(examples, rank_batches(examples, batch_size), output_logits=False))
        if not self.cfg.eval_generate:
            return loss
        self.generated = [texts[0] for texts in self.generate_texts(model, examples, batch_size, self.search)]
        metrics: Any = self.metrics()
        # All ranks have all texts: each adds some of them to its metrics.
        share = slice(engine.rank(), None, engine.world_size())
        groups = groups_of(examples.table, self.group)
        of_share = None if groups is None else groups[share].tolist()
        metrics.update(self.generated[share], examples.references()[share], of_share)
        return {**loss, **metrics.result()}

    def generate_texts(
        self, model: Model, examples: SourceTargetExamples, batch_size: int, search: dict[str, Any]
    ) -> list[list[str]]:
        """The num_return_sequences texts generated for each row, in order, on every rank. Collective."""
        sources = [examples.tokens.row(row) for row in range(len(examples))]
        texts = complete_rows(model, self.tokenizer, sources, batch_size, **search)
        return [[text.strip() for text in of_row] for of_row in texts]

    def samples(self, model: Model, tokenizer: Any, examples: Any) -> list[dict[str, Any]]:
        """The texts of the last evaluation for its first rows."""
        if self.generated is None:
            return []
        count = min(self.cfg.eval_samples, len(examples))
        texts = zip(examples.texts("source"), self.generated, examples.texts("target"), strict=True)
        return [
            {"where": examples.where(row), "source": source, "prediction": prediction, "reference": target}
            for row, (source, prediction, target) in zip(range(count), texts, strict=False)
        ]

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = {name: value for name in _INFERENCE_FLAGS if (value := getattr(cfg, name)) is not None}
        given |= {"eval_generate": True} if cfg.metrics is not None else {}
        form = inference_form(cfg, run)
        flags = dataclasses.replace(run if isinstance(run, Seq2SeqConfig) else Seq2SeqConfig(form=form), **given)
        known = (*table.columns, *translation_keys(table))
        roles = inference_columns(cfg, run, table, Seq2SeqConfig.roles, needed="source", known=known)
        group = group_column(table, roles.pop("group"), form)
        if not labelled:
            roles["target"] = None
        langs = {"source_lang": flags.source_lang, "target_lang": flags.target_lang}
        columns = find_pair_columns(table, **roles, **langs, labelled=labelled)
        if labelled:
            table = rows_with_both_texts(table, columns)
            groups_of(table, group)
            _metrics(flags)
        search = {**cfg.search(run), "num_return_sequences": 1}
        return cls(cfg=flags, given=cfg, table=table, columns=columns, search=search, group=group)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> SourceTargetExamples:
        self._choose_languages(self.given, tokenizer)
        self.on_model_built(model)
        return self._examples(self.table, tokenizer, max_length)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """source and prediction of each row; if num_return_sequences is above 1, predictions."""
        search = {**self.search, "num_return_sequences": cfg.num_return_sequences}
        predictions = self.generate_texts(model, examples, cfg.batch_size, search)
        if engine.rank() != 0:
            return iter(())
        return (
            {"source": source, **({"prediction": texts[0]} if len(texts) == 1 else {"predictions": texts})}
            for source, texts in zip(examples.texts("source"), predictions, strict=True)
        )


def _metrics(cfg: Seq2SeqConfig) -> Score:
    """The metrics of the flags. Raises ValueError if the package of one is missing."""
    return Generation(cfg.metrics or (), cfg.language) if cfg.eval_generate else LossOnly()


def rows_with_both_texts(table: Table, columns: PairColumns) -> Table:
    """The rows that have a source and a target; the number of others is logged.

    Raises:
        ValueError: no row has both.
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

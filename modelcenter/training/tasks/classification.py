"""Text classification: one label, several or scores; one text or a pair."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

import engine
from modelcenter.data.batching.collate import pack
from modelcenter.data.schemas.class_names import renumbering, reordered_ids_to_names
from modelcenter.data.schemas.columns import Columns, check_columns, find_columns, join_labels
from modelcenter.data.schemas.labels import Labels, find_labels
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens, tokenize
from modelcenter.models.base import Model
from modelcenter.training.config import ClassificationConfig, TrainConfig
from modelcenter.training.evaluation import evaluate, logits_of
from modelcenter.training.metrics import Metrics, MultiLabel, Regression, SingleLabel, sum_over_ranks
from modelcenter.training.tasks.base import (
    Batches,
    Task,
    TokenExamples,
    group_column,
    groups_of,
    inference_columns,
    inference_form,
    rank_batches,
    read_splits,
    strings,
)
from modelcenter.training.tasks.class_weights import WeightedClasses, weights_of

log = logging.getLogger("modelcenter")


@dataclass(frozen=True)
class LabelledExamples(TokenExamples):
    """Rows of text with their labels (targets None: none were read). groups: int64 (rows,), which rows are judged as
    one; None: each by itself."""

    labels: Labels
    targets: np.ndarray | None = None
    groups: np.ndarray | None = None

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return pack(self.tokens, rows, self.targets)

    def show(self, row: int, tokenizer: Any) -> str:
        return f"[{label_text(self.labels, self.targets, row)}] {super().show(row, tokenizer)}"


class Classification(Task):
    """Text classification. Flags: ClassificationConfig."""

    name: ClassVar[str] = "classification"
    head: ClassVar[str] = "sequence-classification"
    labels: Labels
    group: str | None

    def __init__(self, cfg: ClassificationConfig):
        """Read the data, find its columns and labels.

        Raises:
            ValueError: no such data, column or label; see data.sources, data.columns and data.labels.
        """
        self.train, self.eval = read_splits(cfg)
        self.columns = find_columns(self.train, cfg.text_column, cfg.text_pair_column, cfg.label_column)
        self.group = cfg.group_column = group_column(self.train, cfg.group_column, cfg.form)
        # The columns that were found count as given from here on: in config.yaml, and for the evaluation data.
        cfg.text_column, cfg.text_pair_column, cfg.label_column = _names(self.columns)
        assert self.columns.label is not None
        check_texts(self.train, self.columns)
        values, where = self.train.columns[self.columns.label], self.train.where
        self.labels = find_labels(
            values,
            where,
            problem_type=cfg.problem_type,
            num_labels=cfg.num_labels,
            names=self.train.classes.get(self.columns.label),
        )
        self.train_targets = self.labels.encode(values, where)
        if self.group is not None and self.labels.problem_type != "single_label_classification":
            raise ValueError(f"group_column: for rows with one label each, not for {self.labels.problem_type}")
        if cfg.class_weights and self.labels.problem_type != "single_label_classification":
            raise ValueError(f"class_weights: for rows with one label each, not for {self.labels.problem_type}")
        self.class_weights, self.smoothing = cfg.class_weights, cfg.label_smoothing
        self.eval_targets = None
        if self.eval is not None:
            find_columns(self.eval, *_names(self.columns))
            check_columns(self.eval, {"group": self.group})
            self.eval_targets = self.labels.encode(
                named_values(self.eval, self.columns.label, self.labels.names), self.eval.where
            )

    def number_as(self, names: Sequence[str]) -> None:
        found = renumbering(self.labels.names, names)
        if found is None or self.labels.problem_type == "regression":
            return
        order, numbers = found
        multi = self.labels.problem_type == "multi_label_classification"

        def renumbered(targets: np.ndarray) -> np.ndarray:
            return targets[:, np.argsort(numbers)] if multi else numbers[targets]

        self.labels = Labels(self.labels.problem_type, order)
        self.train_targets = renumbered(self.train_targets)
        self.eval_targets = None if self.eval_targets is None else renumbered(self.eval_targets)

    def model_options(self) -> dict[str, Any]:
        names = dict(enumerate(self.labels.names))
        return {"num_labels": len(names), "id2label": names, "problem_type": self.labels.problem_type}

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[LabelledExamples, LabelledExamples | None]:
        def examples(table: Table, targets: np.ndarray | None) -> LabelledExamples:
            tokens = tokenize_rows(tokenizer, table, self.columns, max_length)
            return LabelledExamples(table, tokens, self.labels, targets, groups_of(table, self.group))

        return examples(self.train, self.train_targets), self.eval and examples(self.eval, self.eval_targets)

    def attach(self, model: Model) -> None:
        if self.class_weights:
            weights = weights_of(self.class_weights, self.labels.names, self.train_targets)
            self.loss_fn = WeightedClasses(weights, self.smoothing)

    def prepare_model(self, model: Model, tokenizer: Any) -> None:
        """Name a token that pads, where none is named: transformers needs one to find where the rows of a batch end, of
        which decoders read the last token that is not padding. The end of a text will do, where texts do not bring
        it."""
        if tokenizer.pad_token is None and tokenizer.eos_token is not None:
            if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
                return
            tokenizer.pad_token = tokenizer.eos_token
        config: Any = model.config
        known = hasattr(config, "pad_token_id")
        if (config.pad_token_id if known else config.extra.get("pad_token_id")) is None:
            if known:
                config.pad_token_id = tokenizer.pad_token_id
            else:
                config.extra = {**config.extra, "pad_token_id": tokenizer.pad_token_id}

    def metrics(self, device: torch.device | str = "cpu") -> Metrics:
        """The metrics that suit the kind of label."""
        if self.labels.problem_type == "regression":
            return Regression(len(self.labels.names))
        kind = MultiLabel if self.labels.problem_type == "multi_label_classification" else SingleLabel
        return kind(len(self.labels.names), device)

    def metric_names(self, examples: Any) -> list[str]:
        return super().metric_names(examples) + ([] if examples.groups is None else ["exact_match"])

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """Also exact_match, where rows have groups: those that are right in all their rows."""
        if examples.groups is None:
            return super().evaluate(model, examples, batch_size)
        batches = Batches(examples, rank_batches(examples, batch_size))
        turns = iter(batches.rows)
        wrong = torch.zeros(int(examples.groups.max()) + 1, dtype=torch.int64)

        def feed(metrics: Any, out: Any, batch: dict[str, Any]) -> None:
            self.feed(metrics, out, batch)
            missed = (out.logits.argmax(-1) != batch["labels"]).cpu().numpy()
            wrong[torch.from_numpy(examples.groups[next(turns)][missed])] = 1

        found = evaluate(model, batches, self.metrics(model.device), feed)
        return {**found, "exact_match": (sum_over_ranks(wrong) == 0).double().mean().item()}

    def about_columns(self) -> str:
        pair = f" and {self.columns.text_pair!r}" if self.columns.text_pair is not None else ""
        names = ", ".join(self.labels.names[:4]) + (", ..." if len(self.labels.names) > 4 else "")
        count = "" if self.labels.problem_type == "regression" else f" with {len(self.labels.names)} classes: {names}"
        return f"text {self.columns.text!r}{pair}, label {self.columns.label!r}{count}"

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        task = cls.__new__(cls)
        if labelled:
            join_labels(table, getattr(run, "label_column", None))
        given = inference_columns(cfg, run, table, ClassificationConfig.roles, needed="text")
        task.group = group_column(table, given.pop("group"), inference_form(cfg, run))
        if not labelled:
            given["label"] = None
        task.train, task.eval = table, None
        task.columns = find_columns(table, **given, labelled=labelled)
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> LabelledExamples:
        names = [(model.config.id2label or {}).get(i, f"LABEL_{i}") for i in range(model.config.num_labels)]
        kind = model.config.problem_type or ("regression" if len(names) == 1 else None)
        if self.columns.label is None:
            self.labels, targets = Labels(kind or "single_label_classification", tuple(names)), None
        else:
            values, where = named_values(self.train, self.columns.label, names), self.train.where
            self.labels = find_labels(values, where, problem_type=kind, num_labels=len(names), names=names)
            targets = self.labels.encode(values, where, known_from="the model")
        tokens = tokenize_rows(tokenizer, self.train, self.columns, max_length)
        return LabelledExamples(self.train, tokens, self.labels, targets, groups_of(self.train, self.group))

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """label, score and probabilities of each row (several labels: labels; regression: score)."""
        rows = rank_batches(examples, cfg.batch_size)
        places = [torch.from_numpy(part) for part in rows]
        logits = logits_of(model, Batches(examples, rows), places, len(examples), model.config.num_labels)
        return predictions(logits, self.labels) if engine.rank() == 0 else iter(())


def predictions(logits: Tensor, labels: Labels) -> Iterator[dict[str, Any]]:
    """What is said of each row. logits (rows, classes), fp32."""
    names = labels.names
    if labels.problem_type == "regression":
        for values in logits.tolist():
            yield {"score": values[0]} if len(values) == 1 else {"scores": dict(zip(names, values, strict=True))}
        return
    multi = labels.problem_type == "multi_label_classification"
    for values in (logits.sigmoid() if multi else logits.softmax(-1)).tolist():
        chances = dict(zip(names, (round(v, 6) for v in values), strict=True))
        if multi:
            yield {"labels": [n for n, v in zip(names, values, strict=True) if v > 0.5], "probabilities": chances}
        else:
            best = max(range(len(values)), key=values.__getitem__)
            yield {"label": names[best], "score": chances[names[best]], "probabilities": chances}


def named_values(table: Table, column: str, names: Sequence[str]) -> Sequence[Any]:
    """The labels of a table, by name where it numbers the classes otherwise than the model does."""
    return reordered_ids_to_names(table.columns[column], table.classes.get(column), names)


def check_texts(table: Table, columns: Columns) -> None:
    """Tell, once, which rows have nothing to read: they are trained on, as the labels say something of them.

    Raises:
        ValueError: no row has something to read.
    """
    texts = [table.columns[name] for name in (columns.text, columns.text_pair) if name is not None]
    blank = [i for i, row in enumerate(zip(*texts, strict=True)) if all(v == "" or str(v).isspace() for v in row)]
    if len(blank) == len(table):
        raise ValueError(f"{table.name}: column {columns.text!r} holds no text")
    if blank and engine.rank() == 0:
        log.warning("%s: %d rows have an empty text (first: %s)", table.name, len(blank), table.where(blank[0]))


def tokenize_rows(tokenizer: Any, table: Table, columns: Columns, max_length: int) -> Tokens:
    """Tokens of the text (and second text) of every row. Raises ValueError: a row without text, or of no token."""
    pairs = None if columns.text_pair is None else strings(table, columns.text_pair)
    tokens = tokenize(tokenizer, strings(table, columns.text), pairs, max_length=max_length)
    if not tokens.lengths.all():
        empty = int(np.argmin(tokens.lengths))
        raise ValueError(
            f"{table.where(empty)}: {table.columns[columns.text][empty]!r:.60} has no token, and this tokenizer adds "
            "none of its own: there is nothing to read; remove the row"
        )
    return tokens


def label_text(labels: Labels, targets: np.ndarray | None, row: int) -> str:
    """The target of a row, in words: "positive", "a, b" or "3.5"."""
    if targets is None:
        return "no label"
    if labels.problem_type == "single_label_classification":
        return labels.names[targets[row]]
    if labels.problem_type == "multi_label_classification":
        return (
            ", ".join(name for name, on in zip(labels.names, targets[row], strict=True) if on) or "none of the labels"
        )
    return ", ".join(f"{value:g}" for value in np.atleast_1d(targets[row]))


def _names(columns: Columns) -> tuple[str, str | None, str | None]:
    return columns.text, columns.text_pair, columns.label

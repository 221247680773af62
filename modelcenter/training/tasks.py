"""Tasks: what a data set is made of, what the model is asked for and how it is judged. One class each, for the one
loop.

A task is made from its flags and has read its data by then, so that wrong data is an error before anything else starts.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from modelcenter.data import sources
from modelcenter.data.collate import pack
from modelcenter.data.columns import Columns, find_columns
from modelcenter.data.labels import Labels, find_labels
from modelcenter.data.readers import Table
from modelcenter.data.tokenize import Tokens, tokenize
from modelcenter.training.config import ClassificationConfig, TrainConfig
from modelcenter.training.metrics import Metrics, MultiLabel, Regression, SingleLabel


@dataclass(frozen=True)
class Examples:
    """The rows of one split, ready for batches: their tokens and their targets (None: none were read)."""

    table: Table
    tokens: Tokens
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        return self.tokens.lengths

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        """The packed batch of these rows, on the host."""
        return pack(self.tokens, rows, self.targets)


class Batches:
    """Batches that are made when they are asked for; those of an evaluation may be read more than once."""

    def __init__(self, examples: Examples, rows: list[np.ndarray]):
        self.examples, self.rows = examples, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.examples.batch(self.rows[i])  # the IndexError of rows ends a loop over the batches


def read_splits(cfg: TrainConfig) -> tuple[Table, Table | None]:
    """The rows to train on and, if the flags or the data set name some, the rows to evaluate on."""
    cfg.require("train_data")
    source = sources.find(cfg.train_data or [], cfg.data_config)
    train = source.read(cfg.train_split)
    if cfg.eval_fraction is not None:
        return sources.hold_out(train, cfg.eval_fraction, cfg.seed)
    if cfg.eval_data is not None:
        other = sources.find(cfg.eval_data, cfg.data_config if cfg.eval_data == cfg.train_data else None)
        return train, other.read(cfg.eval_split or evaluation_split(other))
    if cfg.eval_split is not None:
        return train, source.read(cfg.eval_split)
    split = sources.SPLITS["dev"]
    return train, source.read(split) if split in source.splits and cfg.train_split != split else None


def evaluation_split(source: sources.Source) -> str:
    """The split meant when a data set is named for evaluation: validation, else test, else its only one."""
    for split in ("validation", "test"):
        if split in source.splits:
            return split
    if len(source.splits) > 1:
        raise ValueError(
            f"eval_split: {source.name} has the splits {', '.join(source.splits)}; say which to evaluate on"
        )
    return source.splits[0]


class Classification:
    """Text classification: one label, several or scores; one text or a pair. Flags: ClassificationConfig."""

    name: ClassVar[str] = "classification"
    head: ClassVar[str] = "sequence-classification"

    def __init__(self, cfg: ClassificationConfig):
        """Read the data, find its columns and labels.

        Raises:
            ValueError: no such data, column or label; see data.sources, data.columns and data.labels.
        """
        self.train, self.eval = read_splits(cfg)
        self.columns = find_columns(self.train, cfg.text_column, cfg.text_pair_column, cfg.label_column)
        # The columns that were found count as given from here on: in config.yaml, and for the evaluation data.
        cfg.text_column, cfg.text_pair_column, cfg.label_column = _names(self.columns)
        assert self.columns.label is not None
        values, where = self.train.columns[self.columns.label], self.train.where
        self.labels = find_labels(
            values,
            where,
            problem_type=cfg.problem_type,
            num_labels=cfg.num_labels,
            names=self.train.classes.get(self.columns.label),
        )
        self.train_targets = self.labels.encode(values, where)
        self.eval_targets = None
        if self.eval is not None:
            find_columns(self.eval, *_names(self.columns))
            self.eval_targets = self.labels.encode(self.eval.columns[self.columns.label], self.eval.where)

    def model_options(self) -> dict[str, Any]:
        """What the model's configuration must say."""
        names = dict(enumerate(self.labels.names))
        return {"num_labels": len(names), "id2label": names, "problem_type": self.labels.problem_type}

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Examples, Examples | None]:
        """Tokens of the training and evaluation rows."""

        def examples(table: Table, targets: np.ndarray | None) -> Examples:
            return Examples(table, tokenize_rows(tokenizer, table, self.columns, max_length), targets)

        return examples(self.train, self.train_targets), self.eval and examples(self.eval, self.eval_targets)

    def metrics(self, device: torch.device | str = "cpu") -> Metrics:
        return make_metrics(self.labels, device)

    def about_columns(self) -> str:
        """Which columns are used and what the labels are, in words."""
        pair = f" and {self.columns.text_pair!r}" if self.columns.text_pair is not None else ""
        names = ", ".join(self.labels.names[:4]) + (", ..." if len(self.labels.names) > 4 else "")
        count = "" if self.labels.problem_type == "regression" else f" with {len(self.labels.names)} classes: {names}"
        return f"text {self.columns.text!r}{pair}, label {self.columns.label!r}{count}"

    def describe(self, examples: Examples, row: int) -> str:
        """The target of a row, in words."""
        return label_text(self.labels, examples.targets, row)


def tokenize_rows(tokenizer: Any, table: Table, columns: Columns, max_length: int) -> Tokens:
    """Tokens of the text (and second text) of every row.

    Raises:
        ValueError: a row without text.
    """

    def strings(name: str) -> list[str]:
        values = table.columns[name]
        missing = next((i for i, v in enumerate(values) if v is None or isinstance(v, (list, dict))), None)
        if missing is not None:
            found = "no text" if values[missing] is None else f"{values[missing]!r:.60}, expected a text,"
            raise ValueError(f"{table.where(missing)}: the row has {found} in column {name!r}")
        return [v if isinstance(v, str) else str(v) for v in values]

    pairs = None if columns.text_pair is None else strings(columns.text_pair)
    return tokenize(tokenizer, strings(columns.text), pairs, max_length=max_length)


def make_metrics(labels: Labels, device: torch.device | str = "cpu") -> Metrics:
    """The metrics that suit the kind of label."""
    if labels.problem_type == "regression":
        return Regression()
    kind = MultiLabel if labels.problem_type == "multi_label_classification" else SingleLabel
    return kind(len(labels.names), device)


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

"""Rerankers (cross-encoders): a query and a text are read together, and scored by how well the text answers."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

import engine
from modelcenter.data.schemas.ranked_texts import (
    RankedTexts,
    check_told_apart,
    find_ranked_columns,
    read_ranked_texts,
)
from modelcenter.data.schemas.related_texts import RelatedColumns
from modelcenter.data.table import Table
from modelcenter.hub.files.cross_encoder_files import activation_of, with_activation
from modelcenter.models.base import Model
from modelcenter.training.config import RerankingConfig, TrainConfig
from modelcenter.training.metrics import Likeness, PairLabels, Ranking, Score, sum_over_ranks
from modelcenter.training.ranking_losses import RANKING_LOSSES, Binary, RankingLoss, by_row
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.classification import name_padding_token
from modelcenter.training.tasks.pair_reading import PairReading, tokenize_pairs
from modelcenter.training.tasks.pair_scores import activated, check_one_label, outputs_of, shown
from modelcenter.training.tasks.ranked_examples import RankedExamples
from modelcenter.training.tasks.splits import read_splits, tells_of_rows
from modelcenter.training.tasks.text_search import own_part

log = logging.getLogger("modelcenter")

_ROWS = 256  # rows whose texts are compared at a time


@dataclass(eq=False, kw_only=True, repr=False)
class Reranking(Task):
    """Rerankers. Flags: RerankingConfig.

    Attributes:
        cfg: the flags; None: unknown, for a trained model. table, texts: rows for training or inference; for a loss
            that compares texts, training rows with the same query are merged.
        labelled: whether rows for inference have labels, for an evaluation. label: the only label of the head.
        reading: how pairs are read.
    """

    name: ClassVar[str] = "reranking"
    head: ClassVar[str] = "sequence-classification"
    cfg: RerankingConfig | None
    table: Table
    columns: RelatedColumns
    texts: RankedTexts
    loss_fn: RankingLoss = field(default_factory=Binary)
    eval_table: Table | None = None
    eval_texts: RankedTexts | None = None
    labelled: bool = True
    label: str = "LABEL_0"
    reading: PairReading = field(default_factory=PairReading)

    @classmethod
    def from_flags(cls, cfg: RerankingConfig) -> Self:
        """See Task. Errors: see also data.schemas.ranked_texts."""
        # A held-out query is not trained on in other rows.
        table, eval_table = read_splits(cfg, lambda rows: find_ranked_columns(rows, **cfg.role_columns()).anchor)
        columns = find_ranked_columns(table, **cfg.role_columns())
        cfg.set_role_columns(columns.roles())
        texts, eval_texts = read_ranked_texts(table, columns), None
        check_told_apart(table, columns, texts)
        cfg.loss = cfg.loss or _suited_loss(columns, texts)
        loss_fn = RANKING_LOSSES[cfg.loss]()
        cfg.refuse_idle("max_negatives", not columns.negatives, "without negatives in the data; leave it out")
        if cfg.loss == "margin_mse" and columns.score is None:
            raise ValueError(
                "score_column: margin_mse needs a teacher's scores, a list with one per text of a row, positives "
                "first; give their column. `modelcenter mine --output_scores` writes them"
            )
        _check_labels(table, columns, texts, cfg.loss, loss_fn)
        if eval_table is not None:
            find_ranked_columns(eval_table, **columns.roles())
            eval_texts = read_ranked_texts(eval_table, columns)
            check_told_apart(eval_table, columns, eval_texts)
            _check_labels(eval_table, columns, eval_texts, cfg.loss, loss_fn)
        if not isinstance(loss_fn, Binary):
            texts, first = texts.by_query()
            table = table.subset(first)
            _tell_rows_without_loss(table, texts, cfg.loss, loss_fn)
        return cls(
            cfg=cfg,
            table=table,
            columns=columns,
            texts=texts,
            loss_fn=loss_fn,
            eval_table=eval_table,
            eval_texts=eval_texts,
            reading=PairReading.of(cfg),
        )

    def adopt_label_order(self, names: Sequence[str]) -> None:
        if len(names) == 1:
            self.label = names[0]

    def model_options(self) -> dict[str, Any]:
        head = {"num_labels": 1, "id2label": {0: self.label}, "problem_type": None}
        assert self.cfg is not None
        return head if self.cfg.from_scratch else head | self.reading.head_options()

    def on_tokenizer_loaded(self, tokenizer: Any) -> None:
        self.reading.prepare(tokenizer)

    def on_model_built(self, model: Model) -> None:
        assert self.cfg is not None
        extra = model.config.extra
        model.config.extra = with_activation(extra, self.cfg.activation or activation_of(extra) or "sigmoid")

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        """Set the length at which texts are truncated in the saved tokenizer, too."""
        assert self.cfg is not None and self.cfg.max_length is not None
        name_padding_token(model, tokenizer)
        tokenizer.model_max_length = min(tokenizer.model_max_length, self.cfg.max_length)

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[RankedExamples, RankedExamples | None]:
        assert self.cfg is not None
        options = {"in_turn": True, "max_negatives": self.cfg.max_negatives}
        train_set = _examples(self.table, self.texts, tokenizer, max_length, **options)
        if self.eval_table is None or self.eval_texts is None:
            return train_set, None
        return train_set, self._judged_examples(self.eval_table, self.eval_texts, tokenizer, max_length)

    @staticmethod
    def _judged_examples(table: Table, texts: RankedTexts, tokenizer: Any, max_length: int) -> RankedExamples:
        """The rows of an evaluation; rows of single pairs are merged if they have the same query."""
        texts, first = texts.by_query()
        return _examples(table.subset(first), texts, tokenizer, max_length)

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        """Metrics of rankings; if no query has several texts, metrics of pairs."""
        texts, _ = (self.texts if self.eval_texts is None else self.eval_texts).by_query()
        if (texts.texts.counts > 1).any() and (texts.relevance >= 0).all():
            return Ranking()
        return PairLabels() if np.isin(texts.relevance, (0, 1)).all() else Likeness()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """The loss over all rows together, independent of the batch size, and the metrics."""
        scores = outputs_of(model, examples, batch_size)
        relevance, metrics = torch.from_numpy(examples.texts.relevance), self.metrics()
        total, items = torch.zeros((), dtype=torch.float64), 0
        first, last = own_part(len(examples))
        for start in range(0, len(examples), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(examples)))
            items += self.loss_fn.counts(examples.facts(rows)[1])["loss"]
            rows = rows[(rows >= first) & (rows < last)]  # this rank's
            if not len(rows):
                continue
            found, facts = examples.facts(rows)
            numbers = torch.from_numpy(found)
            total += self.loss_fn.sum(scores[numbers], facts).double()
            _update(metrics, scores[numbers], relevance[numbers], facts["row_texts"])
        loss = sum_over_ranks(total).item() / items if items else None
        return {"loss": loss, **metrics.result()}

    def count_rows(self, examples: Any) -> int:
        return len(self.table)

    def describe_columns(self) -> str:
        counts = self.texts.texts.counts
        low, high = int(counts.min()), int(counts.max())
        return f"{self.columns.shown()}; {low if low == high else f'{low} to {high}'} texts each"

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        given = {role: cfg.column(role) for role in RerankingConfig.roles}
        for role, name in given.items():
            usual = getattr(run, f"{role}_column", None)
            if name is None and usual is not None and all(part in table.columns for part in usual.split(",")):
                given[role] = usual
        columns = find_ranked_columns(table, **given)
        if not labelled:
            columns = dataclasses.replace(columns, score=None)
        known = run if isinstance(run, RerankingConfig) else None
        texts = read_ranked_texts(table, columns, labelled)
        if labelled:
            check_told_apart(table, columns, texts)
        loss_fn = RANKING_LOSSES[_suited_loss(columns, texts, None if known is None else known.loss)]()
        return cls(
            cfg=known,
            table=table,
            columns=columns,
            texts=texts,
            loss_fn=loss_fn,
            labelled=labelled,
            reading=PairReading.of(cfg),
        )

    def trained_model(self, source: str, load: Callable[..., Model], policy: Any) -> Model:
        head = self.reading.head_options()
        return load(task=self.head, **head) if head else load()

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> RankedExamples:
        check_one_label(model)
        self.reading.prepare(tokenizer)
        make = self._judged_examples if self.labelled else _examples
        return make(self.table, self.texts, tokenizer, max_length)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """score of the text of each row; for rows with several texts, the scores of all and their order, best first."""
        outputs = outputs_of(model, examples, cfg.batch_size)
        scores = activated(model, outputs)
        return self._predictions(outputs, scores) if engine.rank() == 0 else iter(())

    def _predictions(self, outputs: Tensor, scores: Tensor) -> Iterator[dict[str, Any]]:
        """outputs: (texts,), which give the order, because the activation may round them to equal scores. scores:
        (texts,)."""
        several, first = bool((self.texts.texts.counts > 1).any()), self.texts.texts.first.tolist()
        for start, end in itertools.pairwise(first):
            values = [shown(score) for score in scores[start:end].tolist()]
            order = outputs[start:end].argsort(descending=True, stable=True)
            yield {"scores": values, "order": order.tolist()} if several else {"score": values[0]}


def _examples(table: Table, texts: RankedTexts, tokenizer: Any, max_length: int, **options: Any) -> RankedExamples:
    """options: of RankedExamples. Raises ValueError if a query and its text have no tokens."""
    tokens = tokenize_pairs(tokenizer, *texts.pairs(), max_length=max_length)
    if not tokens.lengths.all():
        row = int(texts.row_of[np.argmin(tokens.lengths)])
        raise ValueError(
            f"{table.where(row)}: the query {texts.queries[row]!r:.60} and a text have no token, and this tokenizer "
            "adds no special tokens, so there is nothing to read; remove the row"
        )
    return RankedExamples(table, tokens, texts, **options)


def _update(metrics: Any, scores: Tensor, relevance: Tensor, row_texts: Tensor) -> None:
    """Add the concatenated texts of some rows to the metrics."""
    if isinstance(metrics, Ranking):
        padded, there = by_row(scores, row_texts)
        metrics.update(padded, by_row(relevance, row_texts)[0], there)
    elif isinstance(metrics, PairLabels):
        metrics.update(scores, relevance)
    else:
        metrics.update(scores[:, None], relevance)


def _suited_loss(columns: RelatedColumns, texts: RankedTexts, wanted: str | None = None) -> str:
    """The wanted loss if it is defined for these labels, else the usual loss that is."""
    usual = "binary" if (texts.texts.counts == 1).all() else "listwise"
    for name in (usual,) if wanted is None else (wanted, usual):
        has_scores = columns.score is not None or name != "margin_mse"
        if has_scores and not _wrong_labels(texts, RANKING_LOSSES[name]).any():
            return name
    return "pairwise"


def _check_labels(table: Table, columns: RelatedColumns, texts: RankedTexts, loss: str, loss_fn: RankingLoss) -> None:
    """Raise ValueError for a label for which the loss is not defined."""
    wrong = np.flatnonzero(_wrong_labels(texts, type(loss_fn)))
    if len(wrong):
        expected = "0 or more" if loss_fn.highest is None else "a number from 0 to 1"
        others = [name for name, other in RANKING_LOSSES.items() if other.lowest is None]
        raise ValueError(
            f"{table.where(int(texts.row_of[wrong[0]]))}: the row has the label {texts.labels[wrong[0]]:g} in column "
            f"{columns.score!r}, expected {expected} with the loss {loss}; --loss {' or '.join(others)} takes any"
        )


def _wrong_labels(texts: RankedTexts, kind: type[RankingLoss]) -> np.ndarray:
    """bool (texts,): the labels for which a loss is not defined."""
    low = -np.inf if kind.lowest is None else kind.lowest
    high = np.inf if kind.highest is None else kind.highest
    return (texts.labels < low) | (texts.labels > high)


def _tell_rows_without_loss(table: Table, texts: RankedTexts, loss: str, loss_fn: RankingLoss) -> None:
    """Warn of rows, possibly merged by query, that do not contribute to the loss. Raises ValueError if none does."""
    idle: list[int] = []
    for start in range(0, len(texts), _ROWS):
        first = texts.texts.first[start : start + _ROWS + 1]
        labels = torch.from_numpy(texts.labels[first[0] : first[-1]])
        items = loss_fn.items(*by_row(labels, torch.from_numpy(np.diff(first))))
        idle += [start + row for row in (items == 0).nonzero().flatten().tolist()]
    if len(idle) == len(texts):
        raise ValueError(
            f"loss: {loss} compares the texts of a query, but no query of {table.name} has texts with different "
            "labels; give --loss binary, which scores each text by itself, or data with several texts per query"
        )
    if idle and tells_of_rows():
        log.warning(
            "%s: %d of %d queries have no texts that %s can compare (first: %s); they are not learned from",
            table.name, len(idle), len(texts), loss, table.where(idle[0]),
        )  # fmt: skip

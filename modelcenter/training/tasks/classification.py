"""Text classification of single texts or pairs: single-label, multi-label or regression."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

import engine
from modelcenter.data.batching.mixture import epoch_frequencies
from modelcenter.data.schemas.class_names import renumbered, renumbering
from modelcenter.data.schemas.column_names import LABEL_NAMES
from modelcenter.data.schemas.columns import Columns, check_columns, find_columns, find_usual_name, join_labels
from modelcenter.data.schemas.labels import Labels, find_labels, unsaid
from modelcenter.data.table import Table
from modelcenter.models.base import Model
from modelcenter.models.decoder import Decoder
from modelcenter.training.config import ClassificationConfig, TrainConfig
from modelcenter.training.distillation.classes import classes_of_teacher
from modelcenter.training.distillation.loss import TEACHER_LOSS
from modelcenter.training.evaluation import logits_of
from modelcenter.training.metrics import LossOnly, MultiLabel, Regression, Score, SingleLabel, sum_over_ranks
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.class_weights import ClassWeightedLoss, parse_class_weights
from modelcenter.training.tasks.column_roles import group_column, groups_of, inference_columns, inference_form
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.labelled_texts import LabelledExamples, check_texts, tokenize_texts
from modelcenter.training.tasks.splits import column_of_parts, read_splits


@dataclass(eq=False, kw_only=True, repr=False)
class Classification(Task):
    """Text classification. Flags: ClassificationConfig.

    Attributes:
        table: rows to train on, or that a trained model is used on. group: column of the groups, see LabelledExamples.
        labels: for inference those of the model, once it is loaded. targets, eval_targets: of the rows; None: they have
            no labels, as a teacher alone is learned from.
    """

    name: ClassVar[str] = "classification"
    head: ClassVar[str] = "sequence-classification"
    table: Table
    columns: Columns
    group: str | None = None
    labels: Labels = Labels("single_label_classification", ())
    targets: np.ndarray | None = None
    eval_table: Table | None = None
    eval_targets: np.ndarray | None = None
    class_weights: list[str] | None = None
    label_smoothing: float = 0.0

    @classmethod
    def from_flags(cls, cfg: ClassificationConfig) -> Self:
        """See Task. Errors: see also data.sources, data.schemas.columns and data.schemas.labels."""
        table, eval_table = read_splits(cfg)
        if cfg.teacher is not None and cfg.teacher_weight == 1:
            return cls._without_labels(cfg, cfg.teacher, table, eval_table)
        columns = find_columns(table, cfg.text_column, cfg.text_pair_column, cfg.label_column)
        group = group_column(table, cfg.group_column, cfg.form)
        cfg.set_role_columns({**dataclasses.asdict(columns), "group": group})
        assert columns.label is not None
        check_texts(table, columns)
        if eval_table is not None:
            find_columns(eval_table, columns.text, columns.text_pair, columns.label)
            check_columns(eval_table, {"group": group})
        names = table.classes.get(columns.label)
        options: dict[str, Any] = {"problem_type": cfg.problem_type, "num_labels": cfg.num_labels, "names": names}
        # A class whose rows are all held out still counts as a class.
        known, where = column_of_parts(columns.label, table, eval_table if cfg.eval_fraction is not None else None)
        labels = find_labels(known, where, **options, column=f"column {columns.label!r}")
        cfg.unsaid = unsaid(known, where, labels, **options)
        targets = labels.encode(table.columns[columns.label], table.where, classes=names)
        for flag in ("group_column", "class_weights"):
            if getattr(cfg, flag) and labels.problem_type != "single_label_classification":
                raise ValueError(f"{flag}: supported for rows with one label each, not for {labels.problem_type}")
        eval_targets = None
        if eval_table is not None:
            classes = eval_table.classes.get(columns.label)
            eval_targets = labels.encode(eval_table.columns[columns.label], eval_table.where, classes=classes)
        return cls(
            table=table,
            columns=columns,
            group=group,
            labels=labels,
            targets=targets,
            eval_table=eval_table,
            eval_targets=eval_targets,
            class_weights=cfg.class_weights,
            label_smoothing=cfg.label_smoothing,
        )

    @classmethod
    def _without_labels(cls, cfg: ClassificationConfig, teacher: str, table: Table, eval_table: Table | None) -> Self:
        """The task of a run that learns from its teacher only: it has the teacher's classes, and reads labels for
        evaluation, if there are some, but not for training."""
        join_labels(table, cfg.label_column)
        label = cfg.label_column if cfg.label_column in table.columns else None
        columns = find_columns(table, cfg.text_column, cfg.text_pair_column, label, labelled=False)
        check_texts(table, columns)
        kind, names = classes_of_teacher(teacher)
        labels, eval_targets = Labels(kind, tuple(names)), None
        for flag in ("num_labels", "problem_type"):
            cfg.refuse_idle(flag, True, "with teacher_weight 1, because the classes are the teacher's; leave it out")
        if eval_table is not None:
            find_columns(eval_table, columns.text, columns.text_pair, cfg.label_column, labelled=False)
            label = cfg.label_column or find_usual_name(eval_table, LABEL_NAMES, {columns.text, columns.text_pair})
            if label is not None:
                labels, eval_targets = _read_labels(eval_table, label, kind, names, "the teacher")
        columns = dataclasses.replace(columns, label=label)
        group = None if eval_targets is None else group_column(table, cfg.group_column, cfg.form)
        cfg.set_role_columns({**dataclasses.asdict(columns), "group": group})
        return cls(
            table=table,
            columns=columns,
            group=group,
            labels=labels,
            eval_table=eval_table,
            eval_targets=eval_targets,
        )

    def adopt_label_order(self, names: Sequence[str]) -> None:
        found = renumbering(self.labels.names, names)
        if found is None:
            return
        order, numbers = found
        self.labels = Labels(self.labels.problem_type, order)
        self.targets, self.eval_targets = (
            None if targets is None else renumbered(targets, numbers) for targets in (self.targets, self.eval_targets)
        )

    def model_options(self) -> dict[str, Any]:
        names = dict(enumerate(self.labels.names))
        return {"num_labels": len(names), "id2label": names, "problem_type": self.labels.problem_type}

    def on_model_built(self, model: Model) -> None:
        if self.class_weights:
            assert self.targets is not None
            weights = parse_class_weights(
                self.class_weights, self.labels.names, self.targets, epoch_frequencies(self.table)
            )
            self.loss_fn = ClassWeightedLoss(weights, self.label_smoothing)

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[LabelledExamples, LabelledExamples | None]:
        train_set = self._examples(self.table, self.targets, tokenizer, max_length)
        if self.eval_table is None:
            return train_set, None
        groups = groups_of(self.eval_table, self.group)
        return train_set, self._examples(self.eval_table, self.eval_targets, tokenizer, max_length, groups)

    def _examples(
        self,
        table: Table,
        targets: np.ndarray | None,
        tokenizer: Any,
        max_length: int,
        groups: np.ndarray | None = None,
    ) -> LabelledExamples:
        tokens = tokenize_texts(tokenizer, table, self.columns, max_length)
        return LabelledExamples(table, tokens, self.labels, targets, groups)

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        name_padding_token(model, tokenizer)

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        """The metrics for the kind of labels."""
        if self.eval_table is not None and self.eval_targets is None:
            return LossOnly(TEACHER_LOSS)
        if self.labels.problem_type == "regression":
            return Regression(len(self.labels.names))
        kind = MultiLabel if self.labels.problem_type == "multi_label_classification" else SingleLabel
        return kind(len(self.labels.names), device)

    def metric_names(self, examples: Any) -> list[str]:
        return super().metric_names(examples) + ([] if examples.groups is None else ["exact_match"])

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """Adds exact_match if rows have groups: the share of groups whose rows are all right."""
        batches = Batches(examples, rank_batches(examples, batch_size))
        if examples.targets is None:
            return self.run_evaluation(model, batches)
        if examples.groups is None:
            return super().evaluate(model, examples, batch_size)
        rows_of_batches = iter(batches.rows)
        has_error = torch.zeros(int(examples.groups.max()) + 1, dtype=torch.int64)

        def update(metrics: Any, out: Any, batch: dict[str, Any]) -> None:
            self.update_metrics(metrics, out, batch)
            wrong = (out.logits.argmax(-1) != batch["labels"]).cpu().numpy()
            has_error[torch.from_numpy(examples.groups[next(rows_of_batches)][wrong])] = 1

        result = self.run_evaluation(model, batches, self.metrics(model.device), update)
        return {**result, "exact_match": (sum_over_ranks(has_error) == 0).double().mean().item()}

    def describe_columns(self) -> str:
        pair = f" and {self.columns.text_pair!r}" if self.columns.text_pair is not None else ""
        names = ", ".join(self.labels.names[:4]) + (", ..." if len(self.labels.names) > 4 else "")
        count = "" if self.labels.problem_type == "regression" else f" with {len(self.labels.names)} classes: {names}"
        label = "the teacher's labels" if self.targets is None else f"label {self.columns.label!r}"
        return f"text {self.columns.text!r}{pair}, {label}{count}"

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        usual = getattr(run, "label_column", None)
        if labelled:
            join_labels(table, usual)
        given = inference_columns(cfg, run, table, ClassificationConfig.roles, needed="text")
        if labelled and given["label"] is None and usual is not None:
            _refuse_part_of_labels(table, usual)
        group = group_column(table, given.pop("group"), inference_form(cfg, run))
        if not labelled:
            given["label"] = None
        return cls(table=table, columns=find_columns(table, **given, labelled=labelled), group=group)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> LabelledExamples:
        names = [(model.config.id2label or {}).get(i, f"LABEL_{i}") for i in range(model.config.num_labels)]
        kind = model.config.problem_type or ("regression" if len(names) == 1 else None)
        if self.columns.label is None:
            self.labels, targets = Labels(kind or "single_label_classification", tuple(names)), None
        else:
            self.labels, targets = _read_labels(self.table, self.columns.label, kind, names, "the model")
        groups = None if targets is None else groups_of(self.table, self.group)
        return self._examples(self.table, targets, tokenizer, max_length, groups)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """label, score and probabilities of each row (multi-label: labels; regression: score)."""
        rows = rank_batches(examples, cfg.batch_size)
        places = [torch.from_numpy(part) for part in rows]
        logits = logits_of(model, Batches(examples, rows), places, len(examples), model.config.num_labels)
        return predictions(logits, self.labels) if engine.rank() == 0 else iter(())


def _read_labels(
    table: Table, column: str, kind: str | None, names: Sequence[str], known_from: str
) -> tuple[Labels, np.ndarray]:
    """The labels of rows under a model's classes, and their targets. known_from: describes the model."""
    values, where, classes = table.columns[column], table.where, table.classes.get(column)
    labels = find_labels(values, where, problem_type=kind, num_labels=len(names), names=names)
    try:
        return labels, labels.encode(values, where, known_from, classes)
    except ValueError as error:  # perhaps in a column that was guessed because the rows lack the run's
        raise ValueError(f"{error}; read from column {column!r} (--label_column)") from None


def name_padding_token(model: Model, tokenizer: Any) -> None:
    """Set a padding token if there is none, and give a decoder the tokenizer's: transformers finds by the one in the
    config the last token of each row in a batch, which a decoder's classifier reads. The end-of-text token is used,
    unless texts already end with it."""
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        if tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]:
            return
        tokenizer.pad_token = tokenizer.eos_token
    config: Any = model.config
    if tokenizer.pad_token_id is not None and (config.pad_token_id is None or isinstance(model, Decoder)):
        config.pad_token_id = tokenizer.pad_token_id


def _refuse_part_of_labels(table: Table, label: str) -> None:
    """Raise ValueError for rows that have only some of a run's 0/1 columns, one per label: a single one would be read
    as class indices."""
    parts = [part.strip() for part in label.split(",")]
    lacking = [part for part in parts if part not in table.columns]
    if label not in table.columns and 0 < len(lacking) < len(parts):
        raise ValueError(
            f"label_column: {table.name} has no column {', '.join(map(repr, lacking))}, but the run's labels are "
            f"columns of zeros and ones, {label}; add the missing columns, or give label_column"
        )


def predictions(logits: Tensor, labels: Labels) -> Iterator[dict[str, Any]]:
    """The prediction for each row. logits (rows, classes), fp32."""
    names = labels.names
    if labels.problem_type == "regression":
        for values in logits.tolist():
            yield {"score": values[0]} if len(values) == 1 else {"scores": dict(zip(names, values, strict=True))}
        return
    multi = labels.problem_type == "multi_label_classification"
    for values in (logits.sigmoid() if multi else logits.softmax(-1)).tolist():
        probabilities = dict(zip(names, (round(v, 6) for v in values), strict=True))
        if multi:
            chosen = [n for n, v in zip(names, values, strict=True) if v > 0.5]
            yield {"labels": chosen, "probabilities": probabilities}
        else:
            best = names[max(range(len(values)), key=values.__getitem__)]
            yield {"label": best, "score": probabilities[best], "probabilities": probabilities}

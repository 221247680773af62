"""Multiple choice: choosing the text that fits a prompt."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.batching.collate import pack
from modelcenter.data.schemas.choices import ChoiceColumns, Choices, correct_choices, find_choice_columns, read_choices
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import tokenize
from modelcenter.models.base import Model
from modelcenter.training.config import MultipleChoiceConfig, TrainConfig
from modelcenter.training.evaluation import outputs
from modelcenter.training.metrics import Accuracy, ExtractiveAnswers, Score, gather_lists
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.column_roles import has_several_answers, inference_columns, inference_form
from modelcenter.training.tasks.examples import Batches, TokenExamples, rank_batches
from modelcenter.training.tasks.preview import shortened
from modelcenter.training.tasks.splits import read_splits


@dataclass(frozen=True)
class ChoiceExamples(TokenExamples):
    """Rows of several sequences, one per choice: `tokens` concatenates those of all rows.

    first: int64 (rows + 1,), the first sequence of each row. targets: int64 (rows,), the right choice; None: unknown.
    answers: the texts of all right choices of each row, if rows may have several; epochs use them in turn.
    """

    choices: Choices
    first: np.ndarray
    targets: np.ndarray | None = None
    answers: list[list[str]] | None = None

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.add.reduceat(self.tokens.lengths, self.first[:-1])

    @property
    def counts(self) -> np.ndarray:
        """The number of choices of each row."""
        return np.diff(self.first)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        batch: dict[str, Any] = pack(self.tokens, self.row_ids(rows))
        alike = (self.counts == self.counts[0]).all()
        batch["num_choices"] = int(self.counts[0]) if alike else torch.from_numpy(self.counts[rows])
        if self.targets is not None:
            right = self.targets[rows]
            if self.answers is not None:
                right = np.array([self.right(row, epoch) for row in rows], np.int64)
            batch["labels"] = torch.from_numpy(right)
        return batch

    def right(self, row: int, epoch: int) -> int:
        """The right choice that an epoch uses for a row with several."""
        assert self.answers is not None
        answers = self.answers[row]
        return self.choices.offered[row].index(answers[epoch % len(answers)])

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        numbers = [np.arange(self.first[row], self.first[row + 1]) for row in rows]
        return np.concatenate(numbers) if numbers else np.zeros(0, np.int64)

    def show(self, row: int, tokenizer: Any) -> str:
        number = 0 if self.targets is None else int(self.targets[row])
        text = shortened(tokenizer.decode(self.tokens.row(int(self.first[row]) + number)))
        return f"[choice {number + 1} of {self.counts[row]}{'' if self.targets is None else ' is right'}] {text}"


@dataclass(eq=False, kw_only=True, repr=False)
class MultipleChoice(Task):
    """Multiple choice. Flags: MultipleChoiceConfig.

    Attributes:
        table: rows for training or inference. several_answers: rows may have several right choices.
    """

    name: ClassVar[str] = "multiple-choice"
    head: ClassVar[str] = "multiple-choice"
    table: Table
    columns: ChoiceColumns
    choices: Choices
    targets: np.ndarray | None = None
    eval_table: Table | None = None
    eval_choices: Choices | None = None
    eval_targets: np.ndarray | None = None
    several_answers: bool = False

    @classmethod
    def from_flags(cls, cfg: MultipleChoiceConfig) -> Self:
        """See Task. Errors: see also data.schemas.choices."""
        table, eval_table = read_splits(cfg)
        given = cfg.context_column, cfg.question_column, cfg.choices_column, cfg.label_column
        columns = find_choice_columns(table, *given)
        cfg.set_role_columns({**dataclasses.asdict(columns), "choices": ",".join(columns.choices)})
        assert columns.label is not None
        choices = read_choices(table, columns)
        targets, cfg.first_choice, kind = correct_choices(
            table, columns.label, choices, cfg.first_choice, cfg.label_kind
        )
        cfg.refuse_idle("label_kind", cfg.label_kind not in (None, kind), f"because labels are of the kind {kind}")
        cfg.label_kind = kind
        eval_choices, eval_targets = None, None
        if eval_table is not None:
            find_choice_columns(eval_table, *given)
            eval_choices = read_choices(eval_table, columns)
            eval_targets, *_ = correct_choices(eval_table, columns.label, eval_choices, cfg.first_choice, kind)
        if cfg.label_smoothing and len(set(choices.counts.tolist())) > 1:
            raise ValueError(
                "label_smoothing: supported if all rows have equally many choices, which they do not; leave it out"
            )
        return cls(
            table=table,
            columns=columns,
            choices=choices,
            targets=targets,
            eval_table=eval_table,
            eval_choices=eval_choices,
            eval_targets=eval_targets,
            several_answers=has_several_answers(table, cfg.form),
        )

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[ChoiceExamples, ChoiceExamples | None]:
        train_set = self._examples(self.table, self.choices, self.targets, tokenizer, max_length)
        if self.eval_table is None or self.eval_choices is None:
            return train_set, None
        return train_set, self._examples(self.eval_table, self.eval_choices, self.eval_targets, tokenizer, max_length)

    def _examples(
        self, table: Table, choices: Choices, targets: np.ndarray | None, tokenizer: Any, max_length: int
    ) -> ChoiceExamples:
        tokens = tokenize(tokenizer, *choices.pairs(), max_length=max_length)
        first = np.concatenate(([0], np.cumsum(choices.counts)))
        answers = table.columns["answers"] if self.several_answers and targets is not None else None
        return ChoiceExamples(table, tokens, choices, first, targets, answers)

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return ExtractiveAnswers() if self.several_answers else Accuracy()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """If rows may have several right choices, adds exact_match and f1 of the chosen text."""
        if examples.answers is None:
            return super().evaluate(model, examples, batch_size)
        batches = Batches(examples, rank_batches(examples, batch_size))
        rows_of_batches = iter(batches.rows)

        def update(metrics: Any, out: Any, batch: dict[str, Any]) -> None:
            rows, best = next(rows_of_batches).tolist(), out.logits.argmax(-1).tolist()
            texts = [examples.choices.offered[row][choice] for row, choice in zip(rows, best, strict=True)]
            metrics.update(texts, [examples.answers[row] for row in rows])

        return self.run_evaluation(model, batches, self.metrics(), update)

    def describe_columns(self) -> str:
        counts = self.choices.counts
        low, high = int(counts.min()), int(counts.max())
        return f"{self.columns.shown()}; {low if low == high else f'{low} to {high}'} choices each"

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        needed = "context" if run is None or getattr(run, "context_column", None) else "question"
        given = inference_columns(cfg, run, table, MultipleChoiceConfig.roles, needed=needed)
        usual = getattr(run, "choices_column", None) or ""
        if given["choices"] is None and usual and all(name in table.columns for name in usual.split(",")):
            given["choices"] = usual
        if not labelled:
            given["label"] = None
        several = has_several_answers(table, inference_form(cfg, run))
        columns = find_choice_columns(table, **given, labelled=labelled)
        choices, targets = read_choices(table, columns), None
        if labelled:
            assert columns.label is not None
            read_as = getattr(run, "first_choice", None), getattr(run, "label_kind", None)
            targets, *_ = correct_choices(table, columns.label, choices, *read_as)
        return cls(table=table, columns=columns, choices=choices, targets=targets, several_answers=several)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> ChoiceExamples:
        return self._examples(self.table, self.choices, self.targets, tokenizer, max_length)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """choice (its text), label (its name in the row, else its index), score and probabilities."""
        rows = rank_batches(examples, cfg.batch_size)
        probabilities: list[tuple[int, list[float]]] = []  # (row, probabilities of its choices)
        for number, out in outputs(model, Batches(examples, rows)):
            values = out.logits.float().softmax(-1).tolist()
            probabilities += [
                (row, of_row[: examples.counts[row]]) for row, of_row in zip(rows[number].tolist(), values, strict=True)
            ]
        by_row = dict(gather_lists(probabilities))
        return (self._prediction(row, by_row[row]) for row in range(len(examples) if engine.rank() == 0 else 0))

    def _prediction(self, row: int, probabilities: list[float]) -> dict[str, Any]:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        names, probabilities = self.choices.names, [round(value, 6) for value in probabilities]
        return {
            "choice": self.choices.offered[row][best],
            "label": best if names is None else names[row][best],
            "score": probabilities[best],
            "probabilities": probabilities,
        }

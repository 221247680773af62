"""Multiple choice: which of a few texts goes with another one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data.batching.collate import pack
from modelcenter.data.schemas.choices import Choices, correct_choices, find_choice_columns, read_choices
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import tokenize
from modelcenter.models.base import Model
from modelcenter.training.config import MultipleChoiceConfig, TrainConfig
from modelcenter.training.evaluation import evaluate, outputs
from modelcenter.training.metrics import Accuracy, ExtractiveAnswers, Score, gather_lists
from modelcenter.training.tasks.base import (
    Batches,
    Task,
    TokenExamples,
    has_several_answers,
    inference_columns,
    inference_form,
    rank_batches,
    read_splits,
    shortened,
)


@dataclass(frozen=True)
class ChoiceExamples(TokenExamples):
    """Rows of several sequences, one for each choice: `tokens` has those of all rows, end to end.

    first: int64 (rows + 1,), the first sequence of each row. targets: int64 (rows,), the right choice; None: unknown.
    answers: the texts of all right choices of each row, where rows have several; training takes them in turn.
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
        """Choices of each row."""
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
        """The right choice of a row that has several in an epoch."""
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


class MultipleChoice(Task):
    """Multiple choice. Flags: MultipleChoiceConfig."""

    name: ClassVar[str] = "multiple-choice"
    head: ClassVar[str] = "multiple-choice"
    targets: np.ndarray | None
    eval_targets: np.ndarray | None = None
    several: bool  # rows may have several right choices

    def __init__(self, cfg: MultipleChoiceConfig):
        """Read the data, find its columns, choices and labels.

        Raises:
            ValueError: no such data or columns; rows without a text, choices or a label; see data.choices.
        """
        self.train, self.eval = read_splits(cfg)
        self.several = has_several_answers(self.train, cfg.form)
        given = {role: getattr(cfg, f"{role}_column") for role in cfg.roles}
        self.columns = find_choice_columns(self.train, **given)
        # The columns that were found count as given from here on: in config.yaml, and for the evaluation data.
        cfg.context_column, cfg.question_column = self.columns.context, self.columns.question
        cfg.choices_column, cfg.label_column = ",".join(self.columns.choices), self.columns.label
        self.choices = read_choices(self.train, self.columns)
        self.targets, cfg.first_choice = self._right(self.train, self.choices, cfg.first_choice)
        if self.eval is not None:
            find_choice_columns(self.eval, **{role: getattr(cfg, f"{role}_column") for role in cfg.roles})
            self.eval_choices = read_choices(self.eval, self.columns)
            self.eval_targets, _ = self._right(self.eval, self.eval_choices, cfg.first_choice)
        if cfg.label_smoothing and len(set(self.choices.counts.tolist())) > 1:
            raise ValueError("label_smoothing: for rows with equally many choices, these differ; leave it out")

    def _right(self, table: Table, choices: Choices, first: int | None) -> tuple[np.ndarray, int]:
        assert self.columns.label is not None
        return correct_choices(table, self.columns.label, choices, first)

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[ChoiceExamples, ChoiceExamples | None]:
        train = _rows(tokenizer, self.train, self.choices, self.targets, max_length, self.several)
        if self.eval is None:
            return train, None
        return train, _rows(tokenizer, self.eval, self.eval_choices, self.eval_targets, max_length, self.several)

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return ExtractiveAnswers() if self.several else Accuracy()

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        """Where rows have several right choices: exact_match and f1 of the text of the one that is taken."""
        if examples.answers is None:
            return super().evaluate(model, examples, batch_size)
        batches = Batches(examples, rank_batches(examples, batch_size))
        turns = iter(batches.rows)

        def feed(metrics: Any, out: Any, batch: dict[str, Any]) -> None:
            rows, best = next(turns).tolist(), out.logits.argmax(-1).tolist()
            taken = [examples.choices.offered[row][choice] for row, choice in zip(rows, best, strict=True)]
            metrics.update(taken, [examples.answers[row] for row in rows])

        return evaluate(model, batches, self.metrics(), feed)

    def about_columns(self) -> str:
        counts = self.choices.counts
        low, high = int(counts.min()), int(counts.max())
        return f"{self.columns.shown()}; {low if low == high else f'{low} to {high}'} choices each"

    # -- use of a trained model --------------------------------------------------------------------------------------

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        task = cls.__new__(cls)
        needed = "context" if run is None or getattr(run, "context_column", None) else "question"
        given = inference_columns(cfg, run, table, MultipleChoiceConfig.roles, needed=needed)
        usual = getattr(run, "choices_column", None) or ""
        if given["choices"] is None and usual and all(name in table.columns for name in usual.split(",")):
            given["choices"] = usual
        if not labelled:
            given["label"] = None
        task.train, task.eval = table, None
        task.several = has_several_answers(table, inference_form(cfg, run))
        task.columns = find_choice_columns(table, **given, labelled=labelled)
        task.choices, task.targets = read_choices(table, task.columns), None
        if labelled:
            task.targets, _ = task._right(table, task.choices, getattr(run, "first_choice", None))
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> ChoiceExamples:
        return _rows(tokenizer, self.train, self.choices, self.targets, max_length, self.several)

    def predict(self, model: Model, tokenizer: Any, examples: Any, cfg: Any) -> Iterator[dict[str, Any]]:
        """choice (its text), label (its name in the row, else its number from 0), score and probabilities."""
        rows = rank_batches(examples, cfg.batch_size)
        said: list[tuple[int, list[float]]] = []
        for turn, out in outputs(model, Batches(examples, rows)):
            chances = out.logits.float().softmax(-1).tolist()
            said += [
                (row, found[: examples.counts[row]]) for row, found in zip(rows[turn].tolist(), chances, strict=True)
            ]
        every = dict(gather_lists(said))
        return (self._say(row, every[row]) for row in range(len(examples) if engine.rank() == 0 else 0))

    def _say(self, row: int, chances: list[float]) -> dict[str, Any]:
        best = max(range(len(chances)), key=chances.__getitem__)
        names, chances = self.choices.names, [round(chance, 6) for chance in chances]
        label = best if names is None else names[row][best]
        return {
            "choice": self.choices.offered[row][best],
            "label": label,
            "score": chances[best],
            "probabilities": chances,
        }


def _rows(
    tokenizer: Any, table: Table, choices: Choices, targets: np.ndarray | None, max_length: int, several: bool
) -> ChoiceExamples:
    tokens = tokenize(tokenizer, *choices.pairs(), max_length=max_length)
    first = np.concatenate(([0], np.cumsum(choices.counts)))
    answers = table.columns["answers"] if several and targets is not None else None
    return ChoiceExamples(table, tokens, choices, first, targets, answers)

"""Preference training: DPO (Rafailov et al. 2023), with label smoothing (Mitchell 2023), and IPO (Azar et al. 2023).

A pair is two sequences of a batch, the chosen answer before the rejected one, each after its prompt. The reference
model's log-probabilities are worked out once, before the first step, and are part of the batches.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import engine
import modelcenter
from engine.registry import policy_of
from modelcenter.command_line.errors import flag_in_errors
from modelcenter.data.schemas.conversations import ChatColumns, find_chat_columns
from modelcenter.data.schemas.preferences import find_preference_columns, preferences, questions
from modelcenter.data.table import Table
from modelcenter.data.tokenization.answer_labels import IGNORED, LabelledTokens, label_conversations
from modelcenter.data.tokenization.chat_templates import ChatTemplate
from modelcenter.hub.tokenizer import fit_vocabulary
from modelcenter.models.base import Model
from modelcenter.training.config import DPOConfig, TrainConfig
from modelcenter.training.evaluation import evaluate, log_probs_of
from modelcenter.training.metrics import Preference
from modelcenter.training.tasks.answer_examples import AnswerExamples
from modelcenter.training.tasks.base import Batches, TokenExamples, inference_columns, rank_batches, read_splits
from modelcenter.training.tasks.lm import LanguageModelling, add_stops, kept, prompts_of, rows_of, warn_left_out


@dataclass(frozen=True)
class PreferenceExamples(TokenExamples):
    """Rows of pairs, over the tokens of `answers`. pairs: int64 (n, 2), numbers of the chosen and of the rejected
    sequence; reference: fp32 (n, 2), their log-probabilities by the reference model, NaN until these are known.
    truncated: pairs of which an answer was cut."""

    answers: AnswerExamples
    pairs: np.ndarray
    reference: np.ndarray
    truncated: int = 0  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def lengths(self) -> np.ndarray:
        return self.answers.lengths[self.pairs].sum(1)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        numbers = self.pairs[rows].reshape(-1)
        batch = self.answers.batch(numbers)
        tokens = [int((self.answers.labels_of(n)[1:] != IGNORED).sum()) for n in numbers]
        batch["answer_tokens"] = torch.tensor(tokens)
        batch["reference"] = torch.from_numpy(self.reference[rows].reshape(-1))
        return batch

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the answers, by which dropout gives each masks of its own."""
        return self.pairs[rows].reshape(-1)

    def show(self, row: int, tokenizer: Any) -> str:
        chosen, rejected = (self.answers.show(int(n), tokenizer) for n in self.pairs[row])
        return f"chosen: {chosen}\n  rejected: {rejected}"


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of pairs, from the log-probabilities of their answers; its items are pairs."""

    beta: float
    smoothing: float = 0.0
    kind: str = "sigmoid"

    OWN: ClassVar[tuple[str, ...]] = ("reference", "answer_tokens")  # entries of a batch that the model does not take

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        return {"loss": (len(batch["cu_seqlens"]) - 1) // 2}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in self.OWN} | {"output_log_probs": True}

    def rewards(self, out: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(n,) each: beta times the log-probability beyond the reference's, of chosen and rejected answers; for IPO of
        their tokens on average."""
        if not out.log_probs.numel():
            return out.log_probs, out.log_probs
        ahead = out.log_probs - batch["reference"]
        if self.kind == "ipo":
            ahead = ahead / batch["answer_tokens"]
        chosen, rejected = (self.beta * ahead).view(-1, 2).unbind(1)
        return chosen, rejected

    def __call__(self, out: Any, batch: Mapping[str, Any], totals: Mapping[str, int]) -> Tensor:
        chosen, rejected = self.rewards(out, batch)
        margin = chosen - rejected
        if self.kind == "ipo":
            each = (margin / self.beta - 1 / (2 * self.beta)) ** 2
        else:
            each = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        return each.sum() / totals["loss"]


class DPO(LanguageModelling):
    """Preferences. Flags: DPOConfig."""

    name: ClassVar[str] = "dpo"
    cfg: Any
    pair_columns: Mapping[str, str | None]

    def __init__(self, cfg: DPOConfig):
        """Read the data, find its columns and its pairs.

        Raises:
            ValueError: no such data or column, or a row that is no pair; see data.sources and data.schemas.preferences.
        """
        self.cfg, self.loss_fn = cfg, PreferenceLoss(cfg.beta, cfg.label_smoothing, cfg.loss_type)
        self.train, self.eval = read_splits(cfg)
        given = {role: getattr(cfg, f"{role}_column") for role in DPOConfig.roles}
        self.pair_columns = find_preference_columns(self.train, given)
        for role, name in self.pair_columns.items():
            setattr(cfg, f"{role}_column", name)
        self.columns = ChatColumns(tools=self.pair_columns["tools"])
        self.train_rows = preferences(self.train, self.pair_columns)
        self.eval_rows = None
        if self.eval is not None:
            self.eval_rows = preferences(self.eval, find_preference_columns(self.eval, self.pair_columns))

    def attach(self, model: Model) -> None:
        super().attach(model)
        if "output_log_probs" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"model: {model.config.model_type} gives no log-probabilities of answers; use another")

    def about_columns(self) -> str:
        names = ", ".join(f"{role} {name!r}" for role, name in self.pair_columns.items() if name is not None)
        return f"{names}, template {self.template.name}"

    def _label(self, table: Table, rows: Any, max_length: int) -> PreferenceExamples:  # type: ignore[override]
        options = {"too_long": self.cfg.too_long, "max_length": max_length}
        found = label_conversations(self.template, rows, lambda i: table.where(i // 2), **options)
        numbers = np.full(len(rows), -1, np.int64)
        numbers[found.rows] = np.arange(len(found.rows))
        pairs = numbers.reshape(-1, 2)
        whole = np.flatnonzero((pairs >= 0).all(1))
        if not len(whole):
            raise ValueError(f"{table.name}: in no row both answers have a token within max_length {max_length}")
        warn_left_out(table, _of_pairs(found), max_length)
        if self.model is not None:
            add_stops(self.model, found.stops, anew=self.cfg.from_scratch)
        answers = AnswerExamples(table, found.tokens, found.labels, self.context)
        unknown = np.full((len(whole), 2), np.nan, np.float32)
        assert found.cut is not None
        cut = int(found.cut[pairs[whole]].any(1).sum())
        return PreferenceExamples(kept(table, whole), found.tokens, answers, pairs[whole], unknown, cut)

    def before_training(self, model: Model, train_set: Any, eval_set: Any) -> None:
        if self.cfg.reference is not None:
            with flag_in_errors("reference"):
                model = self.load_reference(self.cfg.reference, model)
        self.set_reference(model, train_set, eval_set)

    def load_reference(self, name: str, like: Model, **options: Any) -> Model:
        """A reference model for the tokens of this run, placed on the ranks as another model is.

        Args:
            options: of modelcenter.from_pretrained.

        Raises:
            ValueError: it is of another vocabulary.
        """
        tokenizer, policy = self.template.tokenizer, policy_of(like) or False
        if name == self.cfg.reference and self.cfg.tokenizer is None:  # else the model's own is another one, too
            check_same_vocabulary(name, tokenizer)
        if self.cfg.add_tokens:  # new rows are made before anything is sharded
            model = modelcenter.from_pretrained(name, self.head, **{**options, "dtype": "float32", "policy": False})
            fit_vocabulary(model, tokenizer)
            model = engine.shard(model, policy=policy) if policy else model
        else:
            model = modelcenter.from_pretrained(name, self.head, **{**options, "dtype": "float32", "policy": policy})
        if model.config.vocab_size < len(tokenizer):
            raise ValueError(
                f"reference: {name} has {model.config.vocab_size:,} tokens, the tokenizer {len(tokenizer):,}: they do "
                "not belong together; give a reference with the vocabulary of the model"
            )
        return model

    def set_reference(self, model: Model, *examples: PreferenceExamples | None) -> None:
        """Work out the log-probabilities of all answers by the reference model. Collective."""
        for rows in examples:
            if rows is not None:
                size = self.cfg.eval_batch_size or max(self.cfg.batch_size, 8)  # auto is not settled yet
                own = rank_batches(rows, size)
                places = [torch.from_numpy(part) for part in own]
                found = log_probs_of(model, Batches(rows, own), places, len(rows), 2, self.loss_fn)
                rows.reference[:] = found.numpy()

    def metrics(self, device: torch.device | str = "cpu") -> Preference:
        return Preference()

    def feed(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        metrics.update(*self.loss_fn.rewards(out, batch))

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        batches = Batches(examples, rank_batches(examples, batch_size))
        return evaluate(model, batches, self.metrics(), self.feed, self.loss_fn)

    def samples(self, model: Model, tokenizer: Any, examples: Any) -> list[dict[str, Any]]:
        return []

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        assert isinstance(run, DPOConfig)  # a checkpoint by itself is a language model: see tasks.task_of_head
        task = cls.__new__(cls)
        task.cfg, task.loss_fn = run, PreferenceLoss(run.beta, run.label_smoothing, run.loss_type)
        task.train, task.eval, task.answered = table, None, labelled
        task.settle_template(cfg.template)
        # Without a prompt column the answers begin with what is asked.
        needed = "chosen" if run.prompt_column is None else "prompt"
        given = inference_columns(cfg, run, table, DPOConfig.roles, needed=needed)
        begun = given["chosen"] is not None or "chosen" in map(str.lower, table.columns)
        if labelled or (given["prompt"] is None and begun):
            task.pair_columns = find_preference_columns(table, given)
            task.train_rows = (preferences if labelled else questions)(table, task.pair_columns)
        else:
            prompt = {role: given[role] for role in ("prompt", "input", "system", "tools")}
            task.train_rows = rows_of(table, find_chat_columns(table, prompt, answered=False))
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.template = ChatTemplate(tokenizer, self.cfg.template)
        if not self.answered:
            return TokenExamples(self.train, prompts_of(self.template, self.train_rows, self.train, max_length))
        self.attach(model)
        self.model = None  # what ends its answers is settled
        rows = self._label(self.train, self.train_rows, max_length)
        name, began = self.cfg.reference, {}
        if name is None:
            if self.cfg.from_scratch:
                raise ValueError(
                    "reference: the run started from random weights, which are not kept; nothing to compare"
                )
            # What the run started from, as it read it.
            name, began = self.cfg.model, {"revision": self.cfg.revision, **self.cfg.model_config}
        self.set_reference(self.load_reference(name, model, **began), rows)
        return rows


def check_same_vocabulary(name: str, tokenizer: Any) -> None:
    """Raise ValueError for a model whose own tokenizer, if it has one, gives most words other numbers."""
    try:
        own = modelcenter.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return
    numbers, words = own.get_vocab(), tokenizer.get_vocab()
    same = sum(numbers.get(word) == number for word, number in words.items())
    if 2 * same < len(words):
        raise ValueError(
            f"reference: the tokenizer of {name} gives {same:,} of the {len(words):,} tokens of this one the same "
            "number: they do not belong together; give a reference with the vocabulary of the model"
        )


def _of_pairs(found: LabelledTokens) -> LabelledTokens:
    """The same with the rows of the data, not of their answers, as those left out."""
    names = ("unanswered", "unfitting")
    return LabelledTokens(**{**vars(found), **{name: np.unique(getattr(found, name) // 2) for name in names}})

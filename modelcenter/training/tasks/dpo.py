"""Preference training: DPO (Rafailov et al. 2023), with label smoothing (Mitchell 2023), and IPO (Azar et al. 2023).

A pair is two sequences of a batch, first the chosen and then the rejected answer, each after its prompt. The reference
model's log-probabilities of the pairs that a run uses are computed once, before the first step, and are stored in
batches and checkpoints.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import engine
import modelcenter
from engine.collectives import from_rank_0, together
from engine.notes import policy_of
from modelcenter.command_line.errors import flag_in_errors
from modelcenter.data.sampling import evaluation_batches
from modelcenter.data.schemas.conversations import ChatColumns, find_chat_columns
from modelcenter.data.schemas.preferences import find_preference_columns, preferences, questions
from modelcenter.data.table import Table
from modelcenter.data.tokenization.answer_labels import IGNORED, LabelledTokens, label_conversations
from modelcenter.hub.tokenizer import fit_vocabulary
from modelcenter.models.base import Model
from modelcenter.training.config import DPOConfig, TrainConfig
from modelcenter.training.evaluation import evaluate, log_probs_of
from modelcenter.training.metrics import Preference
from modelcenter.training.tasks.answer_examples import AnswerExamples
from modelcenter.training.tasks.base import takes_tokens_for_context
from modelcenter.training.tasks.column_roles import inference_columns
from modelcenter.training.tasks.examples import Batches, TokenExamples, rank_batches
from modelcenter.training.tasks.kept_reference import digest, read_reference, write_reference
from modelcenter.training.tasks.lm import (
    LanguageModelling,
    choose_template,
    read_rows,
    refuse_chat_columns,
    warn_left_out,
)
from modelcenter.training.tasks.splits import read_splits


@dataclass(frozen=True)
class PreferenceExamples(TokenExamples):
    """Pairs of a chosen and a rejected answer, which are sequences of `answers`. pairs: int64 (n, 2), their numbers;
    reference: fp32 (n, 2), their log-probabilities by the reference model, NaN if unknown. cut: the number of pairs
    with a truncated answer."""

    answers: AnswerExamples
    pairs: np.ndarray
    reference: np.ndarray
    cut: int = 0

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def truncated(self) -> int:
        return self.cut

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

    @cached_property
    def digest(self) -> str:
        """A digest of all pairs, as passed to the model, which identifies their log-probabilities."""
        tokens = self.answers.tokens
        return digest(tokens.ids, tokens.offsets, self.answers.labels, self.pairs, np.array(self.answers.context))

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of the answers, so that dropout draws different masks for each."""
        return self.pairs[rows].reshape(-1)

    def show(self, row: int, tokenizer: Any) -> str:
        chosen, rejected = (self.answers.show(int(n), tokenizer) for n in self.pairs[row])
        return f"chosen: {chosen}\n  rejected: {rejected}"


@dataclass(frozen=True)
class PreferenceLoss:
    """A TrainingLoss over pairs, computed from the log-probabilities of their answers."""

    beta: float
    smoothing: float = 0.0
    kind: str = "sigmoid"

    NOT_INPUTS: ClassVar[tuple[str, ...]] = ("reference", "answer_tokens")  # of a batch; not for the model

    @classmethod
    def from_flags(cls, cfg: DPOConfig) -> Self:
        return cls(cfg.beta, cfg.label_smoothing, cfg.loss_type)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {name: value for name, value in batch.items() if name not in self.NOT_INPUTS}
        return {**inputs, "output_log_probs": True}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        return {"loss": (len(batch["cu_seqlens"]) - 1) // 2}

    def rewards(self, out: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(n,) each: the rewards of chosen and rejected answers: beta times their log-probability minus the reference
        model's; for IPO the mean over their tokens."""
        if not out.log_probs.numel():
            return out.log_probs, out.log_probs
        log_ratios = out.log_probs - batch["reference"]
        if self.kind == "ipo":
            log_ratios = log_ratios / batch["answer_tokens"]
        chosen, rejected = (self.beta * log_ratios).view(-1, 2).unbind(1)
        return chosen, rejected

    def __call__(self, out: Any, batch: Mapping[str, Any], totals: Mapping[str, int]) -> Tensor:
        chosen, rejected = self.rewards(out, batch)
        margin = chosen - rejected
        if self.kind == "ipo":
            losses = (margin / self.beta - 1 / (2 * self.beta)) ** 2
        else:
            losses = -(1 - self.smoothing) * F.logsigmoid(margin) - self.smoothing * F.logsigmoid(-margin)
        return losses.sum() / totals["loss"]


@dataclass(eq=False, kw_only=True, repr=False)
class DPO(LanguageModelling):
    """Preferences. Flags: DPOConfig.

    Attributes:
        rows: the chosen and the rejected conversation of each row; without labels, prompts. pair_columns: {role:
            column} of the pairs. sets: the sets for which `precompute` found reference log-probabilities. start: the
            model that computed them if no --reference is given.
    """

    name: ClassVar[str] = "dpo"
    loss_fn: PreferenceLoss
    pair_columns: Mapping[str, str | None] = field(default_factory=dict)
    sets: list[PreferenceExamples] = field(default_factory=list)
    start: str = ""

    @classmethod
    def from_flags(cls, cfg: DPOConfig) -> Self:  # type: ignore[override]
        """See Task. Errors: see also data.schemas.preferences."""
        table, eval_table = read_splits(cfg)
        columns = find_preference_columns(table, cfg.role_columns())
        cfg.set_role_columns(columns)
        rows, eval_rows = preferences(table, columns), None
        if eval_table is not None:
            eval_rows = preferences(eval_table, find_preference_columns(eval_table, columns))
        return cls(
            cfg=cfg,
            loss_fn=PreferenceLoss.from_flags(cfg),
            table=table,
            rows=rows,
            columns=ChatColumns(tools=columns["tools"]),
            pair_columns=columns,
            eval_table=eval_table,
            eval_rows=eval_rows,
        )

    def on_model_built(self, model: Model) -> None:
        super().on_model_built(model)
        if "output_log_probs" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"model: {model.config.model_type} cannot compute log-probabilities of answers; use another"
            )

    def describe_columns(self) -> str:
        assert self.template is not None
        names = ", ".join(f"{role} {name!r}" for role, name in self.pair_columns.items() if name is not None)
        return f"{names}, template {self.template.name}"

    def _labelled_examples(self, table: Table, rows: Any, max_length: int) -> tuple[PreferenceExamples, LabelledTokens]:
        assert self.template is not None
        options = {"too_long": self.cfg.too_long, "max_length": max_length}
        labelled = label_conversations(self.template, rows, lambda i: table.where(i // 2), **options)
        numbers = np.full(len(rows), -1, np.int64)
        numbers[labelled.rows] = np.arange(len(labelled.rows))
        pairs = numbers.reshape(-1, 2)
        whole = np.flatnonzero((pairs >= 0).all(1))
        if not len(whole):
            raise ValueError(
                f"{table.name}: no row has two answers that each have a token within max_length {max_length}"
            )
        warn_left_out(table, _of_pairs(labelled), max_length, self.cfg.too_long != "cut")
        context = self.model is not None and takes_tokens_for_context(self.model)
        answers = AnswerExamples(table, labelled.tokens, labelled.labels, context)
        unknown = np.full((len(whole), 2), np.nan, np.float32)
        assert labelled.cut is not None
        cut = int(labelled.cut[pairs[whole]].any(1).sum())
        examples = PreferenceExamples(table.subset(whole), labelled.tokens, answers, pairs[whole], unknown, cut)
        return examples, labelled

    def precompute(
        self,
        model: Model,
        train_set: Any,
        eval_set: Any,
        checkpoint: Path | None,
        rows_needed: Callable[[Any], np.ndarray],
    ) -> None:
        self.sets = [examples for examples in (train_set, eval_set) if examples is not None]
        self.start = str(self.cfg.model)
        needed = [rows_needed(examples) for examples in self.sets]
        if checkpoint is not None:
            self._take_kept(checkpoint, needed)
        unknown = [(examples, _unknown(examples, rows)) for examples, rows in zip(self.sets, needed, strict=True)]
        if not any(len(rows) for _, rows in unknown):
            return
        if self.cfg.reference is not None:
            with flag_in_errors("reference"):
                model = self.load_reference(self.cfg.reference, model)
        self.set_reference(model, *unknown)

    def _take_kept(self, checkpoint: Path, needed: Sequence[np.ndarray]) -> None:
        """Use the log-probabilities in a checkpoint. Collective.

        Args:
            needed: numbers of the pairs of each set that the run uses.

        Raises:
            ValueError: some but not all of the needed ones of a set are there, and another model computed them.
        """
        found: list[np.ndarray | None] = []
        start: str | None = None
        with together(f"reading the reference's log-probabilities in {checkpoint}"):
            if engine.rank() == 0:
                kept, start = read_reference(checkpoint, self._reference_name())
                found = [kept.get(examples.digest) for examples in self.sets]
        found, start = from_rank_0((found, start))
        missing = 0  # in partly stored sets
        for examples, rows, log_probs in zip(self.sets, needed, found, strict=True):
            if log_probs is not None:
                examples.reference[:] = log_probs
                missing += len(_unknown(examples, rows))
        if start is None or all(log_probs is None for log_probs in found):
            return
        if self.cfg.reference is None and start != self.start and missing:
            raise ValueError(
                f"model: got {self.cfg.model}, but the reference is the initial model of the run in {checkpoint}, and "
                f"log-probabilities that are not stored there are needed; give --model {start}, or as many steps as "
                "that run had"
            )
        self.start = start

    def _reference_name(self) -> str:
        return "the start" if self.cfg.reference is None else self.cfg.reference

    def write_extra(self, folder: Path) -> None:
        kept = {examples.digest: examples.reference for examples in self.sets}
        write_reference(folder, self._reference_name(), self.start, kept)

    def load_reference(self, name: str, like: Model, **options: Any) -> Model:
        """Load a reference model for the tokens of this run, sharded like any other model.

        Args:
            options: of modelcenter.from_pretrained.

        Raises:
            ValueError: its vocabulary differs.
        """
        tokenizer, policy = self.tokenizer, policy_of(like) or False
        if name == self.cfg.reference and self.cfg.tokenizer is None:  # else the model's own may differ, too
            check_same_vocabulary(name, tokenizer)
        if self.cfg.add_tokens:  # rows are added before sharding
            model = modelcenter.from_pretrained(name, self.head, **{**options, "dtype": "float32", "policy": False})
            fit_vocabulary(model, tokenizer)
            model = engine.shard(model, policy=policy) if policy else model
        else:
            model = modelcenter.from_pretrained(name, self.head, **{**options, "dtype": "float32", "policy": policy})
        if model.config.vocab_size < len(tokenizer):
            raise ValueError(
                f"reference: {name} has {model.config.vocab_size:,} tokens, the tokenizer {len(tokenizer):,}, so they "
                "do not belong together; give a reference with the vocabulary of the model"
            )
        return model

    def set_reference(self, model: Model, *sets: tuple[PreferenceExamples, np.ndarray]) -> None:
        """Compute the log-probabilities of both answers by the reference model. Collective.

        Args:
            sets: each with the numbers of the pairs to process.

        Raises:
            ValueError: an answer of any pair, with its prompt, is longer than the model's position table.
        """
        longest = max(int(examples.answers.lengths[examples.pairs].max()) for examples, _ in sets)
        positions = model.config.max_tokens
        if model.bounded and positions is not None and longest > positions:
            raise ValueError(
                f"reference: {model.base_name} has {positions} positions, but the longest answer with its prompt has "
                f"{longest} tokens; truncate with --max_length {positions}, or give a reference with more positions"
            )
        for examples, numbers in sets:
            if not len(numbers):
                continue
            assert self.cfg.batch_size != "auto"  # resolved, as in the flags that a run saves
            size = self.cfg.eval_batch_size or max(self.cfg.batch_size, 8)
            parts = evaluation_batches(examples.lengths[numbers], size, engine.data_size())[engine.data_rank()]
            batches = Batches(examples, [numbers[part] for part in parts])
            places = [torch.from_numpy(part) for part in parts]
            found = log_probs_of(model, batches, places, len(numbers), 2, self.loss_fn)
            examples.reference[numbers] = found.numpy()

    def metrics(self, device: torch.device | str = "cpu") -> Preference:
        return Preference()

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        metrics.update(*self.loss_fn.rewards(out, batch))

    def evaluate(self, model: Model, examples: Any, batch_size: int) -> dict[str, float | None]:
        batches = Batches(examples, rank_batches(examples, batch_size))
        return evaluate(model, batches, self.metrics(), self.update_metrics, self.loss_fn)

    def samples(self, model: Model, tokenizer: Any, examples: Any) -> list[dict[str, Any]]:
        return []

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        assert isinstance(run, DPOConfig)  # a checkpoint without a run is a language model: see tasks.task_of_head
        choose_template(run, cfg.template)
        # Without a prompt column, the answers include the prompt.
        needed = "chosen" if run.prompt_column is None else "prompt"
        given = inference_columns(cfg, run, table, DPOConfig.roles, needed=needed)
        has_answers = given["chosen"] is not None or "chosen" in map(str.lower, table.columns)
        columns: Mapping[str, str | None] = {}
        if labelled or (given["prompt"] is None and has_answers):
            columns = find_preference_columns(table, given)
            rows: Any = (preferences if labelled else questions)(table, columns)
        else:
            prompt = {role: given[role] for role in ("prompt", "input", "system", "tools")}
            found = find_chat_columns(table, prompt, answered=False)
            refuse_chat_columns(cfg, found)
            rows = read_rows(table, found)
        loss_fn = PreferenceLoss.from_flags(run)
        return cls(cfg=run, loss_fn=loss_fn, table=table, rows=rows, pair_columns=columns, labelled=labelled)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        self.use_tokenizer(tokenizer)
        if not self.labelled:
            return self._prompts(max_length)
        self.on_model_built(model)
        examples, _ = self._labelled_examples(self.table, self.rows, max_length)
        name, options = self.cfg.reference, {}
        if name is None:
            if self.cfg.from_scratch:
                raise ValueError(
                    "reference: the run started from random weights, which are not kept, so there is nothing to "
                    "compare with"
                )
            # The initial model of the run, with the run's options.
            name, options = self.cfg.model, {"revision": self.cfg.revision, **self.cfg.model_config}
        self.set_reference(self.load_reference(name, model, **options), (examples, np.arange(len(examples))))
        return examples


def check_same_vocabulary(name: str, tokenizer: Any) -> None:
    """Raise ValueError for a model whose own tokenizer, if it has one, maps most tokens to other ids."""
    try:
        own = modelcenter.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return
    numbers, words = own.get_vocab(), tokenizer.get_vocab()
    same = sum(numbers.get(word) == number for word, number in words.items())
    if 2 * same < len(words):
        raise ValueError(
            f"reference: the tokenizer of {name} gives {same:,} of the {len(words):,} tokens of this one the same "
            "number, so they do not belong together; give a reference with the vocabulary of the model"
        )


def _unknown(examples: PreferenceExamples, rows: np.ndarray) -> np.ndarray:
    """The pairs among `rows` whose log-probabilities are not known."""
    return rows[np.isnan(examples.reference[rows]).any(1)]


def _of_pairs(found: LabelledTokens) -> LabelledTokens:
    """The same, with the left-out rows numbered as rows of the data instead of answers."""
    names = ("unanswered", "unfitting")
    return LabelledTokens(**{**vars(found), **{name: np.unique(getattr(found, name) // 2) for name in names}})

"""What a task is to the training loop, and to predict and evaluate.

A task defines the examples, the head of the model, the metrics and the predictions. It reads its data when it is
created, so that invalid data is an error before anything else starts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from modelcenter.data import sources
from modelcenter.data.examples import Examples
from modelcenter.data.schemas.forms import apply_form
from modelcenter.data.tokenization.special_tokens import SpecialTokens
from modelcenter.models.base import Model
from modelcenter.training.accumulation import TrainingLoss
from modelcenter.training.config import LMConfig, PretrainConfig, TrainConfig
from modelcenter.training.distillation.loss import Distillation
from modelcenter.training.evaluation import Batches as EvaluationBatches
from modelcenter.training.evaluation import MetricUpdate, evaluate
from modelcenter.training.metrics import Score
from modelcenter.training.tasks.column_roles import inference_form
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.splits import inference_split


@dataclass(eq=False, kw_only=True, repr=False)
class Task(ABC):
    """A kind of training. Created by `from_flags` for a training run, by `for_inference` for a trained model.

    A training run calls the methods in this order: from_flags, adopt_label_order (if it starts from a checkpoint),
    on_tokenizer_loaded, model_options and, for random weights, special_tokens, wrap, on_model_built, learn_from (if
    there is a teacher), tokenize, metric_names, precompute, on_train_begin, evaluate, samples, write_extra and
    save_model. predict and evaluate call read_data, for_inference, trained_model, inference_examples, and predict or
    evaluate.

    Attributes:
        name: its key in TASKS. loss_fn: the training loss; None: that of the model's own head. distillation: `loss_fn`,
            if the model has a teacher.
    """

    name: ClassVar[str]
    wraps_model: ClassVar[bool] = False  # whether `wrap` builds the model to train around --model
    loss_fn: TrainingLoss | None = None
    distillation: Distillation | None = None

    @property
    @abstractmethod
    def head(self) -> str:
        """The task of the model, as in modelcenter.from_pretrained."""

    # -- training ----------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def from_flags(cls, cfg: Any) -> Self:
        """Create the task of a training run: read or open its data, find columns and labels, and write what was found
        into the flags.

        Args:
            cfg: the flags, an instance of the task's own TrainConfig.

        Raises:
            ValueError: no such data, columns or labels, or rows that the task cannot use.
        """

    def adopt_label_order(self, names: Sequence[str]) -> None:
        """Called before the model is built: number the classes as the initial checkpoint does, if it has the same ones,
        so that its head keeps its meaning. names: the checkpoint's classes, in order."""
        return

    def model_options(self) -> dict[str, Any]:
        """Fields of the model's configuration that depend on the data."""
        return {}

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        """The tokenizer's special tokens, as fields of the configuration of a model with random weights, since a
        preset's belong to its family's tokenizer."""
        ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        return {"pad_token_id": tokenizer.pad_token_id} | {n: token for n, token in ends.items() if token is not None}

    def on_tokenizer_loaded(self, tokenizer: Any) -> None:
        """Called before the model is built. Raises ValueError if flags do not fit the tokenizer."""
        return

    def wrap(self, model: Model, load: Callable[..., Model]) -> Model:
        """Build the model to train around that of --model, before it is sharded.

        Args:
            load: `load(name or config, task, **options)` loads another model with the options of the flags, unsharded.

        Raises:
            ValueError: flags do not fit the model.
        """
        return model

    def on_model_built(self, model: Model) -> None:
        """Called after the model is built, before the data are tokenised."""
        return

    @abstractmethod
    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Examples, Examples | None]:
        """The examples to train on, and those to evaluate on (None: there are none)."""

    def precompute(
        self,
        model: Model,
        train_set: Examples,
        eval_set: Examples | None,
        checkpoint: Path | None,
        rows_needed: Callable[[Examples], np.ndarray],
    ) -> None:
        """Called before the first step, and before a checkpoint is loaded: compute what the task needs from the initial
        model. Collective.

        Args:
            checkpoint: what the run resumes from; what `write_extra` wrote there need not be computed again.
            rows_needed: `rows_needed(examples)` gives the numbers of the examples that the run will use; not for a
                stream.

        Raises:
            ValueError: the model lacks what the task needs.
        """
        return

    def write_extra(self, folder: Path) -> None:
        """Write into a checkpoint what `precompute` found, and what the model needs besides its weights. On rank 0."""
        return

    def save_model(self, model: Model, target: Path, tokenizer: Any, card: dict[str, Any]) -> None:
        """Write the trained model as the Hugging Face directory `target`. Collective."""
        model.save_pretrained(target, tokenizer=tokenizer, card=card)

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        """Called before the first step, after a checkpoint is loaded."""
        return

    def on_step(self, step: int, steps: int) -> None:
        """Called before each step, numbered from 0, of a run of `steps`."""
        return

    @abstractmethod
    def describe_columns(self) -> str:
        """Which columns are used, in words."""

    def learn_from(self, distillation: Distillation) -> None:
        """Train the model with a teacher. Called after `on_model_built`, before the data are tokenised."""
        self.loss_fn = self.distillation = distillation

    # -- evaluation --------------------------------------------------------------------------------------------------

    @abstractmethod
    def metrics(self, device: torch.device | str = "cpu") -> Score:
        """New, empty metrics."""

    def metric_names(self, examples: Examples) -> list[str]:
        """The metrics of these examples by which models can be compared. Collective."""
        metrics = self.metrics()
        return list(dict.fromkeys(["loss", metrics.main, *metrics.result()]))

    @property
    def teacher_metric_names(self) -> list[str]:
        """The further metrics, by which models can be compared, that a teacher adds."""
        return [] if self.distillation is None else self.distillation.metric_names

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        """Add the model's output for a batch to the metrics."""
        metrics.update(out.logits, batch["labels"])

    def evaluate(self, model: Model, examples: Examples, batch_size: int) -> dict[str, float | None]:
        """The loss of the head and the metrics over all examples. Collective."""
        batches = Batches(examples, rank_batches(examples, batch_size))
        return self.run_evaluation(model, batches, self.metrics(model.device), self.update_metrics)

    def run_evaluation(
        self,
        model: Model,
        batches: EvaluationBatches,
        metrics: Score | None = None,
        feed: MetricUpdate | None = None,
    ) -> dict[str, float | None]:
        """evaluation.evaluate with the loss of the head, and compared with the teacher if there is one. Collective."""
        if self.distillation is not None:
            return self.distillation.evaluate(model, batches, metrics, feed)
        return evaluate(model, batches, metrics, feed)

    def length_limit(self, max_length: int) -> str:
        """The flag that limits the length of texts, and its value, for messages. max_length: that of a row."""
        return f"max_length {max_length}"

    def count_rows(self, examples: Examples) -> int:
        """The number of rows of the data; a long row may make several examples."""
        return len(examples)

    def samples(self, model: Model, tokenizer: Any, examples: Examples) -> list[dict[str, Any]]:
        """The model's outputs for some examples, for people to read: lines of samples.jsonl. Collective."""
        return []

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def read_data(cls, cfg: Any, run: TrainConfig | None, labelled: bool) -> Any:
        """Read the rows for `for_inference`, which explains the arguments."""
        source = sources.find(cfg.data or [], cfg.data_config)
        return apply_form(source.read(inference_split(source, cfg.split, labelled)), inference_form(cfg, run), cls.name)

    @classmethod
    @abstractmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Any, labelled: bool) -> Self:
        """Create the task for using a trained model on some rows, whose columns it finds.

        Args:
            cfg: a PredictConfig. run: the flags of the run that trained the model; None: unknown. table: from
                `read_data`. labelled: the rows must have labels, for an evaluation.

        Raises:
            ValueError: no such columns, or rows that the task cannot use.
        """

    def trained_model(self, source: str, load: Callable[..., Model], policy: Any) -> Model:
        """Load the model for the rows of `for_inference`, on all ranks.

        Args:
            source: its folder or Hub name. load: `load(source=source, policy=policy)` loads a model. policy: how to
                shard it.

        Raises:
            ValueError: the task needs more than this model.
        """
        return load()

    @abstractmethod
    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Examples:
        """The rows of `for_inference` as examples. Called after the model is loaded.

        Raises:
            ValueError: the model does not know a label, or rows are too long for it.
        """

    @abstractmethod
    def predict(self, model: Model, tokenizer: Any, examples: Examples, cfg: Any) -> Iterator[dict[str, Any]]:
        """The model's prediction for each row, in order, on rank 0; an empty iterator on the other ranks. Collective.

        Args:
            examples: from `inference_examples`. cfg: a PredictConfig.
        """


def decoder_token(tokenizer: Any, name: str, use: str) -> int:
    """A special token of the tokenizer that an encoder-decoder needs. use: the purpose, as a verb: "starts", "ends".

    Raises:
        ValueError: the tokenizer has no such token.
    """
    token: int | None = getattr(tokenizer, f"{name}_token_id")
    if token is None:
        raise ValueError(
            f"tokenizer: it has no {name}_token, with which an encoder-decoder {use} a text; set it in the tokenizer's "
            "files"
        )
    return token


def takes_tokens_for_context(model: Model) -> bool:
    """Whether tokens are by default context, which also sees later tokens, as in CPM-Ant."""
    return getattr(model, "input_defaults", {}).get("context") == 1


def plain_text_context(model: Model, run: TrainConfig | None, tokenizer: Any) -> int | None:
    """If a run trained a model that takes tokens for context on plain text: how many tokens at the beginning of a text
    were context, which are those that the tokenizer puts there. None for other runs and models."""
    if not takes_tokens_for_context(model):
        return None
    if isinstance(run, PretrainConfig):
        return 0
    plain = isinstance(run, LMConfig) and run.text_column is not None
    return len(SpecialTokens.of(tokenizer).before) if plain else None

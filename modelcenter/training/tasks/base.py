"""What a task is, for the one loop and for predict and evaluate.

A task defines the examples, the head of the model, the metrics and the predictions. It reads its data when it is
created, so that wrong data is an error before anything else starts.
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
    """One kind of training. Made by `from_flags` for a training run, by `for_inference` for a trained model.

    A training run calls the methods in this order: from_flags, adopt_label_order (if it starts from a checkpoint),
    on_tokenizer_loaded, model_options and, for random weights, special_tokens, wrap, on_model_built, learn_from (if
    there is a teacher), tokenize, metric_names, precompute, on_train_begin, evaluate, samples, write_extra and
    save_model. predict and evaluate call read_data, for_inference, trained_model, inference_examples, and predict or
    evaluate.

    Attributes:
        name: in TASKS. loss_fn: what is trained on; None: the loss of the model's own head. distillation: the same
            where the model has a teacher.
    """

    name: ClassVar[str]
    wraps_model: ClassVar[bool] = False  # what trains is made of --model by `wrap`
    loss_fn: TrainingLoss | None = None
    distillation: Distillation | None = None

    @property
    @abstractmethod
    def head(self) -> str:
        """Task of the model."""

    # -- training ----------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def from_flags(cls, cfg: Any) -> Self:
        """The task of a training run: reads or opens its data, finds columns and labels, and writes those that were
        found into the flags.

        Args:
            cfg: the flags, of the task's own TrainConfig.

        Raises:
            ValueError: no such data, columns or labels, or rows that the task cannot use.
        """

    def adopt_label_order(self, names: Sequence[str]) -> None:
        """Before the model is built: number the classes as the checkpoint does that training starts from, if it has the
        same ones, so that the classes of its head keep their meaning. names: its classes, in order."""
        return

    def model_options(self) -> dict[str, Any]:
        """Fields of the model's configuration that the data decide."""
        return {}

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        """Special tokens of the tokenizer, as fields of the configuration of a model with random weights: those of a
        preset belong to the tokenizer of its family."""
        ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        return {"pad_token_id": tokenizer.pad_token_id} | {n: token for n, token in ends.items() if token is not None}

    def on_tokenizer_loaded(self, tokenizer: Any) -> None:
        """Before the model is built. Raises ValueError: flags that do not fit the tokenizer."""
        return

    def wrap(self, model: Model, load: Callable[..., Model]) -> Model:
        """The model that trains, around the one of --model, before it is sharded.

        Args:
            load: `load(name or config, task, **options)`: another model as the flags say, not sharded.

        Raises:
            ValueError: flags that do not fit the model.
        """
        return model

    def on_model_built(self, model: Model) -> None:
        """After the model is built, before the data are tokenised."""
        return

    @abstractmethod
    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Examples, Examples | None]:
        """The examples to train on, and those to evaluate on if there are any."""

    def precompute(
        self,
        model: Model,
        train_set: Examples,
        eval_set: Examples | None,
        checkpoint: Path | None,
        rows_needed: Callable[[Examples], np.ndarray],
    ) -> None:
        """Before the first step and before a checkpoint is loaded: what the task needs of the model that it starts
        from. Collective.

        Args:
            checkpoint: the run goes on from it; what `write_extra` put there need not be computed again.
            rows_needed: numbers of the examples of a set that the run will use; not of a stream.

        Raises:
            ValueError: the model has not what the task needs.
        """
        return

    def write_extra(self, folder: Path) -> None:
        """Write into a checkpoint what `precompute` found, and what the model needs beside its weights. On rank 0."""
        return

    def save_model(self, model: Model, target: Path, tokenizer: Any, card: dict[str, Any]) -> None:
        """Write what the run has trained as the Hugging Face directory `target`. Collective."""
        model.save_pretrained(target, tokenizer=tokenizer, card=card)

    def on_train_begin(self, model: Model, tokenizer: Any) -> None:
        """Before the first step, after a checkpoint was loaded."""
        return

    @abstractmethod
    def describe_columns(self) -> str:
        """Which columns are used, in words."""

    def learn_from(self, distillation: Distillation) -> None:
        """Train the model with a teacher. After `on_model_built`, before the data are tokenised."""
        self.loss_fn = self.distillation = distillation

    # -- evaluation --------------------------------------------------------------------------------------------------

    @abstractmethod
    def metrics(self, device: torch.device | str = "cpu") -> Score:
        """New, empty metrics."""

    def metric_names(self, examples: Examples) -> list[str]:
        """The metrics of an evaluation of these examples by which models can be compared. Collective."""
        metrics = self.metrics()
        return list(dict.fromkeys(["loss", metrics.main, *metrics.result()]))

    @property
    def teacher_metric_names(self) -> list[str]:
        """Those of its metrics by which models can be compared that a teacher adds."""
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
        """evaluation.evaluate by the loss of the head, and beside the teacher, if there is one. Collective."""
        if self.distillation is not None:
            return self.distillation.evaluate(model, batches, metrics, feed)
        return evaluate(model, batches, metrics, feed)

    def length_limit(self, max_length: int) -> str:
        """The flag that says where texts are cut, and its value, for people. max_length: of a row."""
        return f"max_length {max_length}"

    def count_rows(self, examples: Examples) -> int:
        """Rows of the data, of which a long one may make several examples."""
        return len(examples)

    def samples(self, model: Model, tokenizer: Any, examples: Examples) -> list[dict[str, Any]]:
        """The model's outputs for some examples, for people: lines of samples.jsonl. Collective."""
        return []

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def read_data(cls, cfg: Any, run: TrainConfig | None, labelled: bool) -> Any:
        """The rows that a trained model is used on, for `for_inference`. Arguments: see there."""
        source = sources.find(cfg.data or [], cfg.data_config)
        return apply_form(source.read(inference_split(source, cfg.split, labelled)), inference_form(cfg, run), cls.name)

    @classmethod
    @abstractmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Any, labelled: bool) -> Self:
        """The task for rows that a trained model is used on; finds their columns.

        Args:
            cfg: a PredictConfig. run: the flags of the run that trained the model; None: they are not known. table:
                from `read_data`. labelled: the rows have labels, for an evaluation.

        Raises:
            ValueError: no such columns, or rows that the task cannot use.
        """

    def trained_model(self, source: str, load: Callable[..., Model], policy: Any) -> Model:
        """The model for the rows of `for_inference`, on all ranks.

        Args:
            source: its folder or Hub name. load: `load(source=source, policy=policy)` loads one. policy: how it is
                sharded.

        Raises:
            ValueError: it is not all that the task needs.
        """
        return load()

    @abstractmethod
    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Examples:
        """After the model is loaded: the rows of `for_inference` as examples.

        Raises:
            ValueError: labels that the model does not know, or rows that are too long for it.
        """

    @abstractmethod
    def predict(self, model: Model, tokenizer: Any, examples: Examples, cfg: Any) -> Iterator[dict[str, Any]]:
        """The model's prediction for each row, in order, on rank 0; an empty iterator on the other ranks. Collective.

        Args:
            examples: from `inference_examples`. cfg: a PredictConfig.
        """


def decoder_token(tokenizer: Any, name: str, use: str) -> int:
    """A special token of the tokenizer that an encoder-decoder needs. use: what for, as a verb: "starts", "ends".

    Raises:
        ValueError: the tokenizer has none.
    """
    token: int | None = getattr(tokenizer, f"{name}_token_id")
    if token is None:
        raise ValueError(
            f"tokenizer: it has no {name}_token; an encoder-decoder {use} a text with it: set it in the tokenizer's "
            "files"
        )
    return token


def takes_tokens_for_context(model: Model) -> bool:
    """Whether all tokens are context, which sees what comes after it, unless a batch says otherwise: CPM-Ant's."""
    return getattr(model, "input_defaults", {}).get("context") == 1


def plain_text_context(model: Model, run: TrainConfig | None, tokenizer: Any) -> int | None:
    """How many tokens at the beginning of a text were context for a model that takes all for it, where the run trained
    it on plain text: those that the tokenizer puts before it. None: another run, or another model."""
    if not takes_tokens_for_context(model):
        return None
    if isinstance(run, PretrainConfig):
        return 0
    plain = isinstance(run, LMConfig) and run.text_column is not None
    return len(SpecialTokens.of(tokenizer).before) if plain else None

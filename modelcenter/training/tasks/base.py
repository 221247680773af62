"""What a task is, for the one loop and for predict and evaluate.

A task says what its rows are made of, which head it asks the model for and how it is judged. It is made from its flags
and has read its data by then, so that wrong data is an error before anything else starts.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

import engine
from modelcenter.data import sources
from modelcenter.data.batching.collate import pack
from modelcenter.data.batching.mixture import mixed, parse_weights
from modelcenter.data.examples import Examples
from modelcenter.data.sampling import evaluation_batches
from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.schemas.forms import apply_form
from modelcenter.data.table import Table, concatenate
from modelcenter.data.tokenization.tokenize import Tokens
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.metrics import Score


@dataclass(frozen=True)
class TokenExamples:
    """Examples that are rows of tokens. A subclass adds what is asked of them to `batch` and `show`."""

    table: Table
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def truncated(self) -> int:
        return self.tokens.truncated

    @property
    def lengths(self) -> np.ndarray:
        return self.tokens.lengths

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return pack(self.tokens, rows)

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows)

    def where(self, row: int) -> str:
        return self.table.where(row)

    def fingerprint(self) -> Any:
        return self.table.fingerprint()

    def show(self, row: int, tokenizer: Any) -> str:
        return shortened(tokenizer.decode(self.tokens.row(row)))


class Batches:
    """Batches that are made when they are asked for; those of an evaluation may be read more than once."""

    def __init__(self, examples: Examples, rows: list[np.ndarray]):
        self.examples, self.rows = examples, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.examples.batch(self.rows[i])  # the IndexError of rows ends a loop over the batches


class LossBatches(Batches):
    """Batches whose loss alone is asked for: vocabulary logits are not held."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return super().__getitem__(i) | {"output_logits": False}


class Task(ABC):
    """One kind of work. A subclass reads its data in __init__(cfg), from the flags of its own TrainConfig.

    name: in TASKS. head: task of the model.
    """

    name: ClassVar[str]
    head: ClassVar[str]
    # loss_fn of training.accumulate, where the head's own loss is not what is trained on.
    loss_fn: Any = None

    # -- training ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def __init__(self, cfg: TrainConfig): ...

    def model_options(self) -> dict[str, Any]:
        """What the model's configuration must say."""
        return {}

    def number_as(self, names: Sequence[str]) -> None:
        """Number the classes as the checkpoint does that training starts from, where it has the same: those of its head
        keep their meaning. names: its classes, in order."""
        return

    def special_tokens(self, tokenizer: Any) -> dict[str, Any]:
        """What the configuration of a model from random weights says of the tokenizer's special tokens: what a preset
        says of the first and the last of a text belongs to its family's tokenizer."""
        ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        return {"pad_token_id": tokenizer.pad_token_id} | {n: token for n, token in ends.items() if token is not None}

    def prepare_model(self, model: Model, tokenizer: Any) -> None:
        """Last look at the model before it trains, such as a pass over the data with the untrained one."""
        return

    def attach(self, model: Model) -> None:
        """First look at the model, before rows are tokenised."""
        return

    @abstractmethod
    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Examples, Examples | None]:
        """The rows to train on, and those to evaluate on if there are any."""

    def before_training(self, model: Model, train_set: Examples, eval_set: Examples | None) -> None:
        """What the task needs of the model as it is before the first step, for all rows. Collective. A run that goes on
        does it again, before it reads its checkpoint."""
        return

    @abstractmethod
    def about_columns(self) -> str:
        """Which columns are used, in words."""

    # -- judging -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def metrics(self, device: torch.device | str = "cpu") -> Score:
        """New, empty metrics."""

    def metric_names(self, examples: Examples) -> list[str]:
        """What an evaluation of these rows gives that says which model is better. Collective."""
        metrics = self.metrics()
        return list(dict.fromkeys(["loss", metrics.main, *metrics.result()]))

    def feed(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        """Give the metrics what the model made of a batch."""
        metrics.update(out.logits, batch["labels"])

    def evaluate(self, model: Model, examples: Examples, batch_size: int) -> dict[str, float | None]:
        """The loss and the metrics over all rows. Collective."""
        batches = Batches(examples, rank_batches(examples, batch_size))
        return evaluate(model, batches, self.metrics(model.device), self.feed)

    def count(self, examples: Examples) -> int:
        """Rows of the data, where examples are parts of them."""
        return len(examples)

    def samples(self, model: Model, tokenizer: Any, examples: Examples) -> list[dict[str, Any]]:
        """What the model makes of some rows, for people: lines of samples.jsonl. Collective."""
        return []

    # -- use of a trained model --------------------------------------------------------------------------------------

    @classmethod
    def read(cls, cfg: Any, run: TrainConfig | None, labelled: bool) -> Any:
        """The rows that a trained model shall work on, for `to_use`."""
        source = sources.find(cfg.data or [], cfg.data_config)
        return apply_form(source.read(inference_split(source, cfg.split, labelled)), inference_form(cfg, run), cls.name)

    @classmethod
    @abstractmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Table, labelled: bool) -> Self:
        """The task for rows that a trained model shall work on: the columns are found now.

        Args:
            cfg: a PredictConfig. run: the flags of the run that made the model, if it is known. labelled: the rows
                have what the model is to be compared with.
        """

    @abstractmethod
    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> Examples:
        """The rows of `to_use`, as the model takes them. Raises ValueError: labels that the model does not know."""

    @abstractmethod
    def predict(self, model: Model, tokenizer: Any, examples: Examples, cfg: Any) -> Iterator[dict[str, Any]]:
        """What the model says of each row, in order, on rank 0 (the other ranks get nothing to read). Collective."""


def rank_batches(examples: Examples, batch_size: int) -> list[np.ndarray]:
    """This rank's batches of an evaluation."""
    return evaluation_batches(examples.lengths, batch_size, engine.data_size())[engine.data_rank()]


def read_splits(cfg: TrainConfig) -> tuple[Table, Table | None]:
    """The rows to train on and, if the flags or the data set name some, the rows to evaluate on."""
    cfg.require("train_data")

    def read(source: sources.Source, split: str) -> Table:
        return apply_form(source.read(split), cfg.form, cfg.task)

    found, weights = train_sources(cfg)
    tables = [read(source, cfg.train_split) for source in found]
    train = tables[0] if weights is None else mixed(tables, weights)
    if cfg.eval_fraction is not None:
        groups = groups_of(train, group_column(train, getattr(cfg, "group_column", None), cfg.form))
        return sources.hold_out(train, cfg.eval_fraction, cfg.seed, groups)
    if cfg.eval_data is not None:
        other = sources.find(cfg.eval_data, cfg.data_config if cfg.eval_data == cfg.train_data else None)
        held = read(other, cfg.eval_split or evaluation_split(other))
        return train, dataclasses.replace(held, like=train.name)
    if cfg.eval_split is not None:
        return train, concatenate([read(source, cfg.eval_split) for source in found])
    split = sources.SPLITS["dev"]
    others = [read(source, split) for source in found if split in source.splits and cfg.train_split != split]
    return train, concatenate(others) if others else None


def train_sources(cfg: TrainConfig) -> tuple[list[sources.Source], list[float] | None]:
    """What train_data names: one source; or the parts of a mixture, and their weights.

    Raises:
        ValueError: nothing is there; weights of some parts only, or for a task that mixes nothing.
    """
    data = cfg.train_data or []
    weighted = parse_weights(data)
    if weighted is None:
        return [sources.find(data, cfg.data_config)], None
    if not cfg.mixes:
        raise ValueError(f"train_data: {data[0]}: {cfg.task} takes no weights; write {weighted[0][0]}")
    return [sources.find(path, cfg.data_config) for path, _ in weighted], [weight for _, weight in weighted]


def evaluation_split(source: sources.Source) -> str:
    """The split meant when a data set is named for evaluation: validation, else test, else its only one."""
    check_one_split(source, "eval_split")
    for split in ("validation", "test"):
        if split in source.splits:
            return split
    if len(source.splits) > 1:
        raise ValueError(
            f"eval_split: {source.name} has the splits {', '.join(source.splits)}; say which to evaluate on"
        )
    return source.splits[0]


def check_one_split(source: sources.Source, flag: str) -> None:
    """Raise ValueError where one split would be chosen, and a file that was named beside a folder be left out."""
    if source.unsplit is not None:
        raise ValueError(
            f"{flag}: {source.unsplit} is of no split, and beside it there are the splits {', '.join(source.splits)}: "
            f"name the files that are meant, or give {flag}"
        )


def inference_split(source: sources.Source, given: str | None, labelled: bool) -> str:
    """The split that a trained model is used on: the one given, else the usual one."""
    if given is None:
        check_one_split(source, "split")
    order = ("validation", "test") if labelled else ("test", "validation")
    return given or next((split for split in order if split in source.splits), source.splits[0])


def strings(table: Table, name: str) -> list[str]:
    """The texts of a column.

    Raises:
        ValueError: a row without text.
    """
    values = table.columns[name]
    missing = next((i for i, v in enumerate(values) if v is None or isinstance(v, (list, dict, bytes))), None)
    if missing is not None:
        found = "no text" if values[missing] is None else f"{values[missing]!r:.60}, expected a text,"
        raise ValueError(f"{table.where(missing)}: the row has {found} in column {name!r}")
    return [v if isinstance(v, str) else str(v) for v in values]


def decoder_token(tokenizer: Any, name: str, use: str) -> int:
    """The tokenizer's special token that an encoder-decoder uses so.

    Raises:
        ValueError: it has none.
    """
    token: int | None = getattr(tokenizer, f"{name}_token_id")
    if token is None:
        raise ValueError(
            f"tokenizer: it has no {name}_token; an encoder-decoder {use} a text with it: set it in the tokenizer's "
            "files"
        )
    return token


def shortened(text: str, most: int = 160) -> str:
    """A text that fits a line."""
    return text if len(text) <= most else text[: most - 3] + "..."


def inference_form(cfg: Any, run: TrainConfig | None) -> str | None:
    """The form of the rows that a trained model shall work on: the one given ("raw": columns as they are), else the
    run's."""
    form = cfg.form or (run and run.form)
    return None if form == "raw" else form


def has_several_answers(table: Table, form: str | None) -> bool:
    """Whether rows of a form name all their right choices."""
    return form is not None and "answers" in table.columns


def group_column(table: Table, given: str | None, form: str | None) -> str | None:
    """The column of the groups of rows that are judged as one: the one given, else that of a form with groups.

    Raises:
        ValueError: the given one is not there.
    """
    check_columns(table, {"group": given})
    return given or ("group" if form is not None and "group" in table.columns else None)


def groups_of(table: Table, column: str | None) -> np.ndarray | None:
    """The number of each row's group, int64, from 0; None: there is no such column."""
    if column is None:
        return None
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(str(value), len(numbers)) for value in table.columns[column]], np.int64)


def inference_columns(
    cfg: Any, run: TrainConfig | None, table: Table, roles: Sequence[str], needed: str
) -> dict[str, Any]:
    """{role: column} for new rows: what the flags say, else the run's columns where the rows have them.

    Args:
        needed: the role without which the run's columns mean nothing here.
    """
    given = {role: cfg.column(role) for role in roles}
    if run is not None:
        usual = {role: getattr(run, f"{role}_column", None) for role in roles}
        if usual.get(needed) in table.columns:
            given |= {role: name for role, name in usual.items() if given[role] is None and name in table.columns}
    return given

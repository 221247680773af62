"""What every kind of pretraining shares: text and token files, mixtures of them, streams, rows held out, perplexity."""

import copy
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

import engine
from modelcenter.data import sources
from modelcenter.data.batching.mixture import Mixture, parse_weight
from modelcenter.data.blocks import Blocks
from modelcenter.data.examples import Examples
from modelcenter.data.pretraining.objectives import Objective
from modelcenter.data.pretraining.text_rows import StreamRows, TextRows, encode_texts
from modelcenter.data.streams import RowSource, open_rows
from modelcenter.data.table import Table
from modelcenter.data.token_files import TokenFile, check_tokenizer, is_tokens, with_end
from modelcenter.data.tokenization.documents import end_token
from modelcenter.models.base import Model
from modelcenter.training.config import PretrainConfig, TrainConfig
from modelcenter.training.evaluation import evaluate
from modelcenter.training.metrics import Metrics, perplexity
from modelcenter.training.tasks.base import (
    Batches,
    Task,
    evaluation_split,
    inference_columns,
    inference_split,
    rank_batches,
)
from modelcenter.training.tasks.pretraining.documents import Part, document_texts, read_parts, stream_head, text_column

log = logging.getLogger("modelcenter")
_FIXED = 0  # seed of what is drawn for evaluations: the same in all of them, and in all runs


class Perplexity:
    """The loss alone, from which the perplexity follows."""

    main = "perplexity"

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        return

    def result(self) -> dict[str, float | None]:
        return {}


class Pretraining(Task):
    """Pretraining on text. A subclass says its objective. Flags: PretrainConfig."""

    # Batches are evaluated without logits, or with those that the metrics look at.
    evaluated_logits: bool | str = False
    cfg: PretrainConfig
    column: str | None = None
    stream: RowSource | None = None

    def __init__(self, cfg: PretrainConfig):
        """Find and open the data, and find the column of the text.

        Raises:
            ValueError: no such data or column, weights of some parts only.
        """
        cfg.require("train_data")
        self.cfg = cfg
        self.train: list[Part] = []
        if cfg.streaming:
            self._open_stream(cfg)
        else:
            self.train = read_parts(cfg.train_data or [], cfg.data_config, cfg.document, lambda s: cfg.train_split)
        self.eval = self._eval_parts(cfg)
        self._find_column([*self.train, *self.eval])

    def _open_stream(self, cfg: PretrainConfig) -> None:
        data = cfg.train_data or []
        for spec in data:
            if parse_weight(spec)[1] is not None or is_tokens(spec):
                what = "a token file is read as it is" if is_tokens(spec) else "parts have no weights in a stream"
                raise ValueError(f"train_data: {spec}: {what}, leave streaming out")
        self.stream = open_rows(data, cfg.data_config, cfg.train_split, cfg.document)  # type: ignore[arg-type]

    def _eval_parts(self, cfg: PretrainConfig) -> list[Part]:
        if cfg.eval_fraction is not None:
            return []
        if cfg.eval_data is not None:
            config = cfg.data_config if cfg.eval_data == cfg.train_data else None
            return read_parts(cfg.eval_data, config, cfg.document, lambda s: cfg.eval_split or evaluation_split(s))
        texts = [spec for spec in (parse_weight(spec)[0] for spec in cfg.train_data or []) if not is_tokens(spec)]
        if not texts:
            return []
        source = sources.find(texts, cfg.data_config)
        split = cfg.eval_split or "validation"
        if cfg.eval_split is None and (split not in source.splits or cfg.train_split == split):
            return []
        return read_parts(texts, cfg.data_config, cfg.document, lambda s: split)

    def _find_column(self, parts: Sequence[Part]) -> None:
        """The column of all texts; it counts as given from here on."""
        tables = [part.data for part in parts if isinstance(part.data, Table)]
        if self.stream is not None:
            tables.append(stream_head(self.stream))
        column = self.cfg.text_column
        for table in tables:
            column = text_column(table, column)
        self.column = self.cfg.text_column = column

    @abstractmethod
    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        """What is asked of pieces of text."""

    # -- rows --------------------------------------------------------------------------------------------------------

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Any, Examples | None]:
        objective = self.objective(tokenizer, max_length, self.cfg.seed)
        fixed = self.objective(tokenizer, max_length, _FIXED)
        held_out: Examples | None = None
        if self.eval:
            held_out = joined([self.rows(part, tokenizer, fixed) for part in self.eval])
        if self.stream is not None:
            assert self.column is not None
            end = None if objective.bare else end_of(tokenizer)
            tell = log.warning if engine.rank() == 0 else None
            return StreamRows(self.stream, tokenizer, objective, self.column, end, tell), held_out
        rows = [self.rows(part, tokenizer, objective) for part in self.train]
        if self.cfg.eval_fraction is not None:
            sides = [part.split(self.cfg.eval_fraction, self.cfg.seed) for part in rows]
            rows = [train for train, _ in sides]
            held_out = joined([side.with_objective(fixed) for _, side in sides])
        weights = [part.weight for part in self.train]
        if len(rows) == 1:
            return rows[0], held_out
        shares = [len(part) if weight is None else weight for part, weight in zip(rows, weights, strict=True)]
        return Mixture(list(zip(rows, shares, strict=True)), self.cfg.seed), held_out

    def rows(self, part: Part, tokenizer: Any, objective: Objective) -> TextRows:
        """The rows of a part."""
        table = part.data if isinstance(part.data, Table) else None
        end = None if objective.bare else end_of(tokenizer)
        if table is None:
            file = part.data
            assert isinstance(file, TokenFile)
            check_tokenizer(file, tokenizer)
            file = with_end(file, end_of(tokenizer))
        else:
            assert self.column is not None
            file = encode_texts(tokenizer, document_texts(table, self.column), table.name, end)
        cut: Any = {"packing": self.cfg.packing, "min_length": objective.min_piece, "bare": objective.bare}
        return TextRows(Blocks(file, objective.max_piece, eos=end, **cut), objective, table)

    def about_columns(self) -> str:
        tokens = [part.name for part in self.train if isinstance(part.data, TokenFile)]
        said = [f"tokens of {', '.join(tokens)}"] if tokens else []
        if self.stream is not None or len(tokens) < len(self.train):
            said.append(f"text {self.column!r}")
        return "; ".join(said)

    # -- judging -----------------------------------------------------------------------------------------------------

    def metrics(self, device: torch.device | str = "cpu") -> Metrics:
        return Perplexity()

    def evaluate(self, model: Model, examples: Examples, batch_size: int) -> dict[str, float | None]:
        """The loss, the perplexity and what else the metrics say. Collective."""
        batches = AskedBatches(examples, rank_batches(examples, batch_size), self.evaluated_logits)
        found = evaluate(model, batches, self.metrics(model.device), self.feed)
        loss = found["loss"]
        return {"loss": loss, "perplexity": None if loss is None else perplexity(loss), **found}

    def feed(self, metrics: Metrics, out: Any, batch: dict[str, Any]) -> None:
        return

    # -- use of a trained model --------------------------------------------------------------------------------------

    @classmethod
    def read(cls, cfg: Any, run: TrainConfig | None, labelled: bool) -> Any:
        """The parts to evaluate on; to predict from, a table of texts."""
        if not labelled:
            return super().read(cfg, run, labelled)
        document = run.document if isinstance(run, PretrainConfig) else "line"
        return read_parts(cfg.data or [], cfg.data_config, document, lambda s: inference_split(s, cfg.split, labelled))

    @classmethod
    def to_use(cls, cfg: Any, run: TrainConfig | None, table: Any, labelled: bool) -> Self:
        task = cls.__new__(cls)
        from modelcenter.training.tasks import TASKS

        task.cfg = copy.copy(run) if isinstance(run, PretrainConfig) else TASKS[cls.name].flags()()
        task.train, task.eval, task.stream = [] if labelled else [Part(table)], table if labelled else [], None
        tables = [part.data for part in (*task.train, *task.eval) if isinstance(part.data, Table)]
        task.cfg.text_column = None
        if tables:
            task.cfg.text_column = inference_columns(cfg, run, tables[0], PretrainConfig.roles, needed="text")["text"]
        task._find_column([*task.train, *task.eval])
        return task

    def rows_for(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        if self.eval:
            objective = self.objective(tokenizer, max_length, _FIXED)
            return joined([self.rows(part, tokenizer, objective) for part in self.eval])
        assert self.column is not None
        return self.prompt_examples(model, tokenizer, max_length, self.train[0].data, self.column)

    @abstractmethod
    def prompt_examples(self, model: Model, tokenizer: Any, max_length: int, table: Any, column: str) -> Any:
        """The rows to predict from."""


class AskedBatches(Batches):
    """Batches of an evaluation that say which logits they want."""

    def __init__(self, examples: Examples, rows: list[np.ndarray], logits: bool | str):
        super().__init__(examples, rows)
        self.logits = logits

    def __getitem__(self, i: int) -> dict[str, Any]:
        return super().__getitem__(i) | {"output_logits": self.logits}


def joined(rows: list[TextRows]) -> Any:
    """All rows of several parts."""
    return rows[0] if len(rows) == 1 else Mixture([(part, len(part)) for part in rows], seed=_FIXED)


def end_of(tokenizer: Any) -> int | None:
    """The token after a document, if the tokenizer has one."""
    known = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is not None
    return end_token(tokenizer) if known else None

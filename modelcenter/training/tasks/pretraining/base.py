"""The base of all pretraining tasks: text and token files, mixtures of them, streams, held-out rows, perplexity."""

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch

import engine
from modelcenter.data import sources
from modelcenter.data.batching.mixture import Mixture, parse_weight
from modelcenter.data.blocks import Blocks
from modelcenter.data.examples import Examples
from modelcenter.data.pretraining.objectives import Objective
from modelcenter.data.pretraining.text_rows import StreamRows, TextRows, encode_texts
from modelcenter.data.readers.row_streams import Unit
from modelcenter.data.streams import RowSource, open_rows
from modelcenter.data.table import Table
from modelcenter.data.token_files import TokenFile, check_tokenizer, is_tokens, with_end
from modelcenter.data.tokenization.documents import end_token
from modelcenter.models.base import Model
from modelcenter.training.config import PretrainConfig, TrainConfig
from modelcenter.training.metrics import LossOnly, Score, perplexity
from modelcenter.training.tasks import TASKS
from modelcenter.training.tasks.base import Task
from modelcenter.training.tasks.column_roles import inference_columns
from modelcenter.training.tasks.examples import Batches, rank_batches
from modelcenter.training.tasks.pretraining.documents import (
    Part,
    document_texts,
    read_parts,
    stream_head,
    text_column,
)
from modelcenter.training.tasks.splits import evaluation_split, inference_split

log = logging.getLogger("modelcenter")
_EVALUATION_SEED = 0  # seeds the randomness in examples equally in all evaluations and all runs


@dataclass(eq=False, kw_only=True, repr=False)
class Pretraining(Task):
    """Pretraining on text. A subclass defines the objective. Flags: PretrainConfig.

    Attributes:
        cfg: the flags; for inference those of the run, or the defaults. parts: documents to train on, or to predict
            from. eval_parts: documents to evaluate on. stream: instead of parts, for documents that are read while
            training. column: of the text, in all tables.
    """

    evaluated_logits: ClassVar[bool | str] = False  # output_logits that the metrics need in evaluations
    cfg: PretrainConfig
    parts: Sequence[Part] = ()
    eval_parts: Sequence[Part] = ()
    stream: RowSource | None = None
    column: str | None = None

    @classmethod
    def from_flags(cls, cfg: PretrainConfig) -> Self:
        """See Task.

        Raises:
            ValueError: also if only some parts have weights.
        """
        cfg.require("train_data")
        read_eval_parts = _eval_parts_reader(cfg)
        # Checked before rows are read or downloaded.
        cfg.refuse_evaluation_flags(read_eval_parts is not None or cfg.eval_fraction is not None)
        parts: list[Part] = []
        stream = _open_stream(cfg) if cfg.streaming else None
        if stream is None:
            parts = read_parts(cfg.train_data or [], cfg.data_config, cfg.document, lambda s: cfg.train_split)
        eval_parts = [] if read_eval_parts is None else read_eval_parts()
        tables = _tables([*parts, *eval_parts])
        if stream is not None:
            tables.append(stream_head(stream))
        for name in ("text_column", "document"):
            cfg.refuse_idle(name, not tables, "without texts, as all data are token files; leave it out")
        cfg.text_column = _text_column(tables, cfg.text_column)
        return cls(cfg=cfg, parts=parts, eval_parts=eval_parts, stream=stream, column=cfg.text_column)

    @abstractmethod
    def objective(self, tokenizer: Any, max_length: int, seed: int) -> Objective:
        """The objective, which turns pieces of text into examples. seed: of the randomness in them."""

    # -- examples ----------------------------------------------------------------------------------------------------

    def tokenize(self, tokenizer: Any, max_length: int) -> tuple[Any, Examples | None]:
        objective = self.objective(tokenizer, max_length, self.cfg.seed)
        eval_objective = self.objective(tokenizer, max_length, _EVALUATION_SEED)
        eval_set: Examples | None = None
        if self.eval_parts:
            eval_set = joined([self._rows(part, tokenizer, eval_objective) for part in self.eval_parts])
        if self.stream is not None:
            assert self.column is not None
            end = None if objective.bare else document_end(tokenizer)
            warn = log.warning if engine.rank() == 0 else None
            return StreamRows(self.stream, tokenizer, objective, self.column, end, warn), eval_set
        rows = [self._rows(part, tokenizer, objective) for part in self.parts]
        if self.cfg.eval_fraction is not None:
            sides = [part.split(self.cfg.eval_fraction, self.cfg.seed) for part in rows]
            rows = [train for train, _ in sides]
            eval_set = joined([held_out.with_objective(eval_objective) for _, held_out in sides])
        if len(rows) == 1:
            return rows[0], eval_set
        weights = [part.weight for part in self.parts]
        shares = [len(part) if weight is None else weight for part, weight in zip(rows, weights, strict=True)]
        return Mixture(list(zip(rows, shares, strict=True)), self.cfg.seed), eval_set

    def _rows(self, part: Part, tokenizer: Any, objective: Objective) -> TextRows:
        """The documents of a part as rows for an objective."""
        end = None if objective.bare else document_end(tokenizer)
        table = part.data if isinstance(part.data, Table) else None
        if isinstance(part.data, TokenFile):
            check_tokenizer(part.data, tokenizer)
            file = with_end(part.data, document_end(tokenizer))
        else:
            assert self.column is not None and table is not None
            file = encode_texts(tokenizer, document_texts(table, self.column), table.name, end)
        blocks = Blocks(
            file,
            objective.max_piece,
            self.cfg.packing,
            end,
            min_length=objective.min_piece,
            bare=objective.bare,
        )
        return TextRows(blocks, objective, table)

    def describe_columns(self) -> str:
        files = [part.name for part in self.parts if isinstance(part.data, TokenFile)]
        described = [f"tokens of {', '.join(files)}"] if files else []
        if self.stream is not None or len(files) < len(self.parts):
            described.append(f"text {self.column!r}")
        return "; ".join(described)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def metrics(self, device: torch.device | str = "cpu") -> Score:
        return LossOnly("perplexity")

    def update_metrics(self, metrics: Any, out: Any, batch: dict[str, Any]) -> None:
        return

    def evaluate(self, model: Model, examples: Examples, batch_size: int) -> dict[str, float | None]:
        """The loss, the perplexity and the other metrics. Collective."""
        batches = Batches(examples, rank_batches(examples, batch_size), self.evaluated_logits)
        result = self.run_evaluation(model, batches, self.metrics(model.device), self.update_metrics)
        loss = result["loss"]
        return {"loss": loss, "perplexity": perplexity(loss), **result}

    # -- inference with a trained model ------------------------------------------------------------------------------

    @classmethod
    def read_data(cls, cfg: Any, run: TrainConfig | None, labelled: bool) -> Any:
        """The parts to evaluate on; to predict from, a table of texts."""
        if not labelled:
            return super().read_data(cfg, run, labelled)
        document: Unit = run.document if isinstance(run, PretrainConfig) else "line"
        return read_parts(cfg.data or [], cfg.data_config, document, lambda s: inference_split(s, cfg.split, labelled))

    @classmethod
    def for_inference(cls, cfg: Any, run: TrainConfig | None, table: Any, labelled: bool) -> Self:
        flags = copy.copy(run) if isinstance(run, PretrainConfig) else TASKS[cls.name].flags()()
        parts, eval_parts = ([], table) if labelled else ([Part(table)], [])
        tables = _tables([*parts, *eval_parts])
        column = None
        if tables:
            column = inference_columns(cfg, run, tables[0], PretrainConfig.roles, needed="text")["text"]
        flags.text_column = _text_column(tables, column)
        return cls(cfg=flags, parts=parts, eval_parts=eval_parts, column=flags.text_column)

    def inference_examples(self, model: Model, tokenizer: Any, max_length: int) -> Any:
        if self.eval_parts:
            objective = self.objective(tokenizer, max_length, _EVALUATION_SEED)
            return joined([self._rows(part, tokenizer, objective) for part in self.eval_parts])
        assert self.column is not None
        return self.prompt_examples(tokenizer, max_length, self.parts[0].data, self.column)

    @abstractmethod
    def prompt_examples(self, tokenizer: Any, max_length: int, table: Any, column: str) -> Any:
        """The rows to predict from."""


def _open_stream(cfg: PretrainConfig) -> RowSource:
    data = cfg.train_data or []
    for spec in data:
        if parse_weight(spec)[1] is not None or is_tokens(spec):
            what = "a token file needs no streaming" if is_tokens(spec) else "parts of a stream cannot have weights"
            raise ValueError(f"train_data: {spec}: {what}; leave streaming out")
    return open_rows(data, cfg.data_config, cfg.train_split, cfg.document)


def _eval_parts_reader(cfg: PretrainConfig) -> Callable[[], list[Part]] | None:
    """A function that reads the documents to evaluate on, of eval_data or else of the validation split of train_data;
    None: there are none."""
    if cfg.eval_fraction is not None:
        return None
    if cfg.eval_data is not None:
        config = cfg.data_config if cfg.eval_data == cfg.train_data else None
        return partial(read_parts, cfg.eval_data, config, cfg.document, lambda s: cfg.eval_split or evaluation_split(s))
    # An entry with a weight is a separate data set: those of the Hub or save_to_disk cannot be read together with
    # others.
    parsed = [parse_weight(spec) for spec in cfg.train_data or [] if not is_tokens(parse_weight(spec)[0])]
    bare = [path for path, weight in parsed if weight is None]
    groups = [[path] for path, weight in parsed if weight is not None] + ([bare] if bare else [])
    split = cfg.eval_split or "validation"
    found = [(specs, sources.find(specs, cfg.data_config)) for specs in groups]
    having = [
        specs
        for specs, source in found
        if source.has(split) and (cfg.eval_split or source.whole(cfg.train_split) != split)
    ]
    if not having and (cfg.eval_split is None or not groups):
        return None

    def read() -> list[Part]:
        parts = [read_parts(specs, cfg.data_config, cfg.document, lambda s: split) for specs in having or groups]
        return [part for of_specs in parts for part in of_specs]

    return read


def _tables(parts: Sequence[Part]) -> list[Table]:
    return [part.data for part in parts if isinstance(part.data, Table)]


def _text_column(tables: Sequence[Table], given: str | None) -> str | None:
    """The column of the text in all tables; None: there is no table, and no column was given."""
    column = given
    for table in tables:
        column = text_column(table if table is tables[0] else replace(table, like=tables[0].name), column)
    return column


def joined(rows: list[TextRows]) -> Any:
    """The rows of several parts, joined."""
    return rows[0] if len(rows) == 1 else Mixture([(part, len(part)) for part in rows], seed=_EVALUATION_SEED)


def document_end(tokenizer: Any) -> int | None:
    """The token after a document, if the tokenizer has one."""
    known = tokenizer.eos_token_id is not None or tokenizer.sep_token_id is not None
    return end_token(tokenizer) if known else None

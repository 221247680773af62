"""Flags of mine, which finds hard negatives. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.training.config.checks import check_not_negative, check_positive
from modelcenter.training.config.common import is_local
from modelcenter.training.config.inference import EngineFlags

_model, _data, _output = partial(flag, "model"), partial(flag, "data"), partial(flag, "output")
_negatives, _batches = partial(flag, "negatives"), partial(flag, "batches")
_FILTERED = 10  # times as many texts are looked at where some are left out by their scores


# fmt: off
@dataclass(kw_only=True)
class MineConfig(EngineFlags):
    """Flags of mine."""

    idle: ClassVar[Mapping[str, Idle]] = {
        "revision": Idle(lambda c: is_local(c.model), "with a local model, as it is for those of the Hub; leave it "
            "out"),
        "corpus_column": Idle(lambda c: not c.corpus, "without corpus, whose column it names; give that too"),
        "seed": Idle(lambda c: c.sampling == "top", "where the best texts are taken; give --sampling random too"),
    }

    model: str | None = _model(None, "model of embeddings: run folder, checkpoint directory or Hub name",
        positional=True)
    data: list[str] | None = _data(None, "rows of an anchor and its positive: files, directories or glob patterns, or "
        "the name of a Hub data set", positional=True)
    revision: str | None = _model(None, "branch, tag or commit of the Hub model", "model_revision")
    tokenizer: str | None = _model(None, "Hub name or directory of the tokenizer; the model's own if not given",
        "tokenizer_name")
    reranker: str | None = _model(None, "reranker that scores anew the texts which the model finds, and the positives: "
        "run folder, checkpoint directory or Hub name", "cross_encoder")
    output: str | None = _output(None, "file to write, in the format that its ending names: jsonl, json, csv, tsv or "
        "parquet", "output_file")
    output_scores: bool = _output(False, "also write a column scores: those of the positives and of the negatives, in "
        "this order, as `finetune reranking --loss margin_mse` reads them")

    split: str | None = _data(None, "split of the data; if not given, train, or else the first", "train_split")
    data_config: str | None = _data(None, "configuration of the Hub data set", "dataset_config_name", "dataset_config")
    anchor_column: str | None = _data(None, "column with the text that others are found by; detected by its usual "
        "names if not given", "query_column")
    positive_column: str | None = _data(None, "column with the text that belongs to it, or a list of such; detected by "
        "its usual names if not given", "document_column")
    corpus: list[str] | None = _data(None, "further texts to find negatives among, in the same forms as the data; the "
        "positives of all rows are always among them")
    corpus_column: str | None = _data(None, "column with the texts of corpus; detected by its usual names if not given")
    max_length: int | None = _data(None, "maximum tokens per text; if not given, the run's, or what the model supports",
        "max_seq_length")

    num_negatives: int = _negatives(3, "number of negatives for each row")
    range_min: int = _negatives(0, "pass over so many of the texts that are most alike to the anchor: they may belong "
        "to it although no row says so")
    range_max: int | None = _negatives(None, "look at no more than so many texts for each anchor; if not given, "
        "range_min + num_negatives, and 10 times num_negatives where a reranker, a limit of scores or --sampling "
        "random is given")
    margin: float | None = _negatives(None, "leave out texts whose score is not so much below that of the positive",
        "absolute_margin")
    relative_margin: float | None = _negatives(None, "leave out texts whose score is not below that of the positive by "
        "this share of it, such as 0.05")
    max_score: float | None = _negatives(None, "leave out texts with a higher score")
    min_score: float | None = _negatives(None, "leave out texts with a lower score")
    sampling: str = _negatives("top", "which of the texts that are left become negatives. top: the most alike; random: "
        "some, drawn among all up to range_max", "sampling_strategy", choices=("top", "random"))
    seed: int = _negatives(42, "of the drawing")

    batch_size: int = _batches(64, "texts per rank and batch", "eval_batch_size", "per_device_eval_batch_size")
    # fmt: on

    @property
    def depth(self) -> int:
        """How many texts are looked at for each anchor."""
        limits = self.margin, self.relative_margin, self.max_score, self.min_score, self.reranker
        filtered = self.sampling == "random" or any(limit is not None for limit in limits)
        usual = self.range_min + self.num_negatives * (_FILTERED if filtered else 1)
        return usual if self.range_max is None else self.range_max

    def check(self) -> None:
        check_positive(self, "num_negatives", "batch_size", "max_length")
        check_not_negative(self, "range_min")
        if self.depth - self.range_min < self.num_negatives:
            raise ValueError(
                f"range_max: got {self.range_max}, which leaves {max(self.depth - self.range_min, 0)} texts behind "
                f"range_min {self.range_min}, expected {self.range_min + self.num_negatives} or more for "
                f"{self.num_negatives} negatives"
            )
        if self.relative_margin is not None and self.relative_margin < 0:
            raise ValueError(f"relative_margin: got {self.relative_margin:g}, expected 0 or more")
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ValueError(
                f"min_score: got {self.min_score:g}, above max_score {self.max_score:g}, which leaves no text"
            )

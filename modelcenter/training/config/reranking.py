"""Flags of rerankers. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.hub.files.cross_encoder_files import ACTIVATIONS
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig

PAIR_FLAGS = ("pair_template", "instruction", "score_tokens")  # by which trained models are used, too
NO_WORDS = ["new-head"]  # of score_tokens
LOSSES = ("binary", "listwise", "listnet", "pairwise", "margin_mse")
_data, _model, _optimisation = partial(flag, "data"), partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class RerankingConfig(TrainConfig):
    """Flags of rerankers. A row counts once in batch_size, with all its texts."""

    task: ClassVar[str] = "reranking"
    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative", "score")
    idle: ClassVar[Mapping[str, Idle]] = {
        **TrainConfig.idle,
        "label_smoothing": Idle(lambda c: True, "with rerankers, which have no classes; leave it out"),
        "score_tokens": Idle(lambda c: bool(c.from_scratch), "with random weights; leave it out"),
    }

    anchor_column: str | None = _data(None, "column with the query, such as a question; detected by its usual names if "
        "not given", "query_column")
    positive_column: str | None = _data(None, "column with the text that answers it, or a list of such, of which each "
        "epoch takes one; with score_column, the text or the list of texts that have the labels; detected by its usual "
        "names if not given", "document_column")
    negative_column: str | None = _data(None, "column with a text that does not answer it, or a list of such, or "
        "several comma-separated columns; if not given, detected, if there is one", "negative_columns")
    score_column: str | None = _data(None, "column with the label of the text, or a list with one for each text of the "
        "row, positives first: the higher, the better it answers the query; if not given, detected, if there is one "
        "and no column of negatives", "label_column")
    max_negatives: int | None = _data(None, "negatives that a row takes part with; rows with more take them in turn, "
        "epoch by epoch; all if not given")

    pair_template: str | None = _model(None, "how a decoder reads a query and a text, with an end by which it judges: "
        "qwen3, bge-gemma or a Jinja file; if not given, as the tokenizer's chat template has it where that is for "
        "pairs, else one after the other", "reranker_template")
    instruction: str | None = _model(None, "what such a template says that is to be judged; if not given, as the "
        "template has it")
    score_tokens: list[str] | None = _model(None, "of a language model: the word for yes and the word for no, or that "
        "for yes alone; the reranker begins with the logit of the one less that of the other as its score. If not "
        "given, as the model's files or a published template have it, else it begins with a new head; "
        "new-head: that, whatever words a template has")
    activation: str | None = _model(None, "what predict and sentence-transformers make a score of the model's output "
        "by; if not given, as the model says, else sigmoid", choices=ACTIVATIONS)
    loss: str | None = _optimisation(None, "binary: each text has the probability of its label; listwise: each "
        "positive is found among the texts of its row; listnet: the same by graded labels; pairwise: texts with "
        "higher labels have higher scores (RankNet); margin_mse: the differences of a teacher's scores, in "
        "score_column, from that "
        "of the first text; if not given, binary where each row has one text, else listwise, and pairwise where labels "
        "are not within what these take (0 to 1, or 0 or more)", choices=LOSSES)
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "max_negatives")
        check_score_tokens(self.score_tokens)


def check_score_tokens(words: list[str] | None) -> None:
    """Raise ValueError for anything but one word or two."""
    if words is not None and (len(words) not in (1, 2) or len({*words}) < len(words)):
        raise ValueError(
            f"score_tokens: got {' '.join(words)!r}, expected the word for yes, and optionally another for no"
        )

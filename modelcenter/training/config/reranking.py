"""Flags of rerankers. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.hub.files.cross_encoder_files import ACTIVATIONS
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig

PAIR_FLAGS = ("pair_template", "instruction", "score_tokens")  # also flags of predict and evaluate
NO_WORDS = ["new-head"]  # value of score_tokens for a new head
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
    positive_column: str | None = _data(None, "column with the text that answers it, or a list of such texts, one of "
        "which is used in each epoch; with score_column, the labelled text or list of texts; detected by its usual "
        "names if not given", "document_column")
    negative_column: str | None = _data(None, "column with a text that does not answer it, or a list of such texts, or "
        "several comma-separated columns; if not given, detected, if there is one", "negative_columns")
    score_column: str | None = _data(None, "column with the label of the text, or a list of one label per text of the "
        "row, positives first; higher labels mean better answers; if not given, detected, if there is one and no "
        "column of negatives", "label_column")
    max_negatives: int | None = _data(None, "maximum number of negatives per row; rows with more use different ones in "
        "each epoch; all if not given")

    pair_template: str | None = _model(None, "prompt in which a decoder reads a query and a text: qwen3, bge-gemma or "
        "a Jinja file; if not given, the tokenizer's chat template if that is for pairs, otherwise the two texts one "
        "after the other", "reranker_template")
    instruction: str | None = _model(None, "instruction in the pair template, which says what to judge; the template's "
        "own if not given")
    score_tokens: list[str] | None = _model(None, "for language models: the words for yes and for no, or only the "
        "first. The initial score is the logit of yes minus that of no. If not given, the words that the model's files "
        "or a published template name, otherwise a new head; new-head: a new head, whatever words a template names")
    activation: str | None = _model(None, "function that turns the model's output into a score in predict and "
        "sentence-transformers; if not given, the model's, or sigmoid", choices=ACTIVATIONS)
    loss: str | None = _optimisation(None, "binary: cross-entropy of each text's score and label; listwise: "
        "cross-entropy of finding the positive among the texts of its row; listnet: the same with graded labels; "
        "pairwise: texts with higher labels should score higher (RankNet); margin_mse: match the differences between a "
        "teacher's scores in score_column. If not given, binary if each row has one text, otherwise listwise; pairwise "
        "if labels are outside the range of these (0 to 1, or 0 or more)", choices=LOSSES)
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

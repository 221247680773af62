"""Flags of embeddings, and those that all trainings on related texts share. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import Idle, flag
from modelcenter.embedding_settings import DENSE_ACTIVATIONS, SIMILARITIES, DenseSettings, EmbeddingSettings
from modelcenter.training.config.checks import check_positive
from modelcenter.training.config.common import TrainConfig

_data, _model, _optimisation = partial(flag, "data"), partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class RelatedTextsConfig(TrainConfig):
    """Flags of embeddings of every kind. A row counts once in batch_size, with all its texts."""

    mixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative", "score")
    idle: ClassVar[Mapping[str, Idle]] = {
        **TrainConfig.idle,
        "label_smoothing": Idle(lambda c: True, "with embeddings, which have no labels; leave it out"),
    }

    anchor_column: str | None = _data(None, "column with the text that others are found by, such as a question, or "
        "with the first of two texts that have a score; detected by its usual names if not given", "query_column")
    positive_column: str | None = _data(None, "column with the text that belongs to it, or a list of such, of which "
        "each epoch takes one, or the anchor's column, to train on single texts by dropout (SimCSE); detected by its "
        "usual names if not given", "document_column")
    negative_column: str | None = _data(None, "column with a text that does not belong to it, or a list of such, or "
        "several comma-separated columns; if not given, detected, if there is one", "negative_columns")
    score_column: str | None = _data(None, "column with a number that says how alike the two texts are; if not given, "
        "detected, if there is one; without it all rows are texts that belong together", "label_column")
    max_negatives: int | None = _data(None, "negatives that a row takes part with; rows with more take them in turn, "
        "epoch by epoch; all if not given")
    query_prompt: str | None = _data(None, "text put before each anchor, such as 'query: '; if not given, as the model "
        "says")
    document_prompt: str | None = _data(None, "text put before each positive and negative, such as 'passage: '; if not "
        "given, as the model says")

    temperature: float | None = _optimisation(None, "similarities are divided by it; lower: the hardest negatives "
        "count more; if not given, 0.05 for cosine, 1 for dot")
    symmetric: bool = _optimisation(False, "also train to find the anchor by its positive")
    # fmt: on

    def check(self) -> None:
        super().check()
        check_positive(self, "temperature", "max_negatives")


# fmt: off
@dataclass(kw_only=True)
class EmbeddingConfig(RelatedTextsConfig):
    """Flags of embeddings."""

    task: ClassVar[str] = "embedding"

    pooling: str | None = _model(None, "what is made of the hidden states of a text: mean, cls (the first), last, max "
        "(of each element the greatest), mean_sqrt_len (their sum over the root of their number), weighted_mean (with "
        "weights that rise from 1); several, joined by + as in cls+max, lie side by side; if not given, as the model "
        "says, else mean for encoders and last for decoders")
    include_prompt: bool | None = _model(None, "whether the tokens of prompts take part in the pooling; if not given, "
        "as the model says, else they do")
    dense: list[str] | None = _model(None, "dense layers of these widths behind the pooling of a model that has none, "
        "each perhaps with its activation (" + ", ".join(DENSE_ACTIVATIONS) + "; tanh if not given), such as 256:tanh "
        "or 1024:gelu 256:identity", "dense_layers")
    similarity: str | None = _model(None, "how embeddings are compared; cosine: they are made to have length 1; if not "
        "given, as the model says, else cosine", choices=SIMILARITIES)
    matryoshka_dims: list[str] | None = _optimisation(None, "train the first so many elements of the embeddings, too, "
        "such as 256 64, so that embeddings may be cut to them", "matryoshka_dimensions")
    # fmt: on

    def check(self) -> None:
        super().check()
        # Which raise for what there is not.
        EmbeddingSettings(pooling=self.pooling, dense=tuple(map(DenseSettings.of, self.dense or ())))
        for width in self.matryoshka_dims or ():
            if not width.isdecimal() or not int(width):
                raise ValueError(f"matryoshka_dims: got {width!r}, expected whole numbers above 0")

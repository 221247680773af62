"""Flags of sparse embeddings. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelcenter.command_line.flags import flag
from modelcenter.embedding_settings import SIMILARITIES
from modelcenter.sparse_settings import SPARSE_ACTIVATIONS, SPARSE_POOLINGS
from modelcenter.training.config.embedding import RelatedTextsConfig

_model, _optimisation = partial(flag, "model"), partial(flag, "optimisation")


# fmt: off
@dataclass(kw_only=True)
class SparseEmbeddingConfig(RelatedTextsConfig):
    """Flags of sparse embeddings."""

    task: ClassVar[str] = "sparse-embedding"

    pooling: str | None = _model(None, "how the weights of a token of the vocabulary at all places of a text become "
        "one: max or sum; if not given, as the model says, else max", "pooling_strategy", choices=SPARSE_POOLINGS)
    activation: str | None = _model(None, "what makes a weight of a logit: relu, log(1 + relu(logit)), or log1p_relu, "
        "the log(1 + weight) of that; if not given, as the model says, else relu", "activation_function",
        choices=SPARSE_ACTIVATIONS)
    similarity: str | None = _model(None, "how embeddings are compared; if not given, as the model says, else dot",
        choices=SIMILARITIES)
    query_regularizer_weight: float = _optimisation(5e-5, "what the FLOPS regularisation of anchors counts: the sum of "
        "the squares of the mean weights; higher: fewer tokens in a query. 0: none")
    document_regularizer_weight: float = _optimisation(3e-5, "the same of positives and negatives")
    regularizer_warmup: float = _optimisation(1 / 3, "steps in which both weights rise from 0 with the square of the "
        "step; below 1 a fraction of all steps")
    # fmt: on

    def check(self) -> None:
        super().check()
        for name in ("query_regularizer_weight", "document_regularizer_weight", "regularizer_warmup"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name}: got {value}, expected 0 or more")

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

    pooling: str | None = _model(None, "max or sum: how the logits at all tokens of a text become one weight for each "
        "word of the vocabulary; if not given, the model's setting, else max", "pooling_strategy",
        choices=SPARSE_POOLINGS)
    activation: str | None = _model(None, "from logit to weight: relu is log(1 + relu(logit)), log1p_relu is "
        "log(1 + log(1 + relu(logit))); if not given, the model's setting, else relu", "activation_function",
        choices=SPARSE_ACTIVATIONS)
    similarity: str | None = _model(None, "how embeddings are compared; if not given, the model's setting, else dot",
        choices=SIMILARITIES)
    query_regularizer_weight: float = _optimisation(5e-5, "factor of the FLOPS regularisation of anchors (the sum of "
        "the squared mean weights); higher: fewer words in a query. 0: none")
    document_regularizer_weight: float = _optimisation(3e-5, "the same for positives and negatives")
    regularizer_warmup: float = _optimisation(1 / 3, "number of steps over which both factors rise quadratically from "
        "0; a value below 1 is a fraction of all steps")
    # fmt: on

    def check(self) -> None:
        super().check()
        for name in ("query_regularizer_weight", "document_regularizer_weight", "regularizer_warmup"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name}: got {value}, expected 0 or more")

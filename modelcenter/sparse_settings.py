"""Settings of task "sparse-embedding": how a text becomes weights of the vocabulary's tokens. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from modelcenter.embedding_settings import SIMILARITIES, TextSettings, check_texts

SPARSE_POOLINGS = ("max", "sum")
SPARSE_ACTIVATIONS = ("relu", "log1p_relu")


@dataclass(frozen=True, kw_only=True)
class SparseEmbeddingSettings(TextSettings):
    """What the files of a SparseEncoder of sentence-transformers say about a model in addition to its config.json.

    Attributes:
        pooling: over the tokens of a text, "max" or "sum".
        activation: of a logit z, before the pooling: "relu": log(1 + relu(z)); "log1p_relu": log(1 + log(1 + relu(z))).
        similarity: how two embeddings are compared.
        query_prompt, document_prompt: the text put before each query, and before each document. Its tokens are pooled.
        max_length: tokens of the longest text, including the prompt and special tokens; None: the model's own limit.
    """

    field: ClassVar[str] = "sparse_embedding"
    example: ClassVar[Mapping[str, Any]] = {"pooling": "max"}
    include_prompt: ClassVar[bool] = True

    pooling: str = "max"
    activation: str = "relu"
    similarity: str = "dot"
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None

    def __post_init__(self) -> None:
        choices = {"pooling": SPARSE_POOLINGS, "activation": SPARSE_ACTIVATIONS, "similarity": SIMILARITIES}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"sparse_embedding: {name} is {value!r}, expected {' or '.join(known)}")
        check_texts("sparse_embedding", self)

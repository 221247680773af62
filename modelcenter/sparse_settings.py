"""Settings of task "sparse-embedding": how a text becomes weights of the vocabulary's tokens. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from modelcenter.embedding_settings import SIMILARITIES, check_texts, from_fields

SPARSE_POOLINGS = ("max", "sum")
SPARSE_ACTIVATIONS = ("relu", "log1p_relu")


@dataclass(frozen=True, kw_only=True)
class SparseEmbeddingSettings:
    """What the files of a SparseEncoder of sentence-transformers say about a model in addition to its config.json.

    Attributes:
        pooling: over the tokens of a text, "max" or "sum".
        activation: of a logit z, before the pooling: "relu": log(1 + relu(z)); "log1p_relu": log(1 + log(1 + relu(z))).
        similarity: how two embeddings are compared.
        query_prompt, document_prompt: the text put before each query, and before each document. Its tokens are pooled.
        max_length: tokens of the longest text, including the prompt and special tokens; None: the model's own limit.
    """

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

    @classmethod
    def of(cls, given: "SparseEmbeddingSettings | Mapping[str, Any] | None") -> Self:
        """From the fields that a caller gives. Raises ValueError for an unknown field or an invalid value."""
        return given if isinstance(given, cls) else from_fields(cls, given, "sparse_embedding", {"pooling": "max"})

    @classmethod
    def over(cls, stored: Mapping[str, Any], given: "SparseEmbeddingSettings | Mapping[str, Any] | None") -> Self:
        """The stored fields, overridden by those that a caller gives. Raises ValueError as `of`."""
        cls.of(given)
        return cls.of({**stored, **(asdict(given) if isinstance(given, SparseEmbeddingSettings) else given or {})})

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary; `of` restores the same settings from it."""
        return asdict(self)

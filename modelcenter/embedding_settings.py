"""How a model of task "embedding" makes one vector of each text. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from modelcenter.registry import nearest

POOLINGS = ("mean", "cls", "last")
SIMILARITIES = ("cosine", "dot")


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """What the files of sentence-transformers say of a model beside its config.json.

    Attributes:
        pooling: which hidden states make the embedding of a text: the mean of all tokens', the first token's ("cls") or
            the last token's; None: the model's usual one, "mean" for encoders and "last" for decoders.
        normalize: embeddings have length 1; None: where they are compared by their cosine.
        similarity: how two embeddings are compared.
        query_prompt, document_prompt: what is written before a query, and before a text that is to be found.
        max_length: tokens of the longest text, the prompt and special tokens included; None: as the model has it.
    """

    pooling: str | None = None
    normalize: bool | None = None
    similarity: str = "cosine"
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
            value = getattr(self, name)
            if value not in choices and not (value is None and name == "pooling"):
                raise ValueError(f"embedding: {name} is {value!r}, expected one of {', '.join(choices)}")
        if not isinstance(self.normalize, bool | None):
            raise ValueError(f"embedding: normalize is {self.normalize!r}, expected true or false")
        for name in ("query_prompt", "document_prompt"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"embedding: {name} is {value!r}, expected a text")
        length = self.max_length
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise ValueError(f"embedding: max_length is {length!r}, expected a number of tokens above 0")

    @property
    def normalizes(self) -> bool:
        """Whether embeddings have length 1."""
        return self.similarity == "cosine" if self.normalize is None else bool(self.normalize)

    @classmethod
    def of(cls, given: "EmbeddingSettings | Mapping[str, Any] | None") -> Self:
        """From the fields that a caller gives. Raises ValueError: an unknown one, or a value that it cannot have."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping | None):
            raise ValueError(f"embedding: got {given!r}, expected fields such as {{'pooling': 'mean'}}")
        names = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in names:
                raise ValueError(f"embedding: unknown field {name!r}.{nearest(name, names)} Known: {', '.join(names)}")
        return cls(**(given or {}))

    @classmethod
    def over(cls, stored: Mapping[str, Any], given: "EmbeddingSettings | Mapping[str, Any] | None") -> Self:
        """The stored fields, in place of which come those that a caller gives. Raises ValueError: as `of`."""
        cls.of(given)
        changes: Mapping[str, Any] = given.to_dict() if isinstance(given, EmbeddingSettings) else given or {}
        return cls.of({**stored, **changes})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

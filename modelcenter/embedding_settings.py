"""How a model of task "embedding" makes one vector of each text. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from modelcenter.registry import nearest

POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean")
SIMILARITIES = ("cosine", "dot")
DENSE_ACTIVATIONS = ("tanh", "identity", "relu", "gelu", "silu", "sigmoid", "leaky_relu", "elu")
FIRST_DENSE = 2  # number of the first dense layer among the steps, of which 0 is the transformer and 1 the pooling


@dataclass(frozen=True, kw_only=True)
class DenseSettings:
    """A dense layer behind the pooling, after Dense of sentence-transformers.

    Attributes:
        width: elements that it gives. activation: what they go through; "identity": nothing. bias: one is added before.
        residual: what the layer reads is added to what it gives, through a matrix where their widths differ.
    """

    width: int
    activation: str = "tanh"
    bias: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise ValueError(f"dense: width is {self.width!r}, expected a whole number above 0")
        if self.activation not in DENSE_ACTIVATIONS:
            known = ", ".join(DENSE_ACTIVATIONS)
            close = nearest(str(self.activation), DENSE_ACTIVATIONS, 1)
            raise ValueError(f"dense: activation is {self.activation!r}, expected one of {known}.{close}")
        for name in ("bias", "residual"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"dense: {name} is {value!r}, expected true or false")

    @classmethod
    def of(cls, given: Any) -> Self:
        """From one, its fields, or a text: "WIDTH" or "WIDTH:ACTIVATION". Raises ValueError: none of these."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            width, colon, activation = given.partition(":")
            if not width.isdecimal():
                raise ValueError(f"dense: got {given!r}, expected WIDTH or WIDTH:ACTIVATION, such as 256:tanh")
            return cls(width=int(width), activation=activation) if colon else cls(width=int(width))
        if not isinstance(given, Mapping):
            raise ValueError(f"dense: got {given!r}, expected fields such as {{'width': 256, 'activation': 'tanh'}}")
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise ValueError(f"dense: unknown field {name!r}.{nearest(name, names)} Known: {', '.join(names)}")
        if "width" not in given:
            raise ValueError(f"dense: got {dict(given)!r}, expected its width, too")
        return cls(**given)


def poolings_of(pooling: str) -> tuple[str, ...]:
    """The poolings that one consists of, whose vectors are joined in this order: "cls+max" has two.

    Raises:
        ValueError: there is no such pooling, or it has one twice.
    """
    names = tuple(pooling.split("+")) if isinstance(pooling, str) else (pooling,)
    if not all(name in POOLINGS for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"embedding: pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}, or several joined by +, such "
            "as 'cls+max'"
        )
    return names


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """What the files of sentence-transformers say of a model beside its config.json.

    Attributes:
        pooling: what is made of the final hidden states of a text's n tokens: their mean; the first ("cls"); the last;
            of each element the greatest ("max"); their sum divided by the root of n ("mean_sqrt_len"); their mean with
            the weights 1 to n ("weighted_mean"). Several are joined, as in "cls+max". None: the model's usual one,
            "mean" for encoders and "last" for decoders.
        include_prompt: prompts, and what a tokenizer puts before them, take part in the pooling.
        dense: layers that the pooled vector goes through, before it is given length 1.
        normalize: embeddings have length 1; None: where they are compared by their cosine.
        similarity: how two embeddings are compared.
        query_prompt, document_prompt: what is written before a query, and before a text that is to be found.
        max_length: tokens of the longest text, the prompt and special tokens included; None: as the model has it.
    """

    pooling: str | None = None
    include_prompt: bool = True
    dense: tuple[DenseSettings, ...] = ()
    normalize: bool | None = None
    similarity: str = "cosine"
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            poolings_of(self.pooling)
        if isinstance(self.dense, str | Mapping) or not isinstance(self.dense, Iterable):
            raise ValueError(f"embedding: dense is {self.dense!r}, expected a list of layers")
        object.__setattr__(self, "dense", tuple(map(DenseSettings.of, self.dense)))
        if self.similarity not in SIMILARITIES:
            expected = ", ".join(SIMILARITIES)
            raise ValueError(f"embedding: similarity is {self.similarity!r}, expected one of {expected}")
        if not isinstance(self.normalize, bool | None):
            raise ValueError(f"embedding: normalize is {self.normalize!r}, expected true or false")
        if not isinstance(self.include_prompt, bool):
            raise ValueError(f"embedding: include_prompt is {self.include_prompt!r}, expected true or false")
        for name in ("query_prompt", "document_prompt"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"embedding: {name} is {value!r}, expected a text")
        length = self.max_length
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise ValueError(f"embedding: max_length is {length!r}, expected a number of tokens above 0")

    @property
    def dense_by_number(self) -> dict[str, DenseSettings]:
        """The dense layers by their numbers among the steps."""
        return {str(number): layer for number, layer in enumerate(self.dense, FIRST_DENSE)}

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
        """The stored fields, in place of which come those that a caller gives.

        Raises:
            ValueError: as `of`; or other dense layers than the stored ones, which have weights.
        """
        wanted, held = cls.of(given), cls.of(stored)
        changes: Mapping[str, Any] = given.to_dict() if isinstance(given, EmbeddingSettings) else given or {}
        if held.dense and "dense" in changes and wanted.dense != held.dense:
            raise ValueError(
                f"dense: got {_shown(wanted.dense)}, but the model has {_shown(held.dense)}, with weights; leave it "
                "out to go on with these"
            )
        return cls.of({**stored, **changes})

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, of which `of` makes the same."""
        return {**asdict(self), "dense": [asdict(layer) for layer in self.dense]}


def _shown(layers: Iterable[DenseSettings]) -> str:
    """Dense layers in words."""
    return " ".join(f"{layer.width}:{layer.activation}" for layer in layers) or "none"

"""Settings of task "embedding": how a text becomes one vector. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from modelcenter.registry import nearest

POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean")
SIMILARITIES = ("cosine", "dot")
DENSE_ACTIVATIONS = ("tanh", "identity", "relu", "gelu", "silu", "sigmoid", "leaky_relu", "elu")
FIRST_DENSE = 2  # the step of the first dense layer: step 0 is the transformer and step 1 the pooling


@dataclass(frozen=True, kw_only=True)
class DenseSettings:
    """A dense layer after the pooling, following Dense of sentence-transformers.

    Attributes:
        width: the number of output features. activation: applied to the outputs; "identity": none.
        bias: add a bias before the activation.
        residual: add the input to the output, through a matrix if their widths differ.
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
        """From an instance, a mapping of fields, or a string "WIDTH" or "WIDTH:ACTIVATION". Raises ValueError for
        anything else."""
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
    """The poolings that a name consists of, whose vectors are concatenated in this order: "cls+max" has two.

    Raises:
        ValueError: a pooling is unknown or occurs twice.
    """
    names = tuple(pooling.split("+")) if isinstance(pooling, str) else (pooling,)
    if not all(name in POOLINGS for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"embedding: pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}, or several joined by +, such "
            "as 'cls+max'"
        )
    return names


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Base of the settings of tasks that make vectors of texts: what the files of sentence-transformers say about a
    model in addition to its config.json. A subclass may have `dense` layers, whose weights a trained model holds."""

    field: ClassVar[str]  # of a model's config, which holds them
    example: ClassVar[Mapping[str, Any]]

    @classmethod
    def of(cls, given: "Self | Mapping[str, Any] | None") -> Self:
        """From the fields that a caller gives. Raises ValueError for an unknown field or an invalid value."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping | None):
            raise ValueError(f"{cls.field}: got {given!r}, expected fields such as {cls.example}")
        names = [one.name for one in fields(cls)]
        for name in given or {}:
            if name not in names:
                close = nearest(name, names)
                raise ValueError(f"{cls.field}: unknown field {name!r}.{close} Known: {', '.join(names)}")
        return cls(**(given or {}))

    @classmethod
    def over(cls, stored: Mapping[str, Any], given: "Self | Mapping[str, Any] | None") -> Self:
        """The stored fields, overridden by those that a caller gives.

        Raises:
            ValueError: as `of`; or `given` changes the stored dense layers, which have weights.
        """
        wanted, held = cls.of(given), cls.of(stored)
        changes: Mapping[str, Any] = given.to_dict() if isinstance(given, TextSettings) else given or {}
        new, old = getattr(wanted, "dense", ()), getattr(held, "dense", ())
        if old and "dense" in changes and new != old:
            raise ValueError(
                f"dense: got {_shown(new)}, but the model has {_shown(old)}, with weights; leave it out to go on with "
                "these"
            )
        return cls.of({**stored, **changes})

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary; `of` restores the same settings from it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def dense_layers(field: str, given: Any) -> tuple[DenseSettings, ...]:
    """The layers that a caller gives. Raises ValueError for anything but a list of them. field: as of TextSettings."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"{field}: dense is {given!r}, expected a list of layers")
    return tuple(map(DenseSettings.of, given))


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(TextSettings):
    """What the files of sentence-transformers say about a model in addition to its config.json.

    Attributes:
        pooling: how the final hidden states of a text's n tokens become one vector: their mean; the first ("cls"); the
            last; the elementwise maximum ("max"); their sum divided by sqrt(n) ("mean_sqrt_len"); their mean with
            weights 1 to n ("weighted_mean"). "cls+max" concatenates two. None: the model's default, "mean" for encoders
            and "last" for decoders.
        include_prompt: pool the tokens of the prompt, and those that the tokenizer puts before it, too.
        dense: layers applied to the pooled vector, before normalisation.
        normalize: scale embeddings to length 1; None: if they are compared by cosine.
        similarity: how two embeddings are compared.
        query_prompt, document_prompt: the text put before each query, and before each document.
        max_length: tokens of the longest text, including the prompt and special tokens; None: the model's own limit.
    """

    field: ClassVar[str] = "embedding"
    example: ClassVar[Mapping[str, Any]] = {"pooling": "mean"}

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
        object.__setattr__(self, "dense", dense_layers(self.field, self.dense))
        if self.similarity not in SIMILARITIES:
            expected = ", ".join(SIMILARITIES)
            raise ValueError(f"embedding: similarity is {self.similarity!r}, expected one of {expected}")
        if not isinstance(self.normalize, bool | None):
            raise ValueError(f"embedding: normalize is {self.normalize!r}, expected true or false")
        if not isinstance(self.include_prompt, bool):
            raise ValueError(f"embedding: include_prompt is {self.include_prompt!r}, expected true or false")
        check_texts("embedding", self)

    @property
    def dense_by_number(self) -> dict[str, DenseSettings]:
        """The dense layers by the numbers of their steps."""
        return {str(number): layer for number, layer in enumerate(self.dense, FIRST_DENSE)}

    @property
    def normalizes(self) -> bool:
        """Whether embeddings have length 1."""
        return self.similarity == "cosine" if self.normalize is None else bool(self.normalize)


def check_texts(field: str, settings: Any) -> None:
    """Raise ValueError if prompts are no texts, or max_length is no number of tokens. field: as of TextSettings."""
    for name in ("query_prompt", "document_prompt"):
        if not isinstance(value := getattr(settings, name), str):
            raise ValueError(f"{field}: {name} is {value!r}, expected a text")
    length = settings.max_length
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{field}: max_length is {length!r}, expected a number of tokens above 0")


def _shown(layers: Iterable[DenseSettings]) -> str:
    """Dense layers as text, for messages."""
    return " ".join(f"{layer.width}:{layer.activation}" for layer in layers) or "none"

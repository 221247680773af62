"""The configuration of a model: a keyword-only dataclass that maps to JSON and back.

All architectures use the same field names (vocab_size, hidden_size, num_layers, num_heads, intermediate_size, norm_eps,
max_positions, ...). The CONFIG maps of `convert/` translate Hugging Face's names.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from modelcenter.embedding_settings import EmbeddingSettings
from modelcenter.multi_vector_settings import MultiVectorSettings
from modelcenter.registry import nearest
from modelcenter.sparse_settings import SparseEmbeddingSettings

_LAYERS = ("num_layers", "num_decoder_layers")
_SIZES = (
    "vocab_size", "hidden_size", "embedding_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
    "max_positions", "max_decoder_positions", "num_groups", "group_layers", "num_decoder_heads",
    "decoder_intermediate_size", *_LAYERS,
)  # fmt: skip
# Attributes of every config; if an architecture has no such field, they are kept in `extra`.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_FORCED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")  # kept in `extra`; only encoder-decoders obey them
_NOT_NEGATIVE = ("norm_eps", "initializer_range")
_MAX_LAYERS = 10_000  # the layers are built before the files can show that the number is wrong


class FieldError(ValueError):
    """A config field has a value that its model does not support."""

    def __init__(self, model_type: str, name: str, value: Any, expected: str, shown: str | None = None):
        super().__init__(f"{model_type} config: {shown or name} is {value!r}, expected {expected}")
        self.parts = model_type, name, value, expected

    def spelled(self, names: Mapping[str, str]) -> Self:
        """The same error under the field names of the file or the caller; names: {our name: theirs}."""
        model_type, name, value, expected = self.parts
        said = re.sub(r"\w+_\w+", lambda word: names.get(word[0], word[0]), expected)
        return type(self)(model_type, name, value, said, names.get(name))


@dataclass(kw_only=True)
class ModelConfig:
    """Fields that every architecture has.

    Attributes:
        num_labels: the number of outputs of a classification head.
        id2label, label2id: names of the labels; both or neither, consistent with num_labels.
        problem_type: "regression", "single_label_classification", "multi_label_classification" or None: inferred from
            the labels as transformers does.
        embedding: for task "embedding": how hidden states become one vector per text; a mapping is accepted too.
        multi_vector: for task "multi-vector": how hidden states become one vector per token; a mapping is accepted too.
        sparse_embedding: for task "sparse-embedding": how logits become weights of tokens; a mapping is accepted too.
        architectures: class names that the checkpoint declares; they select the head if the caller gives no task.
        dtype: the storage dtype that the checkpoint declares, as a string such as "bfloat16".
        extra: fields of the Hugging Face config that do not change the model here; written back on export.
    """

    model_type: ClassVar[str] = ""
    is_encoder_decoder: ClassVar[bool] = False

    if TYPE_CHECKING:  # every architecture has these, as fields or as properties

        @property
        def vocab_size(self) -> int: ...

        @property
        def hidden_size(self) -> int: ...

    num_labels: int = 2
    id2label: dict[int, str] | None = None
    label2id: dict[str, int] | None = None
    problem_type: str | None = None
    embedding: EmbeddingSettings = EmbeddingSettings()
    multi_vector: MultiVectorSettings = MultiVectorSettings()
    sparse_embedding: SparseEmbeddingSettings = SparseEmbeddingSettings()
    tie_embeddings: bool = True
    architectures: list[str] | None = None
    dtype: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.embedding = EmbeddingSettings.of(self.embedding)
        self.multi_vector = MultiVectorSettings.of(self.multi_vector)
        self.sparse_embedding = SparseEmbeddingSettings.of(self.sparse_embedding)
        if self.id2label is not None:
            self.id2label = {int(k): str(v) for k, v in self.id2label.items()}
            self.num_labels = len(self.id2label)
            if sorted(self.id2label) != list(range(self.num_labels)):
                raise ValueError(
                    f"id2label: got ids {sorted(self.id2label)}, expected 0 to {self.num_labels - 1}, each once"
                )
            self.label2id = {name: index for index, name in self.id2label.items()}
            if len(self.label2id) != self.num_labels:
                raise ValueError(f"id2label: got {self.id2label}, expected a different name for each id")
        kinds = (None, "regression", "single_label_classification", "multi_label_classification")
        if self.problem_type not in kinds:
            raise ValueError(f"problem_type: got {self.problem_type!r}, expected one of {kinds}")
        if self.num_labels < 1:
            raise ValueError(f"num_labels: got {self.num_labels}, expected at least 1")
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            raise ValueError(
                "problem_type: got 'single_label_classification' with num_labels=1, of which nothing can be told apart "
                "(transformers refuses it, too); give 2 labels or more, or problem_type='regression' for one score"
            )
        self.check_values(vars(self), {})
        for f in dataclasses.fields(self):
            setattr(self, f.name, _plain_number(f.type, getattr(self, f.name)))

    if not TYPE_CHECKING:  # a type checker would believe that any attribute exists

        def __getattr__(self, name: str) -> Any:
            if name in _TOKENS:
                return vars(self).get("extra", {}).get(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TOKENS and name not in self.field_names():
            name, value = "extra", {**self.extra, name: value}
        super().__setattr__(name, value)

    def special_tokens(self) -> dict[str, Any]:
        """The ids of the tokens that begin, end and pad texts, as far as this config gives them."""
        held = {name: getattr(self, name) for name in _TOKENS}
        held |= {name: self.extra.get(name) for name in _FORCED_TOKENS if self.is_encoder_decoder}
        return {name: value for name, value in held.items() if value is not None}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """Itself; transformers asks a multimodal config for its text part."""
        return self

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise an error that names the field `name` unless `condition` holds."""
        if not condition:
            raise FieldError(self.model_type, name, getattr(self, name), expected)

    def require_one_of(self, name: str, choices: Collection[str]) -> None:
        """Raise unless the field `name` is one of the choices."""
        self.require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")

    def require_probabilities(self, *names: str) -> None:
        """Raise unless each of these fields is None or a probability below 1, as a dropout's must be."""
        for name in names:
            value = getattr(self, name)
            self.require(value is None or 0 <= value < 1, name, "a probability, 0 <= p < 1")

    def require_token(self, name: str, vocab_size: int) -> None:
        """Raise unless the token id `name` is None or a row of the table; a negative one counts from the end."""
        token = getattr(self, name)
        self.require(token is None or -vocab_size <= token < vocab_size, name, f"one of {vocab_size} tokens, or none")

    def require_extra(self, task: str, expected: Mapping[str, Any]) -> None:
        """Raise unless fields of the Hugging Face config that only `task` reads are absent or have these values."""
        for name, value in expected.items():
            if (found := self.extra.get(name, value)) != value:
                raise ValueError(f"{self.model_type} config: {name} is {found!r}, expected {value!r} for {task}")

    @property
    def max_tokens(self) -> int | None:
        """The number of tokens in the longest sequence that the model supports; None: unlimited."""
        return getattr(self, "max_positions", None)

    @property
    def max_written_tokens(self) -> int | None:
        """The number of tokens in the longest text that the model can generate, including a decoder's prompt; None:
        unlimited."""
        return self.max_tokens

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        """The fields to change in a config of some of these layers. A family whose fields say something of single
        layers, or whose layers depend on their number or their count, overrides this.

        Args:
            numbers: of the kept layers, increasing, from 0. of_decoder: they are those that num_decoder_layers counts.

        Raises:
            ValueError: no layer can be left out; the message says why.
        """
        return {"num_decoder_layers" if of_decoder else "num_layers": len(numbers)}

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def from_dict(cls, values: dict[str, Any], spelled: Mapping[str, str] | None = None) -> Self:
        """Build a config from our own field names.

        Args:
            spelled: {our name: that of the file or the caller} where they differ, for messages.

        Raises:
            ValueError: a key is unknown (the message suggests the nearest) or a required one is missing.
        """
        values = dict(values)
        kind = values.pop("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(f"model_type: got {kind!r}, expected {cls.model_type!r} for {cls.__name__}")
        names = cls.field_names()
        for key in values:
            if key not in names:
                raise ValueError(
                    f"{cls.__name__}: unknown field {key!r}.{nearest(key, names)} Known: {', '.join(names)}"
                )
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{cls.__name__}: missing field {missing[0]!r} (of {len(missing)}: {', '.join(missing)})")
        cls.check_values(values, spelled or {})  # before __post_init__ computes with them
        try:
            return cls(**values)
        except FieldError as error:
            raise error.spelled(spelled or {}) from None

    @classmethod
    def check_values(cls, values: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
        """Raise ValueError for a value of the wrong type. values: by our own names. spelled: as in from_dict."""
        for f in dataclasses.fields(cls):
            if f.name in values and (expected := _expected_value(f.name, f.type, values[f.name])):
                name = spelled.get(f.name, f.name)
                raise ValueError(f"{cls.model_type} config: {name} is {values[f.name]!r}, expected {expected}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary under our own names; `from_dict` restores an equal config."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. Raises ValueError for an unknown field."""
        if "num_labels" in changes and "id2label" not in changes and changes["num_labels"] != self.num_labels:
            changes |= {"id2label": None, "label2id": None}
        return type(self).from_dict({**self.to_dict(), **changes})


def _expected_value(name: str, kind: Any, value: Any) -> str | None:
    """What a number, string or boolean field must be, if the value is not; None: the value is valid."""
    kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
    if value is None:
        return "a number" if NoneType not in kinds and (int in kinds or float in kinds) else None
    if str in kinds:
        return None if isinstance(value, str) else "a text"
    if float in kinds:
        if _is_number(value, Real) and abs(value) < inf and (value >= 0 or name not in _NOT_NEGATIVE):
            return None
        return "a finite number" + (" of at least 0" if name in _NOT_NEGATIVE else "")
    if bool in kinds:
        return None if isinstance(value, bool) or _is_switch(value) else "true or false"
    return _expected_integer(name, value, several=list[int] in kinds) if int in kinds else None


def _expected_integer(name: str, value: Any, several: bool) -> str | None:
    """What an integer field (with `several`, an integer or a list of them) must be, if the value is not; else None."""
    low, high = 1 if name in _SIZES else -inf, _MAX_LAYERS if name in _LAYERS else inf
    numbers = value if several and isinstance(value, list) and value else [value]
    if all(_is_number(number, Integral) and low <= number <= high for number in numbers):
        return None
    limits = f" of at least {low}" if name in _SIZES else ""
    limits += f" and at most {high}" if name in _LAYERS else ""
    return f"a whole number{limits}" + (" or several of them" if several else "")


def _plain_number(kind: Any, value: Any) -> Any:
    """The value as a Python number of the field's type: JSON takes none of NumPy's, and transformers no 1 for 1.0."""
    kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
    if bool in kinds and _is_switch(value):
        return bool(value)
    if float in kinds and _is_number(value, Real):
        return float(value)
    if int in kinds and _is_number(value, Integral):
        return int(value)
    return [int(number) for number in value] if list[int] in kinds and isinstance(value, list) else value


def _is_switch(value: Any) -> bool:
    """Whether the value is 0 or 1, which some files hold for false and true."""
    return _is_number(value, Integral) and value in (0, 1)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)

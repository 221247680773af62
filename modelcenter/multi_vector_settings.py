"""Settings of task "multi-vector": how a text becomes one vector per token. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from modelcenter.embedding_settings import DenseSettings
from modelcenter.registry import nearest

SCORES = ("maxsim", "meanmaxsim")
ROLES = ("query", "document")
FIRST_PROJECTION = 1  # the step of the first layer: step 0 is the transformer
_LENGTHS = ("query_length", "document_length", "expansion_length")
_SWITCHES = ("normalize", "expansion_truncates", "expansion_attended")


@dataclass(frozen=True, kw_only=True)
class MultiVectorSettings:
    """What the files of sentence-transformers' MultiVectorEncoder say in addition to config.json.

    Attributes:
        dense: layers applied to each final hidden state, before normalisation; a trained model usually has one without
            bias or activation.
        normalize: scale vectors to length 1.
        similarity: the score of a query and a document: the sum over the query's vectors of the greatest dot product
            with one of the document's ("maxsim"), or the mean of these ("meanmaxsim").
        query_prompt, document_prompt: the text put before each query, and before each document. None: not decided, as
            before a model is trained; none is put.
        query_length, document_length: tokens of the longest query and document, including the prompt and special
            tokens; None: the tokenizer's own limit.
        expansion_length: shorter queries get mask tokens up to this length, whose vectors count, too; None: they do
            not.
        expansion_truncates: longer queries are cut to expansion_length. expansion_attended: the text's tokens see the
            mask tokens; else these see the text, and nothing sees them. expansion_token: in place of the tokenizer's
            mask token, or of its end token if it has no mask.
        skipped: words whose tokens have no vector (punctuation), in texts of the roles `skipped_in`.
    """

    dense: tuple[DenseSettings, ...] = ()
    normalize: bool = True
    similarity: str = "maxsim"
    query_prompt: str | None = None
    document_prompt: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    expansion_length: int | None = None
    expansion_truncates: bool = True
    expansion_attended: bool = False
    expansion_token: str | None = None
    skipped: tuple[str, ...] = ()
    skipped_in: tuple[str, ...] = ("document",)

    def __post_init__(self) -> None:
        if isinstance(self.dense, str | Mapping) or not isinstance(self.dense, Iterable):
            raise ValueError(f"multi_vector: dense is {self.dense!r}, expected a list of layers")
        object.__setattr__(self, "dense", tuple(map(DenseSettings.of, self.dense)))
        if self.similarity not in SCORES:
            expected = " or ".join(SCORES)
            raise ValueError(f"multi_vector: similarity is {self.similarity!r}, expected {expected}")
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"multi_vector: {name} is {value!r}, expected true or false")
        for name in ("query_prompt", "document_prompt", "expansion_token"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"multi_vector: {name} is {value!r}, expected a text")
        for name in _LENGTHS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"multi_vector: {name} is {value!r}, expected a number of tokens above 0")
        for name in ("skipped", "skipped_in"):
            words = getattr(self, name)
            if isinstance(words, str) or not isinstance(words, Iterable) or not all(isinstance(w, str) for w in words):
                raise ValueError(f"multi_vector: {name} is {words!r:.60}, expected a list of texts")
            object.__setattr__(self, name, tuple(words))
        if wrong := [role for role in self.skipped_in if role not in ROLES]:
            raise ValueError(f"multi_vector: skipped_in has {wrong[0]!r}, expected {' or '.join(ROLES)}")
        ends, width = self.query_length, self.expansion_length
        if ends is not None and width is not None and ends < width:
            raise ValueError(
                f"multi_vector: query_length is {ends}, but queries are expanded to {width} tokens (expansion_length); "
                "give at least as many, or leave it out"
            )

    @property
    def dense_by_number(self) -> dict[str, DenseSettings]:
        """The layers by the numbers of their steps."""
        return {str(number): layer for number, layer in enumerate(self.dense, FIRST_PROJECTION)}

    def prompt(self, role: str) -> str:
        """The text put before each text of a role; "": none."""
        given = self.query_prompt if role == "query" else self.document_prompt
        return given or ""

    @classmethod
    def of(cls, given: "MultiVectorSettings | Mapping[str, Any] | None") -> Self:
        """From the fields that a caller gives. Raises ValueError for an unknown field or an invalid value."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping | None):
            raise ValueError(f"multi_vector: got {given!r}, expected fields such as {{'similarity': 'maxsim'}}")
        names = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in names:
                close = nearest(name, names)
                raise ValueError(f"multi_vector: unknown field {name!r}.{close} Known: {', '.join(names)}")
        return cls(**(given or {}))

    @classmethod
    def over(cls, stored: Mapping[str, Any], given: "MultiVectorSettings | Mapping[str, Any] | None") -> Self:
        """The stored fields, overridden by those that a caller gives.

        Raises:
            ValueError: as `of`; or `given` changes the stored layers, which have weights.
        """
        changes: Mapping[str, Any] = given.to_dict() if isinstance(given, MultiVectorSettings) else given or {}
        wanted, held = cls.of(given), cls.of(stored)
        if held.dense and "dense" in changes and wanted.dense != held.dense:
            shown = [" ".join(f"{x.width}:{x.activation}" for x in of.dense) or "none" for of in (wanted, held)]
            raise ValueError(
                f"dense: got {shown[0]}, but the model has {shown[1]}, with weights; leave it out to go on with these"
            )
        return cls.of({**stored, **changes})

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary; `of` restores the same settings from it."""
        lists = {name: list(getattr(self, name)) for name in ("skipped", "skipped_in")}
        return {**asdict(self), **lists, "dense": [asdict(layer) for layer in self.dense]}

"""Settings of task "multi-vector": how a text becomes one vector per token. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from modelcenter.embedding_settings import DenseSettings, TextSettings, dense_layers

SCORES = ("maxsim", "meanmaxsim")
ROLES = ("query", "document")
FIRST_PROJECTION = 1  # the step of the first layer: step 0 is the transformer
_LENGTHS = ("query_length", "document_length", "expansion_length")
_SWITCHES = ("normalize", "expansion_truncates", "expansion_attended")


@dataclass(frozen=True, kw_only=True)
class MultiVectorSettings(TextSettings):
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

    field: ClassVar[str] = "multi_vector"
    example: ClassVar[Mapping[str, Any]] = {"similarity": "maxsim"}

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
        object.__setattr__(self, "dense", dense_layers(self.field, self.dense))
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

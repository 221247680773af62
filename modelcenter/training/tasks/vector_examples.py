"""Texts of which each token has a vector: queries, expanded by mask tokens, and documents, without punctuation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from modelcenter.data.batching.collate import pack
from modelcenter.data.table import Table
from modelcenter.data.tokenization.tokenize import Tokens, concatenate_tokens, tokenize
from modelcenter.multi_vector_settings import MultiVectorSettings
from modelcenter.training.late_interaction import DOCUMENT, QUERY
from modelcenter.training.tasks.examples import TokenExamples
from modelcenter.training.tasks.preview import shortened
from modelcenter.training.tasks.ranked_examples import RankedExamples


@dataclass(frozen=True)
class VectorTexts:
    """Tokenised texts.

    Attributes:
        tokens: of each text, with the mask tokens that expand it.
        scored: bool (T,), whether the vector of each token counts.
        attended: int64 (texts,), how many tokens of each are attended to, which are the first; None: all.
    """

    tokens: Tokens
    scored: np.ndarray
    attended: np.ndarray | None = None

    @property
    def counts(self) -> np.ndarray:
        """The vectors of each text that count, int64 (texts,)."""
        ends = np.concatenate(([0], np.cumsum(self.scored)))
        return ends[self.tokens.offsets[1:]] - ends[self.tokens.offsets[:-1]]

    def batch(self, numbers: np.ndarray) -> dict[str, Any]:
        """The inputs of a model for the texts with these numbers."""
        batch: dict[str, Any] = pack(self.tokens, numbers)
        if self.attended is not None:
            lengths = self.tokens.lengths[numbers]
            places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            batch["attention_mask"] = torch.from_numpy(places < np.repeat(self.attended[numbers], lengths))[None]
        return batch

    def scored_of(self, numbers: np.ndarray) -> np.ndarray:
        """`scored` of the texts with these numbers, one after the other."""
        return self.scored[token_places(self.tokens, numbers)]


def token_places(tokens: Tokens, numbers: np.ndarray) -> np.ndarray:
    """int64: where the tokens of the texts with these numbers are, one text after the other."""
    lengths, starts = tokens.lengths[numbers], tokens.offsets[:-1][numbers]
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def tokenize_vectors(
    tokenizer: Any,
    table: Table,
    settings: MultiVectorSettings,
    queries: Sequence[str],
    documents: Sequence[str],
    max_length: int,
) -> VectorTexts:
    """The tokens of queries and, behind them, of documents; as MultiVectorEncoder of sentence-transformers makes them.

    Args:
        table: where the texts come from. max_length: of a text, also where the settings allow more.

    Raises:
        ValueError: a text is left without a vector; the settings name a token that the tokenizer has not.
    """
    parts, scored, attended = [], [], []
    skipped = skipped_ids(tokenizer, settings)
    for role, texts in (("query", queries), ("document", documents)):
        if not texts:
            continue
        prompt = settings.prompt(role)
        tokens = tokenize(
            tokenizer, [prompt + text for text in texts], max_length=longest_text(settings, role, max_length)
        )
        counts = ~np.isin(tokens.ids, skipped) if role in settings.skipped_in else np.ones(len(tokens.ids), bool)
        attended.append(tokens.lengths)
        if role == "query" and settings.expansion_length is not None:
            width = min(settings.expansion_length, max_length)
            tokens, counts = _expanded(tokens, counts, width, expansion_id(tokenizer, settings))
        parts.append(tokens)
        scored.append(counts)
        bare = VectorTexts(tokens, counts).counts == 0
        if bare.any():
            text = texts[int(np.argmax(bare))]
            raise ValueError(
                f"{table.name}: the {role} {text!r:.60} has no token with a vector: there is nothing to compare; "
                "remove the row"
            )
    found = VectorTexts(concatenate_tokens(*parts), np.concatenate(scored))
    whole = np.concatenate(attended)
    unattended = not settings.expansion_attended and (whole < found.tokens.lengths).any()
    return VectorTexts(found.tokens, found.scored, whole if unattended else None)


def longest_text(settings: MultiVectorSettings, role: str, most: int) -> int:
    """The tokens of the longest text of a role."""
    if role == "document":
        return min(settings.document_length or most, most)
    if settings.expansion_length is None or not settings.expansion_truncates:
        return min(settings.query_length or most, most)
    return min(settings.expansion_length, most)


def _expanded(tokens: Tokens, scored: np.ndarray, width: int, token: int) -> tuple[Tokens, np.ndarray]:
    """Texts of less than `width` tokens with `token` behind them, up to that; its vectors count."""
    lacking = np.maximum(width - tokens.lengths, 0)
    ends = np.repeat(tokens.offsets[1:], lacking)
    types = None if tokens.type_ids is None else np.insert(tokens.type_ids, ends, 0)
    offsets = np.concatenate(([0], np.cumsum(tokens.lengths + lacking)))
    return Tokens(np.insert(tokens.ids, ends, token), offsets, types, tokens.truncated), np.insert(scored, ends, True)


def expansion_id(tokenizer: Any, settings: MultiVectorSettings) -> int:
    """The token that queries are expanded by. Raises ValueError: the tokenizer has none."""
    named = settings.expansion_token
    if named is not None:
        token = tokenizer.convert_tokens_to_ids(named)
        unknown = token is None or (token == tokenizer.unk_token_id and named != tokenizer.unk_token)
    else:
        token = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        unknown = token is None
    if unknown:
        what = "a mask token nor an end token" if named is None else f"the token {named!r}"
        raise ValueError(f"expansion: the tokenizer has not {what}, by which queries are expanded; give none")
    return int(token)


def skipped_ids(tokenizer: Any, settings: MultiVectorSettings) -> np.ndarray:
    """The tokens that have no vector, int64. Words that are no single token of the tokenizer are left out."""
    found = []
    for word in settings.skipped:
        token = tokenizer.convert_tokens_to_ids(word)
        if token is not None and (token != tokenizer.unk_token_id or word == tokenizer.unk_token):
            found.append(token)
    return np.array(found, np.int64)


@dataclass(frozen=True)
class VectorExamples(TokenExamples):
    """Texts by themselves."""

    texts: VectorTexts

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        return self.texts.batch(rows)


@dataclass(frozen=True)
class RankedVectorExamples(VectorExamples):
    """Rows of a query and its documents. `tokens` has all queries, then the documents, row by row.

    ranked: which documents an epoch uses of a row. text_ids: int64, equal for equal texts, of all texts.
    """

    ranked: RankedExamples
    text_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ranked)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each row in an epoch that uses its longest documents."""
        return self.tokens.lengths[: len(self)] + self.ranked.lengths

    def numbers(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(numbers of the texts that an epoch uses of these rows, row by row; their roles; documents of each row)."""
        rows = np.asarray(rows, np.int64)
        documents, counts = self.ranked.numbers(rows, epoch)
        at = np.cumsum(counts) - counts  # where each row's documents begin
        numbers = np.insert(documents + len(self), at, rows)
        roles = np.insert(np.full(len(documents), DOCUMENT), at, QUERY)
        return numbers, roles, counts

    def facts(self, rows: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """(numbers of the texts of these rows in an epoch, their entries in a batch: late_interaction.FACTS)."""
        numbers, roles, _ = self.numbers(rows, epoch)
        labels = np.zeros(len(numbers), np.float32)
        labels[roles == DOCUMENT] = self.ranked.texts.labels[numbers[roles == DOCUMENT] - len(self)]
        return numbers, {
            "roles": torch.from_numpy(roles),
            "text_ids": torch.from_numpy(self.text_ids[numbers]),
            "labels": torch.from_numpy(labels),
            "scored": torch.from_numpy(self.texts.scored_of(numbers)),
        }

    def batch(self, rows: np.ndarray, epoch: int = 0) -> dict[str, Any]:
        numbers, facts = self.facts(rows, epoch)
        return {**self.texts.batch(numbers), **facts}

    def row_ids(self, rows: np.ndarray) -> np.ndarray:
        return self.numbers(rows)[0]

    def show(self, row: int, tokenizer: Any) -> str:
        numbers, _, _ = self.numbers(np.array([row]))
        texts = [shortened(tokenizer.decode(self.tokens.row(number)), 80) for number in numbers[:3].tolist()]
        return f"{' | '.join(texts)}{f' | {len(numbers) - 3} more' if len(numbers) > 3 else ''}"

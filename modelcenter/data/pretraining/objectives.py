"""What pretraining asks of pieces of text: the next token, hidden tokens, what follows, corrupted spans.

An objective makes packed batches of pieces of documents, which have no special tokens yet. What it draws is a function
of (seed, epoch, key of the row) alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from modelcenter.data.batching.collate import pack_documents
from modelcenter.data.pretraining.masking import IGNORED, Masking
from modelcenter.data.pretraining.span_corruption import SpanCorruption
from modelcenter.data.tokenization.special_tokens import SpecialTokens

Key = tuple[int, ...]  # what tells a row from all others of its data
Pieces = Sequence[np.ndarray]
Batch = dict[str, Any]
_PIECES = 64  # of a row that get numbers of their own for dropout
_TAGS = {"mask": 0x3A5C, "pair": 0x9A12, "spans": 0x59A4}  # so that no two draws of a row are the same


class Objective(Protocol):
    """room: tokens of a piece that make a sequence of max_length. least: of a piece that can be asked anything.
    bare: pieces come without the end token that documents have in token files. kept: tokens of a piece that becomes a
    sequence; shorter ones are left out of batches."""

    room: int
    least: int
    kept: int
    bare: bool

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens in a batch of pieces of so many tokens."""
        ...

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        """The packed batch of rows, each of one or more pieces."""
        ...


class Causal:
    """The next token of each; documents keep the end token they have.

    said: batches say that no token is context, for models in which all tokens see each other otherwise.
    """

    bare = False
    least = 2
    kept = 1

    def __init__(self, max_length: int, said: bool = False):
        self.room, self.said = max_length, said

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        return sizes

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        batch: Batch = dict(pack_documents(rows))
        if self.said:
            batch["context"] = torch.zeros_like(batch["input_ids"])
        return batch


class Masked:
    """Hidden tokens; each piece is a sequence with the tokenizer's special tokens."""

    bare = True
    least = 1
    kept = 1

    def __init__(self, masking: Masking, special: SpecialTokens, max_length: int, seed: int):
        self.masking, self.special, self.seed = masking, special, seed
        self.room = max_length - len(special)
        self.before, self.after = np.array(special.before, np.int64), np.array(special.after, np.int64)

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        return sizes + len(self.special)

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        sequences, labels = [], []
        for pieces, key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _TAGS["mask"], epoch, *key])
            for piece in pieces:
                hidden, asked = self.masking.apply(piece, random)
                sequences.append(np.concatenate((self.before, hidden, self.after)))
                labels.append(np.pad(asked, (len(self.before), len(self.after)), constant_values=IGNORED))
        return labelled_batch(sequences, labels)


class Paired(Masked):
    """Hidden tokens, and whether the second part of a pair follows the first: BERT's pretraining.

    A row is a piece cut in two, after the end of a sentence where there is one. In every second row, drawn at random,
    tokens of another document take the place of the second part: then next_sentence_label is 1.

    other: (key, how many, generator) -> so many tokens of another document, or fewer.
    ends: tokens that end a sentence.
    """

    least = 2

    def __init__(
        self,
        masking: Masking,
        special: SpecialTokens,
        max_length: int,
        seed: int,
        ends: np.ndarray,
        other: Callable[[Key, int, np.random.Generator], np.ndarray] | None = None,
    ):
        super().__init__(masking, special, max_length, seed)
        self.ends, self.other = ends, other

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        assert self.other is not None and self.special.between is not None
        between = np.array(self.special.between, np.int64)
        sequences, labels, types, follows = [], [], [], []
        for (piece,), key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _TAGS["pair"], epoch, *key])
            cut = self.cut(piece, random)
            first, second = piece[:cut], piece[cut:]
            apart = random.random() < 0.5
            if apart:
                second = self.other(key, len(second), random)
            parts = [self.masking.apply(part, random) for part in (first, second)]
            (a, asked_a), (b, asked_b) = parts
            sequences.append(np.concatenate((self.before, a, between, b, self.after)))
            none = [np.full(len(part), IGNORED) for part in (self.before, between, self.after)]
            labels.append(np.concatenate((none[0], asked_a, none[1], asked_b, none[2])))
            types.append(np.repeat([0, 1], [len(self.before) + len(a) + len(between), len(b) + len(self.after)]))
            follows.append(int(apart))
        batch = labelled_batch(sequences, labels)
        kinds = np.concatenate(types) if types else np.zeros(0, np.int64)
        batch["token_type_ids"] = torch.from_numpy(kinds)[None]
        batch["next_sentence_label"] = torch.tensor(follows, dtype=torch.long)
        return batch

    def beside(self, other: Callable[[Key, int, np.random.Generator], np.ndarray]) -> Paired:
        """The same, with other documents to draw from."""
        found = copy.copy(self)
        found.other = other
        return found

    def cut(self, piece: np.ndarray, random: np.random.Generator) -> int:
        """Where the second part starts; neither is empty."""
        places = np.flatnonzero(np.isin(piece[:-1], self.ends)) + 1
        return int(random.choice(places)) if len(places) else int(random.integers(1, len(piece)))


class Spans:
    """Corrupted spans, for encoder-decoders: the encoder reads what is left, the decoder writes what is missing."""

    bare = True
    least = 2
    kept = 2

    def __init__(self, corruption: SpanCorruption, seed: int):
        self.corruption, self.seed, self.room = corruption, seed, corruption.room

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        inputs, targets = self.corruption.lengths(sizes)
        return inputs + targets

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        inputs, targets = [], []
        for pieces, key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _TAGS["spans"], epoch, *key])
            for piece in pieces:
                if len(piece) >= self.kept:
                    source, target = self.corruption.apply(piece, random)
                    inputs.append(source)
                    targets.append(target)
        batch = pack_documents([inputs])
        decoder = pack_documents([targets])
        sides = {f"decoder_{name}": decoder[name] for name in ("cu_seqlens", "max_seqlen")}
        return {**batch, **sides, "labels": decoder["labels"]}


def labelled_batch(sequences: list[np.ndarray], labels: list[np.ndarray]) -> Batch:
    """The packed batch of sequences with a label, or -100, at each token."""
    batch: Batch = dict(pack_documents([sequences]))
    flat = np.concatenate(labels).astype(np.int64) if labels else np.zeros(0, np.int64)
    return batch | {"labels": torch.from_numpy(flat)[None]}


def sequence_numbers(keys: Sequence[Key], counts: Sequence[int]) -> np.ndarray:
    """A number for each sequence of rows with these keys, by which dropout draws: the same whatever is in its batch.

    counts: sequences of each row.
    """
    found = []
    for key, count in zip(keys, counts, strict=True):
        number = 0
        for part in key:
            number = (number * 1_000_003 + part) % 2**25
        found += [(number * _PIECES + i) % 2**31 for i in range(count)]
    return np.array(found, np.int64)


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """The tokens that end a sentence: full stops, question and exclamation marks, of Chinese too."""
    vocabulary = tokenizer.get_vocab()
    marks = {".", "!", "?", "。", "！", "？", "…", ";", "；"}
    byte_level = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("。")) if tokenizer.tokenize("。") else []
    found = {i for token, i in vocabulary.items() if token.lstrip("Ġ▁").removeprefix("##") in marks}
    if len(byte_level) == 1 and byte_level[0] != tokenizer.unk_token_id:
        found.add(byte_level[0])
    return np.array(sorted(found), np.int64)

"""Objectives of pretraining: the next token, masked tokens, replaced ones, the next sentence, the order of two,
corrupted spans.

An objective makes packed batches from pieces of documents, which have no special tokens yet. What it draws at random is
a function of (seed, epoch, key of the row) alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from modelcenter.data.batching.collate import pack_documents
from modelcenter.data.examples import SEQUENCES_PER_ROW
from modelcenter.data.pretraining.masking import IGNORED, Masking
from modelcenter.data.pretraining.span_corruption import SpanCorruption
from modelcenter.data.tokenization.special_tokens import SpecialTokens

Key = tuple[int, ...]  # identifies a row within its data
Pieces = Sequence[np.ndarray]
Batch = dict[str, Any]
# So that no two objectives draw the same for a row.
_SEEDS = {"mask": 0x3A5C, "pair": 0x9A12, "spans": 0x59A4, "draws": 0xD4A3}


class Objective(Protocol):
    """How pieces become inputs and labels.

    min_piece, max_piece: the fewest tokens of a piece that gives the model something to predict, and the most, which
        make a sequence of max_length.
    min_sequence: the fewest tokens of a piece that becomes a sequence; shorter ones are left out of batches.
    bare: pieces come without the end token that documents have in token files.
    """

    min_piece: int
    max_piece: int
    min_sequence: int
    bare: bool

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens that pieces of these sizes have in a batch, at most."""
        ...

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        """The packed batch of rows, each of one or more pieces."""
        ...


class Causal:
    """The next token of each token; documents keep their end tokens.

    before: what each piece begins with, as the texts that the model was trained on and is given to complete (Llama's
        <s>), unless it does already: documents of token files may. mark_context: batches state that no token is
        context, for models whose tokens otherwise all attend to each other.
    """

    bare = False
    min_sequence = 1

    def __init__(self, max_length: int, before: Sequence[int] = (), mark_context: bool = False):
        self.before, self.mark_context = np.array(before, np.int64), mark_context
        self.max_piece = max_length - len(before)
        self.min_piece = 1 if before else 2

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        return sizes + len(self.before)

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        batch: Batch = dict(pack_documents([[self._begun(piece) for piece in pieces] for pieces in rows]))
        if self.mark_context:
            batch["context"] = torch.zeros_like(batch["input_ids"])
        return batch

    def _begun(self, piece: np.ndarray) -> np.ndarray:
        begins = np.array_equal(piece[: len(self.before)], self.before)
        return piece if begins else np.concatenate((self.before, piece))


class Masked:
    """Masked tokens; each piece is a sequence with the tokenizer's special tokens."""

    bare = True
    min_piece = 1
    min_sequence = 1

    def __init__(self, masking: Masking, special: SpecialTokens, max_length: int, seed: int):
        self.masking, self.special, self.seed = masking, special, seed
        self.max_piece = max_length - len(special)
        self.before, self.after = np.array(special.before, np.int64), np.array(special.after, np.int64)

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        return sizes + len(self.special)

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        sequences, labels = [], []
        for pieces, key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _SEEDS["mask"], epoch, *key])
            for piece in pieces:
                masked, targets = self.masking.apply(piece, random)
                sequences.append(np.concatenate((self.before, masked, self.after)))
                labels.append(np.pad(targets, (len(self.before), len(self.after)), constant_values=IGNORED))
        return labelled_batch(sequences, labels)


class Replaced(Masked):
    """Masked tokens, and at each token a random number, by which a generator's guess is drawn on the device: `draws`,
    int64 from 0 to 2**bits - 1. Drawn here by row, so that guesses do not depend on how batches are cut."""

    def __init__(self, masking: Masking, special: SpecialTokens, max_length: int, seed: int, bits: int = 53):
        super().__init__(masking, special, max_length, seed)
        self.bits = bits

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        draws = [np.zeros(0, np.int64)]
        for pieces, key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _SEEDS["draws"], epoch, *key])
            draws += [random.integers(0, 1 << self.bits, len(piece) + len(self.special)) for piece in pieces]
        return super().batch(rows, keys, epoch) | {"draws": torch.from_numpy(np.concatenate(draws))[None]}


class Pairs(Masked):
    """Masked tokens, and a label of two parts: a row is a piece cut in two, after the end of a sentence where there is
    one. A subclass names the label, and changes every second row, drawn at random: then its label is 1.

    ends: tokens that end a sentence.
    """

    min_piece = 2
    label: ClassVar[str]

    def __init__(self, masking: Masking, special: SpecialTokens, max_length: int, seed: int, ends: np.ndarray):
        super().__init__(masking, special, max_length, seed)
        self.ends = ends

    def changed(self, parts: Pieces, key: Key, random: np.random.Generator) -> Pieces:
        """The two parts of row `key` as they stand where the label is 1."""
        raise NotImplementedError

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        assert self.special.between is not None
        between = np.array(self.special.between, np.int64)
        sequences, labels, types, of_pairs = [], [], [], []
        for (piece,), key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _SEEDS["pair"], epoch, *key])
            cut = self.cut(piece, random)
            parts: Pieces = (piece[:cut], piece[cut:])
            is_changed = random.random() < 0.5
            if is_changed:
                parts = self.changed(parts, key, random)
            (a, labels_a), (b, labels_b) = [self.masking.apply(part, random) for part in parts]
            sequences.append(np.concatenate((self.before, a, between, b, self.after)))
            none = [np.full(len(part), IGNORED) for part in (self.before, between, self.after)]
            labels.append(np.concatenate((none[0], labels_a, none[1], labels_b, none[2])))
            types.append(np.repeat([0, 1], [len(self.before) + len(a) + len(between), len(b) + len(self.after)]))
            of_pairs.append(int(is_changed))
        batch = labelled_batch(sequences, labels)
        type_ids = np.concatenate(types) if types else np.zeros(0, np.int64)
        batch["token_type_ids"] = torch.from_numpy(type_ids)[None]
        batch[self.label] = torch.tensor(of_pairs, dtype=torch.long)
        return batch

    def cut(self, piece: np.ndarray, random: np.random.Generator) -> int:
        """Where the second part starts; neither is empty."""
        places = np.flatnonzero(np.isin(piece[:-1], self.ends)) + 1
        return int(random.choice(places)) if len(places) else int(random.integers(1, len(piece)))


class NextSentence(Pairs):
    """BERT's pretraining: tokens of another document take the place of the second part.

    sample_other: (key, count, generator) -> up to `count` tokens of another document than the row's.
    """

    label = "next_sentence_label"
    sample_other: Callable[[Key, int, np.random.Generator], np.ndarray] | None = None

    def changed(self, parts: Pieces, key: Key, random: np.random.Generator) -> Pieces:
        assert self.sample_other is not None
        first, second = parts
        return first, self.sample_other(key, len(second), random)

    def with_documents(self, sample_other: Callable[[Key, int, np.random.Generator], np.ndarray]) -> NextSentence:
        """The same objective with documents to sample from."""
        objective = copy.copy(self)
        objective.sample_other = sample_other
        return objective


class SentenceOrder(Pairs):
    """ALBERT's pretraining: the second part stands before the first."""

    label = "sentence_order_label"

    def changed(self, parts: Pieces, key: Key, random: np.random.Generator) -> Pieces:
        first, second = parts
        return second, first


class Spans:
    """Corrupted spans, for encoder-decoders: the encoder reads what is left, the decoder writes what is missing."""

    bare = True
    min_piece = 2
    min_sequence = 2

    def __init__(self, corruption: SpanCorruption, seed: int):
        self.corruption, self.seed, self.max_piece = corruption, seed, corruption.room

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        inputs, targets = self.corruption.lengths(sizes)
        return inputs + targets

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        inputs, targets = [], []
        for pieces, key in zip(rows, keys, strict=True):
            random = np.random.default_rng([self.seed, _SEEDS["spans"], epoch, *key])
            for piece in pieces:
                if len(piece) >= self.min_sequence:
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
    """A number for each sequence of rows with these keys, from which dropout draws its mask whatever is in the batch.

    counts: sequences of each row.
    """
    numbers = []
    for key, count in zip(keys, counts, strict=True):
        number = 0
        for part in key:
            number = (number * 1_000_003 + part) % 2**25
        numbers += [(number * SEQUENCES_PER_ROW + i) % 2**31 for i in range(count)]
    return np.array(numbers, np.int64)


def sentence_ends(tokenizer: Any) -> np.ndarray:
    """The tokens that end a sentence: full stops, question and exclamation marks, of Chinese too."""
    vocabulary = tokenizer.get_vocab()
    marks = {".", "!", "?", "。", "！", "？", "…", ";", "；"}
    full_stop = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("。")) if tokenizer.tokenize("。") else []
    ends = {i for token, i in vocabulary.items() if token.lstrip("Ġ▁").removeprefix("##") in marks}
    if len(full_stop) == 1 and full_stop[0] != tokenizer.unk_token_id:  # byte-level tokens are not spelt as characters
        ends.add(full_stop[0])
    return np.array(sorted(ends), np.int64)

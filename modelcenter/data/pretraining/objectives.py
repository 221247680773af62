"""Pretraining objectives: next token, masked tokens, replaced tokens, next sentence, sentence order, corrupted spans.

An objective makes packed batches from pieces of documents, which have no special tokens yet. Its random draws depend
only on (seed, epoch, key of the row).
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
# Give each objective its own random draws.
_SEEDS = {"mask": 0x3A5C, "pair": 0x9A12, "spans": 0x59A4, "draws": 0xD4A3}


class Objective(Protocol):
    """Turns pieces into inputs and labels.

    min_piece, max_piece: the fewest tokens with which a piece has something to predict, and the most, with which it
        makes a sequence of max_length.
    min_sequence: the fewest tokens with which a piece becomes a sequence; shorter pieces are left out of batches.
    bare: pieces come without the end token that documents have in token files.
    """

    min_piece: int
    max_piece: int
    min_sequence: int
    bare: bool

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """The maximum number of tokens that pieces of these sizes take in a batch."""
        ...

    def batch(self, rows: Sequence[Pieces], keys: Sequence[Key], epoch: int) -> Batch:
        """The packed batch of rows of one or more pieces each."""
        ...


class Causal:
    """Predict the next token at each token; documents keep their end tokens.

    before: the token at the start of each piece, as in the model's training texts and prompts (Llama's <s>). It is not
        added to pieces that begin with it, as documents of token files may. mark_context: batches state that no token
        is context, for models in which context tokens attend to each other by default.
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
    """Predict masked tokens; each piece becomes a sequence with the tokenizer's special tokens."""

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
    """Masked tokens, and a random number at each token, from which a generator's guess is sampled on the device:
    `draws`, int64 from 0 to 2**bits - 1. They are drawn here by row, so that guesses do not depend on how batches are
    split."""

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
    """Masked tokens, and a label for each pair: a row is a piece cut in two, if possible after the end of a sentence. A
    subclass names the label and, for a random half of the rows, changes the pair and sets its label to 1.

    ends: tokens that end a sentence.
    """

    min_piece = 2
    label: ClassVar[str]

    def __init__(self, masking: Masking, special: SpecialTokens, max_length: int, seed: int, ends: np.ndarray):
        super().__init__(masking, special, max_length, seed)
        self.ends = ends

    def changed(self, parts: Pieces, key: Key, random: np.random.Generator) -> Pieces:
        """The two parts of row `key` for the label 1."""
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
        """The index where the second part starts; neither part is empty."""
        places = np.flatnonzero(np.isin(piece[:-1], self.ends)) + 1
        return int(random.choice(places)) if len(places) else int(random.integers(1, len(piece)))


class NextSentence(Pairs):
    """BERT's pretraining: for the label 1, tokens of another document replace the second part.

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
    """ALBERT's pretraining: for the label 1, the two parts are swapped."""

    label = "sentence_order_label"

    def changed(self, parts: Pieces, key: Key, random: np.random.Generator) -> Pieces:
        first, second = parts
        return second, first


class Spans:
    """Corrupted spans, for encoder-decoders: the encoder reads the remaining text, the decoder predicts the missing
    spans."""

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
    """The packed batch of sequences, with a label or -100 at each token."""
    batch: Batch = dict(pack_documents([sequences]))
    flat = np.concatenate(labels).astype(np.int64) if labels else np.zeros(0, np.int64)
    return batch | {"labels": torch.from_numpy(flat)[None]}


def sequence_numbers(keys: Sequence[Key], counts: Sequence[int]) -> np.ndarray:
    """A number for each sequence of the rows with these keys, from which dropout draws its mask, whatever else is in
    the batch.

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
    """The tokens that end a sentence: full stops, question and exclamation marks, including Chinese ones."""
    vocabulary = tokenizer.get_vocab()
    marks = {".", "!", "?", "。", "！", "？", "…", ";", "；"}
    full_stop = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("。")) if tokenizer.tokenize("。") else []
    ends = {i for token, i in vocabulary.items() if token.lstrip("Ġ▁").removeprefix("##") in marks}
    if len(full_stop) == 1 and full_stop[0] != tokenizer.unk_token_id:  # byte-level tokens spell it otherwise
        ends.add(full_stop[0])
    return np.array(sorted(ends), np.int64)

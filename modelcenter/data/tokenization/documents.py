"""From whole documents to tokens for pretraining, without special tokens except one after each document."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def end_token(tokenizer: Any) -> int:
    """The token after a document: eos_token, else sep_token. Raises ValueError if the tokenizer has neither."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise ValueError("eos: the tokenizer has neither an eos_token nor a sep_token; leave documents without one")


class DocumentEncoder:
    """Encodes texts to (concatenated tokens, length of each), with `end` after each text that has tokens, and no other
    special tokens. tokenizer: a slow transformers tokenizer, or the Rust part of a fast one."""

    def __init__(self, tokenizer: Any, end: int | None, split_special: bool = False):
        self.tokenizer, self.end, self.split_special = tokenizer, end, split_special
        self.is_rust = hasattr(tokenizer, "encode_batch_fast")
        if self.is_rust:
            tokenizer.encode_special_tokens = split_special

    @classmethod
    def of(cls, tokenizer: Any, end: int | None) -> DocumentEncoder:
        """An encoder with a copy of the tokenizer's Rust part, without truncation and padding, which workers can
        unpickle without importing transformers."""
        if not tokenizer.is_fast:
            return cls(tokenizer, end)
        backend = tokenizer.backend_tokenizer
        copy = type(backend).from_str(backend.to_str())
        copy.no_truncation(), copy.no_padding()
        return cls(copy, end, backend.encode_special_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the encoder in a worker, because encode_special_tokens is not part of a pickled tokenizer."""
        return type(self), (self.tokenizer, self.end, self.split_special)

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self.is_rust:
            rows = [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if self.end is not None:
            for row in filter(None, rows):
                row.append(self.end)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

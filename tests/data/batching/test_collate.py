"""Packed batches."""

import numpy as np
import torch

from modelcenter.data.batching.collate import merge, pack, pack_documents, pack_pairs
from modelcenter.data.tokenization.tokenize import Tokens

TOKENS = Tokens(np.arange(10, 20, dtype=np.int32), np.array([0, 3, 3, 4, 10]), None, 0)


def test_rows_end_to_end_in_the_order_asked():
    batch = pack(TOKENS, np.array([3, 0]), np.array([7, 8, 9, 6]))
    assert batch["input_ids"].tolist() == [[14, 15, 16, 17, 18, 19, 10, 11, 12]]
    assert batch["cu_seqlens"].tolist() == [0, 6, 9]
    assert batch["max_seqlen"] == 6 and isinstance(batch["max_seqlen"], int)
    assert batch["labels"].tolist() == [6, 7]
    assert (batch["input_ids"].dtype, batch["cu_seqlens"].dtype) == (torch.int64, torch.int32)
    assert "token_type_ids" not in batch


def test_type_ids_and_no_labels():
    tokens = Tokens(TOKENS.ids, TOKENS.offsets, (np.arange(10) % 2).astype(np.uint8), 0)
    batch = pack(tokens, np.array([2, 3]))
    assert batch["token_type_ids"].tolist() == [[1, 0, 1, 0, 1, 0, 1]]
    assert batch["token_type_ids"].dtype == torch.int64 and "labels" not in batch


def test_float_targets_keep_their_shape():
    batch = pack(TOKENS, np.array([0, 3]), np.eye(4, dtype=np.float32))
    assert batch["labels"].dtype == torch.float32 and batch["labels"].shape == (2, 4)


def test_no_rows():
    batch = pack(TOKENS, np.zeros(0, dtype=np.int64), np.zeros(4, dtype=np.int64))
    assert batch["input_ids"].shape == (1, 0) and batch["cu_seqlens"].tolist() == [0] and batch["max_seqlen"] == 0
    documents = pack_documents([])
    assert documents["input_ids"].shape == (1, 0) and documents["max_seqlen"] == 0


def test_both_sides_of_rows():
    sources = Tokens(np.arange(30, 35, dtype=np.int32), np.array([0, 2, 4, 4, 5]), np.ones(5, np.uint8), 0)
    batch = pack_pairs(sources, TOKENS, np.array([3, 0]))
    assert batch["input_ids"].tolist() == [[34, 30, 31]] and batch["cu_seqlens"].tolist() == [0, 1, 3]
    assert batch["labels"].tolist() == [[14, 15, 16, 17, 18, 19, 10, 11, 12]]
    assert batch["decoder_cu_seqlens"].tolist() == [0, 6, 9]
    assert (batch["max_seqlen"], batch["decoder_max_seqlen"]) == (2, 6) and len(batch) == 6


def test_choices_of_joined_rows():
    """Two rows of two choices, one of four, none: a number where all agree, else one for each row."""
    two = pack(TOKENS, np.arange(4)) | {"num_choices": 2}
    one, none = pack(TOKENS, np.arange(4)) | {"num_choices": 4}, pack(TOKENS, np.arange(0)) | {"num_choices": 2}
    assert merge([two, two, none])["num_choices"] == 2
    assert merge([two, one, none])["num_choices"].tolist() == [2, 2, 4]
    each = merge([one | {"num_choices": torch.tensor([1, 3])}, two])
    assert each["num_choices"].tolist() == [1, 3, 2, 2] and each["cu_seqlens"][-1] == 20


def test_as_many_targets_as_a_row_has_tokens_stay_those_of_the_row():
    rows = [pack(TOKENS, np.array([0]), np.eye(4, 3, dtype=np.float32)) for _ in range(2)]
    assert [batch["input_ids"].shape for batch in rows] == [batch["labels"].shape for batch in rows] == [(1, 3)] * 2
    assert merge(rows)["labels"].tolist() == [[1, 0, 0], [1, 0, 0]] and merge(rows)["input_ids"].shape == (1, 6)

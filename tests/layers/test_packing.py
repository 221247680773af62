"""Packed batches: unpadding, positions, and clear errors."""

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

from engine.ops import dropout_key, dropout_rows
from modelcenter.layers.packing import Packed


def test_offsets_are_what_kernels_take():
    ends = torch.tensor([[0, 9], [2, 9], [5, 9]])[:, 0]
    offsets = Packed.from_cu_seqlens(ends, None, 5).cu_seqlens
    assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets.tolist() == [0, 2, 5]


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_unpad_then_repad(side):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    if side == "left":
        mask = mask.flip(1)
    elif side == "holes":
        mask[2, 1] = 0
    ctx = Packed.from_mask((3, 4), mask, torch.device("cpu"))
    x = torch.randn(3, 4, 2)
    flat = ctx.unpad(x)
    assert flat.shape == (int(mask.sum()), 2)
    assert torch.equal(ctx.repad(flat, 7.0), torch.where(mask.bool()[..., None], x, 7.0))
    assert ctx.sequences.host_lengths() == mask.sum(1).tolist() and ctx.max_seqlen == mask.sum(1).max()
    columns = torch.arange(4).expand(3, 4)[mask.bool()]
    assert torch.equal(ctx.positions, columns)  # as transformers: a token's position is its column


@pytest.mark.parametrize("side", ["left", "right"])
def test_counted_positions(side):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    mask = mask.flip(1) if side == "left" else mask
    ctx = Packed.from_mask((3, 4), mask, torch.device("cpu"), count=True)
    assert ctx.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("how", ["padded", "full", "packed"])
def test_tokens_of_the_model_before_each_sequence(how):
    """They are in no tensor of the caller's: where one comes in they are filled in, where one goes out left out."""
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1]])
    if how == "packed":
        ctx = Packed.from_cu_seqlens(torch.tensor([0, 2, 2, 5], dtype=torch.int32), None, 5)
        x = torch.tensor([[5, 6, 7, 8, 9]])
    else:
        mask = mask if how == "padded" else None
        ctx = Packed.from_mask((3, 3), mask, torch.device("cpu"), count=True)
        x = torch.tensor([[0, 5, 6], [0, 0, 0], [7, 8, 9]])
    ctx = ctx.with_prefix(2)
    middle = [0, 0, 0] if how == "full" else []
    first = [0, 5, 6] if how == "full" else [5, 6]
    own = torch.tensor([1, 2])
    assert ctx.unpad(x, prefix=own).tolist() == [1, 2, *first, 1, 2, *middle, 1, 2, 7, 8, 9]
    assert ctx.unpad(x, -1).tolist() == [-1, -1, *first, -1, -1, *middle, -1, -1, 7, 8, 9]
    assert torch.equal(ctx.repad(ctx.unpad(x)), x)
    assert ctx.sequences.host_lengths() == [2 + len(first), 2 + len(middle), 5] and ctx.max_seqlen == 5
    assert ctx.cu_seqlens.tolist() == [0, 2 + len(first), 4 + len(first) + len(middle), ctx.num_tokens]
    assert ctx.positions.tolist() == [i for n in ctx.sequences.host_lengths() for i in range(n)]
    vectors = torch.randn(*x.shape, 4)
    prompts = torch.randn(2, 4)
    assert torch.equal(ctx.unpad(vectors, prefix=prompts)[:2], prompts)
    assert torch.equal(ctx.select(ctx.unpad(vectors, prefix=prompts), ctx.last_tokens())[2], vectors.flatten(0, 1)[-1])


def test_packed_positions_restart():
    ctx = Packed.from_cu_seqlens(torch.tensor([0, 3, 3, 5], dtype=torch.int32), None, 5)
    assert ctx.positions.tolist() == [0, 1, 2, 0, 1] and ctx.max_seqlen == 3 and ctx.num_sequences == 3
    assert ctx.pad_by_sequence(torch.arange(5.0), -1.0).tolist() == [[0, 1, 2], [-1, -1, -1], [3, 4, -1]]
    with pytest.raises(ValueError, match="row 1 of the batch has no token"):
        ctx.first_tokens()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([3, 2]), r"attention_mask: got shape \(2,\), expected \(2, 4\).*lengths"),
        (torch.tensor([[3, 0, 0, 0], [2, 0, 0, 0]]), "attention_mask: got values from 0 to 3, expected only 1"),
        (torch.zeros(2, 4) - 10000.0, "attention_mask: got values from -10000.0"),
        (torch.ones(2, 1, 1, 4), r"attention_mask: got shape \(2, 1, 1, 4\)"),
    ],
    ids=["lengths", "lengths in a column", "additive", "extended"],
)
def test_a_mask_that_is_no_mask(mask, message):
    with pytest.raises(ValueError, match=message):
        Packed.from_mask((2, 4), mask, torch.device("cpu"))


@pytest.mark.parametrize(
    "ends", [[0, 3], [1, 5], [0, 4, 2, 5], [0.0, 5.0], [[0, 5]]], ids=["short", "late", "falling", "float", "2-D"]
)
def test_offsets_that_are_no_offsets(ends):
    with pytest.raises(ValueError, match="cu_seqlens"):
        Packed.from_cu_seqlens(torch.tensor(ends), None, 5)


def test_a_unit_in_16_bits_gets_a_copy_of_its_batch():
    """fully_shard casts what a unit gets, and makes each dataclass in it anew, with all of its fields."""
    with dropout_key(1, 2), dropout_rows(torch.tensor([4, 7])):
        packed = Packed.from_cu_seqlens(torch.tensor([0, 2, 5]), None, 5).with_draws()
    for batch in (packed, packed.with_outputs(torch.tensor([1, 4]))):
        found, given = _apply_to_tensors(lambda x: x.clone(), batch).draws, batch.draws
        assert (found.key, found.graph_key.item()) == (given.key, given.key) and found.graph_key.is_cpu
        assert torch.equal(found.of(5), given.tokens) and len(found.parts) == len(given.parts)

"""Looked-up embeddings: torch's, but for gradients in 16 bits on a CPU."""

import pytest
import torch
from torch import nn

from engine.ops import Embedding, embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("padding, ids_dtype", [(None, torch.int64), (3, torch.int64), (-1, torch.int32)])
def test_gradients_of_rows_that_many_tokens_look_up(dtype, padding, ids_dtype):
    """torch's own stop growing at 256 of the first row in bf16."""
    table = Embedding(5, 3, padding_idx=padding).to(dtype)
    ids = torch.tensor([0] * 4096 + [1, 4, 4, 3], dtype=ids_dtype).view(4, -1)
    out = table(ids)
    assert torch.equal(out, table.weight[ids.long()])
    out.backward(torch.ones_like(out))
    counts = [4096.0, 1.0, 0.0, 1.0, 2.0]
    if padding is not None:
        counts[padding] = 0.0
    assert table.weight.grad.dtype == dtype and table.weight.grad[:, 0].tolist() == counts


def test_what_is_not_trained_takes_torchs_way():
    weight = torch.randn(5, 3).bfloat16()
    assert embedding(torch.tensor([2]), weight).grad_fn is None
    weight.requires_grad_()
    with torch.no_grad():
        assert embedding(torch.tensor([2]), weight).grad_fn is None
    with pytest.raises(IndexError):
        embedding(torch.tensor([5]), weight)
    table = nn.Embedding(5, 3)
    mine = Embedding(5, 3)
    mine.load_state_dict(table.state_dict())
    assert torch.equal(mine(torch.tensor([1, 4])), table(torch.tensor([1, 4])))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_what_is_not_known_is_refused(option):
    with pytest.raises(ValueError, match=f"does not know {next(iter(option))}"):
        Embedding(5, 3, **option)

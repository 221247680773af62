"""Packed attention against torch's scaled_dot_product_attention on each sequence alone, in float64."""

import pytest
import torch
import torch.nn.functional as F

from engine import ops
from modelcenter.layers import attention
from modelcenter.layers.packing import Packed

LENGTHS = {
    "one": [9],
    "equal": [5, 5, 5],
    "ragged": [3, 40, 1, 7, 7, 120, 2, 38],
    "equal but apart": [4, 90, 4, 90],
    "with empty": [0, 3, 0, 60, 1],
    "none": [],
}


@pytest.fixture(params=LENGTHS.values(), ids=LENGTHS)
def packed(request):
    ends = torch.tensor([0, *request.param]).cumsum(0).int()
    return Packed.from_cu_seqlens(ends, None, int(ends[-1]))


def reference(q, k, v, packed, heads):
    outs = []
    for a, b in zip(packed.cu_seqlens[:-1].tolist(), packed.cu_seqlens[1:].tolist(), strict=True):
        parts = [x[a:b].unflatten(1, (heads, -1)).transpose(0, 1) for x in (q, k, v)]
        outs.append(F.scaled_dot_product_attention(*parts).transpose(0, 1).flatten(1))
    return torch.cat(outs) if outs else q


@pytest.mark.parametrize("path", [attention.packed_attention, attention._bucketed_sdpa], ids=["ours", "sdpa"])
def test_values_and_gradients(packed, path):
    heads, width = 3, 12
    q, k, v = (torch.randn(packed.num_tokens, width, requires_grad=True) for _ in range(3))
    grad = torch.randn(packed.num_tokens, width)
    out = path(q, k, v, packed, heads, 0.0)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    d = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = reference(*d, packed, heads)
    assert out.shape == wanted.shape
    if not packed.num_tokens:
        return
    theirs = torch.autograd.grad(wanted, d, grad.double())
    assert (out - wanted).abs().max() < 1e-5
    for a, t in zip(ours, theirs, strict=True):
        assert (a - t).abs().max() < 1e-5


def test_dropout_backward_is_the_derivative_of_its_forward(packed):
    """With the masks held fixed by the seed, finite differences agree with the gradient."""
    if not packed.num_tokens:
        return
    heads = 2
    q, k, v = (torch.randn(packed.num_tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    direction, grad = torch.randn_like(q), torch.randn_like(q)

    def run(step: float) -> torch.Tensor:
        torch.manual_seed(5)
        moved = [x + step * direction for x in (q, k, v)]
        return (attention.packed_attention(*moved, packed, heads, 0.3) * grad).sum()

    analytic = sum((g * direction).sum() for g in torch.autograd.grad(run(0.0), (q, k, v)))
    numeric = (run(1e-6) - run(-1e-6)) / 2e-6
    assert abs(analytic - numeric) < 1e-5 * max(1, abs(numeric))


def test_dropout_keeps_the_mean():
    packed = Packed.from_cu_seqlens(torch.tensor([0, 6, 14], dtype=torch.int32), None, 14)
    q, k, v = (torch.randn(14, 8) for _ in range(3))
    wanted = attention.packed_attention(q, k, v, packed, 2)
    mean = sum(attention.packed_attention(q, k, v, packed, 2, 0.2) for _ in range(3000)) / 3000
    assert (mean - wanted).abs().max() < 0.06
    assert ops.keep_mask((3,), 0.0)[1] == 1.0

"""Operators against torch's own, on the paths that this machine can take."""

import pytest
import torch
import torch.nn.functional as F

from engine import ops


@pytest.fixture(params=["0", "1"], ids=["torch", "onednn"])
def onednn(request, monkeypatch):
    monkeypatch.setenv("MODELCENTER_ONEDNN", request.param)
    ops.onednn_linear.cache_clear()
    yield request.param == "1"
    ops.onednn_linear.cache_clear()


@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 1), (64, 33, 130), (0, 5, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(onednn, shape, bias):
    assert ops.onednn_linear()[0] == onednn
    m, k, n = shape
    x, w = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    b = torch.randn(n, requires_grad=True) if bias else None
    grad = torch.randn(m, n)
    out = ops.linear(x, w, b)
    ours = torch.autograd.grad(out, [t for t in (x, w, b) if t is not None], grad)
    d = [t.detach().double().requires_grad_() if t is not None else None for t in (x, w, b)]
    wanted = F.linear(*d)
    theirs = torch.autograd.grad(wanted, [t for t in d if t is not None], grad.double())
    assert (out - wanted).abs().max() < 1e-5 if m else out.shape == wanted.shape
    for a, t in zip(ours, theirs, strict=True):
        assert a.shape == t.shape and (not a.numel() or (a - t).abs().max() < 1e-4)
        assert a.is_contiguous()


def test_linear_any_rank_and_dtype(onednn):
    w, b = torch.randn(4, 6), torch.randn(4)
    x = torch.randn(2, 3, 6)
    assert torch.allclose(ops.linear(x, w, b), F.linear(x, w, b), atol=1e-5)
    assert torch.equal(
        ops.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()), F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(x, w, b).dtype == torch.bfloat16


def test_linear_needs_only_what_requires_grad(onednn):
    x, w, b = torch.randn(3, 6), torch.randn(4, 6, requires_grad=True), torch.randn(4)
    ops.linear(x, w, b).sum().backward()
    assert w.grad is not None and x.grad is None and b.grad is None


@pytest.mark.parametrize("p", [0.1, 0.5, 0.0625])
def test_dropout_rate_and_scale(p):
    torch.manual_seed(0)
    x = torch.ones(1_000_003)
    y = ops.dropout(x, p)
    dropped = (y == 0).double().mean().item()
    assert abs(dropped - p) < 4 * (p * (1 - p) / x.numel()) ** 0.5 + 2**-16
    assert abs(y.mean().item() - 1) < 0.005  # the scale undoes the loss
    assert y[y != 0].unique().numel() == 1


def test_dropout_gradient_is_the_mask_and_seeds_repeat():
    x = torch.randn(300, 7, requires_grad=True)
    residual = torch.randn(300, 7, requires_grad=True)
    torch.manual_seed(3)
    y = ops.dropout_add(x, residual, 0.4)
    torch.manual_seed(3)
    assert torch.equal(y, ops.dropout_add(x, residual, 0.4))
    assert not torch.equal(y, ops.dropout_add(x, residual, 0.4))
    grad = torch.randn_like(y)
    gx, gr = torch.autograd.grad(y, (x, residual), grad)
    kept = (y - residual).abs() > 1e-6
    assert torch.equal(gr, grad)
    assert torch.allclose(gx, torch.where(kept, grad / 0.6, 0.0), atol=1e-3)
    assert ops.dropout(x, 0.4, training=False) is x and ops.dropout(x, 0.0) is x


def test_dropout_repeats_from_a_saved_generator_state():
    state = torch.get_rng_state()
    first = ops.dropout(torch.ones(50), 0.5)
    torch.set_rng_state(state)
    assert torch.equal(first, ops.dropout(torch.ones(50), 0.5))


def test_masks_of_neighbouring_calls_are_independent():
    torch.manual_seed(0)
    a, b = (ops.dropout(torch.ones(100_000), 0.5) != 0 for _ in range(2))
    assert abs((a == b).double().mean().item() - 0.5) < 0.01
    assert abs((a[1:] == a[:-1]).double().mean().item() - 0.5) < 0.01

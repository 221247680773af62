"""Term weights of a vocabulary head against plain torch, with every logit at once."""

import itertools

import pytest
import torch
from torch import nn

from engine.loss import linear_term_weights, term_weights

TOKENS, WIDTH, CLASSES = 23, 9, 700  # classes of three chunks where these have 256
OFFSETS = [2, 7, 7, 10, 19, 20]  # a sequence without tokens, and tokens of none at both ends


def factors(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, shift = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    return hidden.requires_grad_(), nn.Parameter(weight), nn.Parameter(shift - 3) if bias else None


def plain(hidden, weight, bias, pooling, activation, offsets=OFFSETS):
    weights = nn.functional.linear(hidden, weight, bias).relu().log1p()
    if activation == "log1p_relu":
        weights = weights.log1p()
    rows = []
    for start, stop in itertools.pairwise(offsets):
        own = weights[start:stop]
        rows.append(own.new_zeros(CLASSES) if start == stop else own.amax(0) if pooling == "max" else own.sum(0))
    return torch.stack(rows)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(term_weights, "_CHUNK_BYTES", 1)


KINDS = list(itertools.product(("max", "sum"), ("relu", "log1p_relu"), (True, False)))


@pytest.mark.parametrize(("pooling", "activation", "bias"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(pooling, activation, bias, dtype):
    wanted, found = (factors(torch.float64, bias), factors(dtype, bias))
    offsets = torch.tensor(OFFSETS)
    weights = linear_term_weights(*found, offsets, pooling=pooling, activation=activation)
    expected = plain(*wanted, pooling, activation)
    assert weights.dtype == dtype and 0.2 < (expected > 0).double().mean() < 0.8
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(weights.double(), expected, **tolerance)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (weights * factor.to(dtype)).sum().backward()
    (expected * factor).sum().backward()
    for mine, theirs in zip(found, wanted, strict=True):
        if mine is not None:
            tolerance["atol"] *= max(1.0, theirs.grad.abs().max().item())
            torch.testing.assert_close(mine.grad.double(), theirs.grad, **tolerance)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_what_is_frozen_costs_no_gradient(pooling):
    """And the others have theirs."""
    expected = factors()
    (linear_term_weights(*expected, torch.tensor(OFFSETS), pooling=pooling) ** 2).sum().backward()
    for trained in range(3):
        found = factors()
        for number, factor in enumerate(found):
            factor.requires_grad_(number == trained)
        (linear_term_weights(*found, torch.tensor(OFFSETS), pooling=pooling) ** 2).sum().backward()
        assert [factor.grad is not None for factor in found] == [number == trained for number in range(3)]
        torch.testing.assert_close(found[trained].grad, expected[trained].grad)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("offsets", [[0], [0, 0]], ids=["no sequence", "an empty one"])
def test_without_tokens(pooling, offsets):
    hidden, weight, bias = factors()
    hidden = hidden.detach()[:0].requires_grad_()
    found = linear_term_weights(hidden, weight, bias, torch.tensor(offsets), pooling=pooling)
    assert found.shape == (len(offsets) - 1, CLASSES) and not found.any()
    found.sum().backward()
    assert not weight.grad.any() and not bias.grad.any() and hidden.grad.shape == (0, WIDTH)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_16_bits(pooling):
    """Factors in bf16: the weights are fp32, and those of rounded logits; sums of gradients are not rounded."""
    rounded = factors(torch.bfloat16)
    exact = [factor.detach().double().requires_grad_() for factor in rounded]
    found = linear_term_weights(*rounded, torch.tensor(OFFSETS), pooling=pooling)
    expected = plain(*exact, pooling, "relu")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    found.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(rounded, exact, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert (mine.grad - theirs.grad).norm() < 2e-2 * theirs.grad.norm()


def test_a_table_that_is_also_looked_up():
    """The gradient of a tied table is the sum of both uses; the head gives its own, and the look-up adds rows to it."""
    from engine.ops import Embedding

    table = Embedding(CLASSES, WIDTH)
    ids = torch.arange(TOKENS) * 3
    found = linear_term_weights(table(ids), table.weight, None, torch.tensor(OFFSETS))
    (found**2).sum().backward()
    weight = table.weight.detach().clone().requires_grad_()
    (plain(weight[ids], weight, None, "max", "relu") ** 2).sum().backward()
    torch.testing.assert_close(table.weight.grad, weight.grad)


def test_without_gradients_no_tokens_are_looked_for(monkeypatch):
    """Which takes time that only backward needs."""
    hidden, weight, bias = factors()
    expected = linear_term_weights(hidden, weight, bias, torch.tensor(OFFSETS))
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    with torch.no_grad():
        assert torch.equal(linear_term_weights(hidden, weight, bias, torch.tensor(OFFSETS)), expected)


def test_logits_are_never_held_at_once():
    """A chunk of classes at a time, in forward and in backward; what is kept for backward are the entries above 0."""
    hidden, weight, bias = factors(torch.float32)
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    most = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            most.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = linear_term_weights(hidden, weight, bias, torch.tensor(OFFSETS))
        found.sum().backward()
    assert max(most) < TOKENS * CLASSES and max(sizes) <= CLASSES * WIDTH
    assert len(sizes) == 7 and sizes.count(int((found > 0).sum())) == 4

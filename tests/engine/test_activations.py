"""Activations, alone and times a second matrix: the compiled operators of a CPU, and the choice between these and
torch's."""

from unittest import mock

import pytest
import rows_cases
import torch
import torch.nn.functional as F
from gpu_by_torch import ACTIVATIONS

from engine import ops
from engine.ops import activation, library


@pytest.mark.parametrize(("rows", "n"), rows_cases.ACTIVATED)
def test_activations_are_those_of_fp64(compiled, rows, n):
    assert library.serves(torch.device("cpu"))
    for odd in (0, 1):
        rows_cases.check_activations(rows, n, torch.float32, "cpu", odd, with_sums=(False,))
    rows_cases.check_ends_of_activations(torch.float32, "cpu")


def test_activations(either):
    check_activations()


@mock.patch.object(activation, "_PAYING_ON_A_CPU", 0)
def check_activations():
    """Against float64, far out and at odd places, and as torch's where numbers end."""
    torch.manual_seed(0)
    atol = 6e-7 if library.cpu().loaded and library.cpu().isa != "plain" else 1e-6  # torch's GELU is less exact
    ends = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30])
    for ours, torchs in ACTIVATIONS:
        for x in (torch.randn(3, 1001) * 3, torch.linspace(-40, 40, 50_001), torch.randn(20, 7).t(), torch.zeros(0, 3)):
            x, d, grad = x.requires_grad_(), x.detach().double().requires_grad_(), torch.randn(x.shape)
            out, wanted = ours(x), torchs(d)
            (dx,), (slope,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(wanted, d, grad.double())
            torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=atol)
            torch.testing.assert_close(dx.double(), slope, rtol=2e-6, atol=4e-6)
            torch.testing.assert_close(ours(x[1:]).double(), wanted[1:], rtol=1e-6, atol=atol)
            up, factor = (torch.randn(x.shape, dtype=dtype, requires_grad=True) for dtype in (None, torch.float64))
            factor.data.copy_(up.data)
            out, wanted = ops.gated(ours, x, up), torchs(d) * factor
            torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=2e-6)
            found, gradients = (
                torch.autograd.grad(out, (x, up), grad),
                torch.autograd.grad(wanted, (d, factor), grad.double()),
            )
            for each, exact in zip(found, gradients, strict=True):
                torch.testing.assert_close(each.double(), exact, rtol=4e-6, atol=1e-5)
        found, wanted = ours(ends), torchs(ends)
        assert torch.equal(found[2:].nan_to_num(7), wanted[2:].nan_to_num(7)) and found[0].isnan()
        assert found[1] == torch.inf or wanted[1].isnan()  # torch's GELU of infinity is none
        if ours is not ops.gelu_tanh:  # whose x^3 is beyond all numbers
            large = torch.tensor([1e30, -1e30], requires_grad=True)
            assert torch.autograd.grad(ours(large).sum(), large)[0].tolist() == [1.0, 0.0]


@mock.patch.object(activation, "_PAYING_ON_A_CPU", 0)
def test_gelu_is_exact_to_the_last_places_far_below_zero(compiled):
    """There torch's is 1 - 1: it loses all of it."""
    if library.cpu().isa == "plain":
        pytest.skip("this instruction set has torch's")
    x = torch.linspace(-12.5, -0.5, 2001)
    wanted = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    torch.testing.assert_close(ops.gelu(x).double(), wanted, rtol=4e-6, atol=0)


def test_only_many_numbers_are_worth_an_operator(compiled):
    least = activation._PAYING_ON_A_CPU
    if library.cpu().isa == "plain":
        pytest.skip("this instruction set has torch's")
    x = torch.randn(least)
    for ours, torchs in ((ops.gelu, F.gelu), (ops.silu, F.silu)):
        assert torch.equal(ours(x[1:]), torchs(x[1:]))  # torch's own bits
        with torch.no_grad():
            assert torch.equal(ours(x), torch.ops.modelcenter.activation(x, None, activation.kind_of(ours), 0))
        assert not torch.equal(ours(x), torchs(x))


@mock.patch.object(activation, "_PAYING_ON_A_CPU", 0)
def test_a_gate_keeps_nothing_but_what_it_is_given(compiled):
    x, up = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda t: t):
        ops.gated(ops.silu, x, up)
    assert set(kept) == ({x.data_ptr(), up.data_ptr()})


def test_activations_of_other_tensors_are_torchs(either):
    x = torch.randn(5, 3)
    for ours, torchs in ACTIVATIONS:
        for other in (x.double(), x.bfloat16(), x.to("meta")):
            assert ours(other).dtype == other.dtype and ours(other).shape == x.shape
        assert torch.equal(ours(x.bfloat16()), torchs(x.bfloat16()))
        assert torch.equal(ops.gated(ours, x.bfloat16(), x.bfloat16()), torchs(x.bfloat16()) * x.bfloat16())
        assert torch.equal(ours(x[0, 0]), torchs(x[0, 0]))


def test_bad_activations(compiled):
    x = torch.ones(3, 4)
    run, back = library.operator("activation"), library.operator("activation_backward")
    with pytest.raises(RuntimeError, match="kind is 4, expected 0 to 3"):
        run(x, None, 4, 0)
    with pytest.raises(RuntimeError, match="up has 8 numbers, expected 12"):
        run(x, x[:2], 0, 0)
    with pytest.raises(RuntimeError, match="x must hold fp32 numbers"):
        run(x.bfloat16(), None, 0, 0)
    with pytest.raises(RuntimeError, match="grad has 8 numbers, expected 12"):
        back(x[:2], x, None, 0, False, 0)
    with pytest.raises(RuntimeError, match="x must hold fp32 numbers"):
        back(x.bfloat16(), x.bfloat16(), None, 0, False, 0)
    with pytest.raises(RuntimeError, match="expected sums=False"):
        back(x, x, None, 0, True, 0)

"""Norms, linear layers, activations and rotary positions by way of the CUDA operators, which torch stands for here:
what autograd, recomputation and the choice between them and torch make of it. `test_cuda_on_cpu.py` runs the operators
themselves."""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from gpu_by_torch import ACTIVATIONS, OPERATORS, take_the_ways_of_a_gpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ops import (
    Added,
    activation,
    build,
    dropout_add,
    gated,
    gelu,
    gelu_tanh,
    gemm,
    layer_norm,
    library,
    linear,
    linear_activated,
    linears,
    norm_after,
    norm_before,
    rms_norm,
    rotary,
    rotate,
    silu,
)  # fmt: skip
from engine.recompute import wrap_units_
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.linear import Linear, each
from modelcenter.layers.mlp import MLP, GatedMLP
from modelcenter.layers.norm import LayerNorm, RMSNorm

EPS = 1e-5
PLAIN = SimpleNamespace(scaled=lambda x: x)  # what an MLP without dropout asks of a batch


@pytest.fixture
def called(monkeypatch):
    """CPU tensors take the ways of a GPU's; what was called."""
    return take_the_ways_of_a_gpu(monkeypatch)


def drawn(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) + 0.5 for shape in shapes]


def gradients(function, tensors, trained):
    tensors = [t.clone().requires_grad_(need) for t, need in zip(tensors, trained, strict=True)]
    out = function(*tensors)
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape))
    return [out.detach(), *(t.grad for t in tensors)]


def same(found, wanted):
    assert [f is None for f in found] == [w is None for w in wanted]
    for f, w in zip(found, wanted, strict=True):
        if f is not None:
            torch.testing.assert_close(f, w, rtol=1e-10, atol=1e-10)


TRAINED = [(x, w, b) for x in (True, False) for w in (True, False) for b in (True, False) if x or w or b]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,), (4, 1, 1, 6)])
def test_a_linear_layer_has_torchs_gradients(called, shape, trained):
    tensors = drawn(shape, (7, 6), (7,))
    same(gradients(linear, tensors, trained), gradients(F.linear, tensors, trained))
    assert called == ["column_sums"] * trained[2]


@pytest.mark.parametrize(
    "trained", [(True,) * 6, (False, True, True, False, True, True), (True, False, True) + (False,) * 3]
)
def test_linear_layers_of_one_input_have_torchs_gradients(called, trained):
    tensors = drawn((5, 6), (7, 6), (7,), (4, 6), (4,), (3, 6))

    def ours(x, a, a_bias, b, b_bias, c):
        return torch.cat(linears(x, [(a, a_bias), (b, b_bias), (c, None)]), 1)

    def torchs(x, a, a_bias, b, b_bias, c):
        return torch.cat([F.linear(x, a, a_bias), F.linear(x, b, b_bias), F.linear(x, c)], 1)

    same(gradients(ours, tensors, trained), gradients(torchs, tensors, trained))
    assert called == ["column_sums"] * (trained[2] + trained[4])


@pytest.mark.parametrize("part", [lambda y: y.sum(), lambda y: y.t().contiguous(), lambda y: y[:, 2:5]])
def test_gradients_of_a_linear_layer_that_lie_otherwise(called, part):
    tensors = drawn((4, 6), (7, 6), (7,))
    found, wanted = (gradients(lambda *t, f=f: part(f(*t)), tensors, (True,) * 3) for f in (linear, F.linear))
    same(found, wanted)


def test_what_a_linear_layer_keeps(called):
    kept: list[Tensor] = []
    x, weight, bias = drawn((4, 6), (7, 6), (7,))
    for trained, wanted in (((True, False, True), [weight]), ((False, True, True), [x]), ((False, False, True), [])):
        tensors = [t.clone().requires_grad_(need) for t, need in zip((x, weight, bias), trained, strict=True)]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            linear(*tensors)
        assert len(kept) == len(wanted) and all(torch.equal(a, b) for a, b in zip(kept, wanted, strict=True))


@pytest.mark.parametrize(("ours", "torchs"), ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)])
def test_activations_have_torchs_gradients(called, shape, ours, torchs):
    x, up = drawn(shape, shape)
    same(gradients(ours, [x - 0.5], [True]), gradients(torchs, [x - 0.5], [True]))
    assert called == ["activation", "activation_backward"] * (ours is not F.relu)  # torch's is as fast
    for trained in ((True, True), (True, False), (False, True)):
        called.clear()
        found = gradients(lambda x, up: gated(ours, x, up), [x - 0.5, up], trained)
        same(found, gradients(lambda x, up: torchs(x) * up, [x - 0.5, up], trained))
        assert called == ["activation", "activation_backward"]


@pytest.mark.parametrize(("ours", "torchs"), ACTIVATIONS)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,), (4, 1, 1, 6)])
def test_a_linear_layer_with_its_activation_has_torchs_gradients(called, shape, trained, ours, torchs):
    tensors = drawn(shape, (7, 6), (7,))
    found = gradients(lambda x, weight, bias: linear_activated(x, weight, bias, ours), tensors, trained)
    same(found, gradients(lambda *t: torchs(F.linear(*t)), tensors, trained))
    if trained[2]:
        assert called == ["activation", "activation_backward"]


@pytest.mark.parametrize("part", [lambda y: y.sum(), lambda y: y.t().contiguous(), lambda y: y[:, 2:5]])
def test_gradients_of_an_activation_that_lie_otherwise(called, part):
    tensors = drawn((4, 6), (7, 6), (7,))
    found = gradients(lambda *t: part(linear_activated(*t, gelu)), tensors, (True,) * 3)
    same(found, gradients(lambda *t: part(F.gelu(F.linear(*t))), tensors, (True,) * 3))


@pytest.mark.parametrize(("ours", "torchs"), ACTIVATIONS)
def test_what_an_activation_keeps(called, ours, torchs):
    """Together with the layer behind it, and in place of torch's: no more, and of a gate less."""
    x, weight, bias, up, down = (t.requires_grad_() for t in drawn((4, 6), (7, 6), (7,), (4, 7), (3, 7)))

    def kept(work):
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(t.data_ptr(), t), lambda t: t):
            F.linear(work(), down)
        return sum(t.numel() for t in found.values())

    def layer():
        return torchs(F.linear(x, weight, bias))

    assert kept(lambda: linear_activated(x, weight, bias, ours)) == kept(layer)
    gate = F.linear(x, weight).detach().requires_grad_()
    less = gate.numel() * (torchs is not F.relu)
    assert kept(lambda: gated(ours, gate, up)) == kept(lambda: torchs(gate) * up) - less


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)])
def test_norms_have_torchs_gradients(called, shape, trained):
    tensors = drawn(shape, (6,), (6,))
    ours = gradients(lambda x, w, b: layer_norm(x, (6,), w, b, EPS), tensors, trained)
    same(ours, gradients(lambda x, w, b: F.layer_norm(x, (6,), w, b, EPS), tensors, trained))
    assert called == ["norm", "norm_backward"]
    called.clear()
    if trained[0] or trained[1]:
        ours = gradients(lambda x, w: rms_norm(x, w, EPS), tensors[:2], trained[:2])
        same(ours, gradients(lambda x, w: F.rms_norm(x, (6,), w, EPS), tensors[:2], trained[:2]))
        assert called == ["norm", "norm_backward"]


@pytest.mark.parametrize("form", [norm_before, norm_after])
@pytest.mark.parametrize("centered", [True, False])
def test_norms_of_sums_have_torchs_gradients(called, form, centered):
    tensors, tokens = drawn((5, 6), (5, 6), (6,), (6,)), torch.arange(5) * 9

    def ours(x, branch, weight, bias):
        return torch.cat(form(x, weight, bias if centered else None, EPS, Added(branch, 0.3, 77, 5, tokens)))

    def wanted(x, branch, weight, bias):
        total = dropout_add(branch, x, 0.3, key=77, site=5, tokens=tokens)
        out = F.layer_norm(total, (6,), weight, bias, EPS) if centered else F.rms_norm(total, (6,), weight, EPS)
        return torch.cat((total if form is norm_before else out, out))

    same(gradients(ours, tensors, (True,) * 4), gradients(wanted, tensors, (True,) * 4))
    assert called == ["norm", "norm_backward"]
    # A key that the host draws would be a constant of a CUDA graph: dropout is torch's.
    called.clear()
    x, branch, weight, bias = (t.to("meta") for t in tensors)
    form(x, weight, bias if centered else None, EPS, Added(branch, 0.3))
    assert called == ["norm"]
    form(x, weight, bias if centered else None, EPS, Added(branch, 0.3, 77, 5, tokens))
    assert called == ["norm"] * 2


def test_frozen_weights_cost_no_sums(called, monkeypatch):
    asked = []
    run = OPERATORS["norm_backward"]
    monkeypatch.setitem(OPERATORS, "norm_backward", lambda *args: asked.append(args[7]) or run(*args))
    x, weight, bias = drawn((5, 6), (6,), (6,))
    for trained in ((True, False, False), (True, False, True), (False, True, False)):
        gradients(lambda x, w, b: layer_norm(x, (6,), w, b, EPS), (x, weight, bias), trained)
    for trained in ((True, False), (True, True)):
        gradients(lambda x, w: rms_norm(x, w, EPS), (x, weight), trained)
    assert asked == [False, True, True, False, True]


def test_without_gradients_no_autograd_function_runs(called):
    x, weight, bias = (t.requires_grad_() for t in drawn((5, 6), (6,), (6,)))
    with torch.no_grad():
        found = [layer_norm(x, (6,), weight, bias, EPS), rms_norm(x, weight, EPS), linear(x, weight.diag(), bias)]
        wanted = [F.layer_norm(x, (6,), weight, bias, EPS), F.rms_norm(x, (6,), weight, EPS), x * weight + bias]
        found += [silu(x), gated(silu, x, x), linear_activated(x, weight.diag(), bias, silu)]
        wanted += [F.silu(x), F.silu(x) * x, F.silu(x * weight + bias)]
    same(found, wanted)
    assert called == ["norm", "norm"] + ["activation"] * 3


def test_a_second_derivative_raises(called):
    x, weight, bias = (t.requires_grad_() for t in drawn((5, 6), (6,), (6,)))
    found = [layer_norm(x, (6,), weight, bias, EPS), rms_norm(x, weight, EPS), linear(x, weight.diag(), bias)]
    found += [gelu(x), gated(gelu, x, x), linear_activated(x, weight.diag(), bias, gelu)]
    kinds = "Norm|TorchLinear|Activated|LinearActivated"
    for out in found:
        with pytest.raises(RuntimeError, match=f"({kinds}) has no second derivative"):
            torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_what_is_left_to_torch(called):
    x, weight, bias = drawn((2, 3, 6), (6,), (6,))
    layer_norm(x, (6,), weight, None, EPS)
    layer_norm(x, (6,), None, None, EPS)
    layer_norm(x, (3, 6), *drawn((3, 6), (3, 6)), EPS)
    layer_norm(x, (6,), weight.float().double(), bias, EPS)
    assert called.pop() == "norm" and not called
    long = torch.ones(2, 8193, dtype=torch.float64)
    layer_norm(long, (8193,), long[0], long[0], EPS), rms_norm(long, long[0], EPS)
    weights = [t.requires_grad_() for t in drawn((7, 6), (7,))]
    linear(x, weights[0]), linear(x, weights[0], weights[1].detach())
    linear_activated(x, *weights, torch.tanh), linear_activated(x, weights[0], weights[1].detach(), F.relu)
    linear_activated(x, weights[0], None, F.relu), gated(torch.tanh, x, x), gated(silu, x.float(), x)
    assert called.pop() == "activation" and not called  # silu alone, of the last
    same([gated(F.relu, x, x[:1])], [F.relu(x) * x[:1]])
    assert not called
    with pytest.raises(RuntimeError, match="normalized_shape"):
        layer_norm(x, (5,), *drawn((5,), (5,)), EPS)
    with pytest.raises(ValueError, match=r"weight has shape \(5,\), expected the shape of a row of x, \(6,\)"):
        rms_norm(x, weight[:5], EPS)


def test_only_many_numbers_pay_for_python(called, monkeypatch):
    monkeypatch.setattr(gemm, "_PAYING", 21)
    weight, bias = (t.requires_grad_() for t in drawn((7, 6), (7,)))
    for rows, wanted in ((3, 1), (2, 0), (0, 0)):
        linear(torch.ones(rows, 6, dtype=torch.float64), weight, bias).sum().backward()
        assert called == ["column_sums"] * wanted
        called.clear()
    monkeypatch.setattr(activation, "_PAYING", 21)
    monkeypatch.setattr(activation, "_PAYING_GATED", 14)
    x = torch.ones(3, 7, dtype=torch.float64, requires_grad=True)
    for call, rows in ((gelu, 3), (gelu_tanh, 3), (silu, 3), (lambda x: gated(gelu, x, x), 2)):
        call(x[:rows])
        assert called.pop() == "activation"
        call(x[: rows - 1])
        assert not called


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_recomputation(called, recompute):
    """Selective recomputation keeps the products of these autograd functions too."""

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.second = Linear(6, 8), Linear(6, 8), Linear(8, 6)
            self.mlp, self.gated = MLP(6, 8, "gelu"), GatedMLP(6, 8, "silu")
            self.norm, self.other = LayerNorm(6), RMSNorm(6, EPS)

        def forward(self, x):
            first, gate = each(self.norm(x).flatten(0, 1), self.first, self.gate)
            x = x + self.second(F.gelu(first) * gate).view_as(x) + self.other(x)
            return self.gated(self.mlp(x, PLAIN), PLAIN)

    torch.manual_seed(0)
    found, products = [], []
    unit = Unit().double()
    for how in ("none", recompute):
        wrap_units_([unit], how, False)
        unit.zero_grad()
        (x,) = drawn((2, 5, 6))
        x.requires_grad_()
        with _Count() as count:
            unit(x).square().sum().backward()
        products.append(sum(name.startswith("addmm.") for name in count.names))
        found.append([x.grad, *(p.grad.clone() for p in unit.parameters())])
        assert called.count("column_sums") == 4 and called.count("activation_backward") == 2
        called.clear()
        unit.__dict__.pop("forward", None)
    same(*found)
    assert products == [5, 10 if recompute == "full" else 5]


# -- rotary positions --------------------------------------------------------------------------------------------------


def turned(q, k, cos, sin):
    return torch.cat(rotate(q, k, cos, sin, 6, True), 1)


def by_torch(q, k, cos, sin):
    return torch.cat([rotary.composed(x, cos, sin, 6, True) for x in (q, k)], 1)


ROTATED = (5, 12), (5, 6), (5, 1, 2), (5, 1, 2)


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_rotary_positions_have_torchs_gradients(called, trained):
    tensors, kept = drawn(*ROTATED), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = gradients(turned, tensors, (*trained, False, False))
    same(found, gradients(by_torch, tensors, (*trained, False, False)))
    assert called == ["rotate", "rotate"]
    assert len(kept) == 2 and all(torch.equal(a, b) for a, b in zip(kept, tensors[2:], strict=True))


def test_rotary_positions_have_any_derivative(called):
    tensors = drawn(*ROTATED)
    found = []
    for function in (turned, by_torch):
        q, k = (t.clone().requires_grad_() for t in tensors[:2])
        first = torch.autograd.grad(function(q, k, *tensors[2:]).pow(3).sum(), (q, k), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (q, k))])
    same(*found)
    assert called.count("rotate") >= 4


def test_rotary_positions_without_gradients(called):
    q, k, cos, sin = drawn(*ROTATED)
    with torch.no_grad():
        same([turned(q.requires_grad_(), k, cos, sin)], [by_torch(q, k, cos, sin)])
    assert not turned(q.detach(), k, cos, sin).requires_grad
    assert called == ["rotate", "rotate"]
    # Of one matrix, and of no tokens.
    for tokens in (5, 0):
        one, nothing = rotate(q[:tokens], k[:tokens, :0], cos[:tokens], sin[:tokens], 4)
        assert nothing.shape == (tokens, 0)
        same([one.detach()], [rotary.composed(q[:tokens], cos[:tokens], sin[:tokens], 4, False).detach()])


def test_rotary_positions_that_are_left_to_torch(called):
    q, k, cos, sin = drawn(*ROTATED)
    same(
        gradients(turned, (q, k, cos, sin), (True, True, True, False)),
        gradients(by_torch, (q, k, cos, sin), (True, True, True, False)),
    )
    rotate(q, k, cos.float(), sin, 6)
    assert not called
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(5\) must match the size of tensor b \(3\)"):
        rotate(q, k, cos[:3], sin[:3], 6)


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_recomputation_of_rotary_positions(called, recompute):
    class Unit(SelfAttention):
        def forward(self, x, ctx):
            q, k, v = self.project(x, ctx)
            return self.out(q * k + v)

    torch.manual_seed(0)
    unit, ctx = Unit(12, 2, 0.0, interleaved=True).double(), SimpleNamespace(rotary=drawn((5, 1, 2), (5, 1, 2)))
    found, counts = [], []
    for how in ("none", recompute):
        wrap_units_([unit], how, False)
        unit.zero_grad()
        (x,) = drawn((5, 12))
        x.requires_grad_()
        with _Count() as count:
            unit(x, ctx).square().sum().backward()
        counts.append((called.count("rotate"), sum(name.startswith("addmm.") for name in count.names)))
        found.append([x.grad, *(p.grad.clone() for p in unit.parameters())])
        called.clear()
        unit.__dict__.pop("forward", None)
    same(*found)
    assert counts == [(2, 4), {"selective": (3, 4), "full": (3, 8), "offload": (2, 4)}[recompute]]


# -- which tensors go there --------------------------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch):
    """Makes tensors as the choice sees them on a GPU."""
    monkeypatch.setattr(library, "PLAIN", (SimpleNamespace,))
    monkeypatch.setattr(library, "serves", lambda device: device == "cuda:0")

    def make(dtype=torch.bfloat16, is_cuda=True, device="cuda:0"):
        return SimpleNamespace(dtype=dtype, is_cuda=is_cuda, device=device)

    return make


def test_plain_tensors_of_a_gpu(given, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert library.plain_cuda(given(dtype), given(dtype), given(dtype))
    assert not library.plain_cuda(given(torch.float64))
    assert not library.plain_cuda(given(), given(torch.float32))
    assert not library.plain_cuda(given(is_cuda=False))
    assert not library.plain_cuda(given(device="cuda:1"))  # a GPU that the library has no code for
    assert not library.plain_cuda(given(), torch.nn.Parameter(torch.ones(1)))  # not plain here
    assert not library.plain_cuda(torch.ones(2))
    torch.set_autocast_enabled("cuda", True)
    try:
        assert not library.plain_cuda(given())
    finally:
        torch.set_autocast_enabled("cuda", False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not library.plain_cuda(given())
    asked = []
    torch.func.grad(lambda x: asked.append(library.plain_cuda(given())) or x * 2)(torch.tensor(1.0))
    assert asked == [False] and library.plain_cuda(given())


def test_the_stream_is_that_of_the_device(monkeypatch):
    from engine import torch_compat

    assert library.stream(torch.device("cpu")) == 0
    monkeypatch.setattr(torch_compat, "_raw_stream", lambda index: 70 + index)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=9))
    assert library.stream(torch.device("cuda", 3)) == 73 and library.stream(torch.device("cuda")) == 9
    monkeypatch.setattr(torch_compat, "_raw_stream", None)
    assert library.stream(torch.device("cuda", 3)) == 9


def test_the_operators_are_declared(compiled):
    assert library.cpu().loaded
    for name in OPERATORS:
        assert library.operator(name) is library.operator(name)
        assert getattr(torch.ops.modelcenter, name).default._schema.arguments[-1].name == "stream"


@pytest.mark.full
def test_rows_are_moved_16_bytes_at_a_time_and_held_in_registers(tmp_path):
    if (nvcc := build.nvcc()) is None:
        pytest.skip("nvcc is not here, so the CUDA operators cannot be compiled")
    text = ""
    for name in ("norm", "columns", "activation", "rotary"):
        command = [nvcc, *build._CUDA, "-arch=compute_90", "-ptx", "-o", tmp_path / f"{name}.ptx"]
        subprocess.run([*command, build.sources() / "cuda" / f"{name}.cu"], check=True, timeout=300)
        text += (tmp_path / f"{name}.ptx").read_text()
    assert re.search(r"st\.global\S*\.v4\.u32", text) and re.search(r"ld\.global\S*\.v4\.u32", text)
    assert ".local" not in text
    for kind in ("bf16x2.f32", "f16x2.f32"):
        assert f"cvt.rn.{kind}" in text

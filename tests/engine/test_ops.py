"""Operators against torch's own, on the paths that this machine can take."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpu_by_torch import ACTIVATIONS
from torch.autograd import forward_ad

from engine import ops
from engine.ops import activation, gemm, library


@pytest.fixture(params=["torch", "onednn", "compiled"])
def onednn(request, monkeypatch):
    if request.param == "compiled":
        request.getfixturevalue("compiled")
        assert library.serves(torch.device("cpu"))
    monkeypatch.setattr(gemm, "compiled", lambda: request.param == "compiled")
    monkeypatch.setenv("MODELCENTER_ONEDNN", str(int(request.param != "torch")))
    ops.onednn_linear.cache_clear()
    yield request.param != "torch"
    ops.onednn_linear.cache_clear()


@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 1), (64, 33, 130), (0, 5, 3), (397, 9, 65)])
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


def test_linear_takes_operands_as_they_lie(onednn):
    """Rows or columns that are contiguous, or neither, of so many rows that the compiled operator is asked."""
    rows = 1030 if gemm.compiled() else 40  # oneDNN makes code for each of these shapes and strides
    wide, table, b = torch.randn(rows, 2 * 200), torch.randn(200, 2 * 41), torch.randn(2 * 41)[::2]
    for x in (wide[:, 3:203], wide[:, ::2], torch.randn(200, rows).t(), wide[:1, :200].expand(40, -1)):
        for w in (table[:, :41].t(), table[:, ::2].t(), torch.randn(41, 203)[:, 2:-1]):
            wanted = F.linear(x.double(), w.double(), b.double())
            for bias, more in ((b, 0), (None, b.double())):
                out = ops.gemm.matmul_nt(x, w, bias)
                torch.testing.assert_close(out.double() + more, wanted, rtol=1e-5, atol=7e-5)


def test_linear_needs_only_what_requires_grad(onednn):
    x, w, b = torch.randn(3, 6), torch.randn(4, 6, requires_grad=True), torch.randn(4)
    ops.linear(x, w, b).sum().backward()  # the gradient is one number, expanded
    assert torch.allclose(w.grad, x.sum(0).expand(4, 6), atol=1e-5) and x.grad is None and b.grad is None
    b.requires_grad_()
    ops.linear(x, w.detach(), b).sum().backward()
    assert torch.equal(b.grad, torch.full((4,), 3.0))


def test_linear_takes_gradients_of_sums(onednn):
    """Their rows, or their columns, are one and the same memory."""
    for dim, rows in ((0, 5), (1, 5), (1, 1)):
        x, w = torch.randn(rows, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
        found, wanted = (
            torch.autograd.grad(linear(x, w).sum(dim).square().sum(), (x, w)) for linear in (ops.linear, F.linear)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def three_layers(trained=(True,) * 7):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 6), (7, 6), (7,), (9, 6), None, (4, 6), (4,))
    drawn = [None if shape is None else torch.randn(shape, generator=generator) for shape in shapes]
    return [t if t is None else t.requires_grad_(need) for t, need in zip(drawn, trained, strict=True)]


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize(
    "trained",
    [(True,) * 7, (False,) + (True,) * 6, (True,) + (False,) * 6, (True, False, True, True, True, False, True)],
)
def test_layers_of_one_input(onednn, compiled, trained, used):
    """Results, and gradients where they are wanted; some of the results may go unused."""
    x, *parameters = three_layers(trained)
    pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
    leaves = [t for t in (x, *parameters) if t is not None and t.requires_grad]
    found = []
    for run in (ops.linears, lambda x, pairs: [F.linear(x, *pair) for pair in pairs]):
        out = run(x, pairs)
        total = sum((out[i] * (i + 1)).sin().sum() for i in used)
        found.append([*out, *torch.autograd.grad(total, leaves, allow_unused=True)])
    assert type(ops.linears(x, pairs)[0].grad_fn).__name__ == "_LinearsBackward"
    for ours, wanted in zip(*found, strict=True):
        assert (ours is None) == (wanted is None)
        if ours is not None:
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_layers_of_one_input_add_into_its_gradient(onednn, compiled, monkeypatch):
    """Each product but the first is added where the one before is; and only what is needed is kept."""
    x, *parameters = three_layers()
    pairs, added, kept = list(zip(parameters[::2], parameters[1::2], strict=True)), [], []
    product = gemm._product
    monkeypatch.setattr(
        gemm, "_product", lambda a, b, to=None, **k: added.append(to is not None) or product(a, b, to, **k)
    )
    sum(y.sum() for y in ops.linears(x, pairs)).backward()
    assert [a for a, weight in zip(added, [False, True] * 3, strict=True) if not weight] == [False, True, True]
    for trained, wanted in (((True,) + (False,) * 6, [1, 3, 5]), ((False,) + (True,) * 6, [0])):
        tensors, kept[:] = three_layers(trained), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ops.linears(tensors[0], list(zip(tensors[1::2], tensors[2::2], strict=True)))
        assert [
            any(t is k or torch.equal(t, k) for k in kept if t is not None and t.shape == k.shape) for t in tensors
        ] == [i in wanted for i in range(7)]


def test_which_layers_of_one_input_are_torchs(onednn, compiled):
    x, *parameters = three_layers()
    pairs = list(zip(parameters[::2], parameters[1::2], strict=True))

    def joined(x, pairs):
        return any("Linears" in type(y.grad_fn).__name__ for y in ops.linears(x, pairs))

    assert joined(x, pairs) and not joined(x[None], pairs) and not joined(x[:0], pairs)
    assert not joined(x.double(), [(w.double(), b) for w, b in pairs[1:2]])
    with torch.autocast("cpu"):
        assert not joined(x, pairs)
    with torch.no_grad():
        assert not joined(x, pairs)


def test_a_second_derivative_is_refused_and_not_wrong(onednn):
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for function in (torch.square, torch.sum):  # also where the gradient that comes in is a constant
        if not onednn:  # torch's own has them
            (dx,) = torch.autograd.grad(function(ops.linear(x, w)).sum(), x, create_graph=True)
            dx.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="Linear has no second derivative, which create_graph=True needs"):
            torch.autograd.grad(function(ops.linear(x, w)).sum(), x, create_graph=True)


@mock.patch.object(activation, "_PAYING_ON_A_CPU", 0)
@pytest.mark.parametrize("operator", ["gelu", "gelu_tanh", "gated", "rms_norm"])
def test_second_derivatives_are_right_or_refused(either, operator):
    """As in a product of the Hessian with a vector, where the gradient that comes in does not depend on x."""
    x = torch.randn(3, 40, requires_grad=True)
    call = {
        "gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "gated": lambda x: ops.gated(ops.silu, x, 2 * x),
        "rms_norm": lambda x: ops.rms_norm(x, torch.ones(40), 1e-6),
    }[operator]  # fmt: skip
    total = call(x * x).sum()
    if either == "library":
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(total, x, create_graph=True)
        return
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    found = torch.autograd.grad(slope.square().sum(), x)[0]
    x = x.detach().double().requires_grad_()
    y = x * x
    exact = {
        "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "gated": lambda y: F.silu(y) * 2 * y,
        "rms_norm": lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    }[operator]  # fmt: skip
    total = exact(y).sum()
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    wanted = torch.autograd.grad(slope.square().sum(), x)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


# Rows, depth and columns that are below, at and above the sizes of tiles and of what is packed at a time.
@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 192, 32), (9, 193, 33), (70, 3, 300), (1030, 200, 7)])
@pytest.mark.parametrize("transposed", [False, True])
def test_product(onednn, sizes, transposed):
    check_product(*sizes, transposed)


def check_product(m, k, n, transposed):
    """Against float64, in strided memory, added to or not, on any number of threads with the same bits."""
    wide = torch.randn(k, m + 3)[:, 1:-2] if transposed else torch.randn(m, k + 3)[:, 1:-2]
    a, b = wide.t() if transposed else wide, torch.randn(k, n + 1)[:, :-1]
    wanted = a.double() @ b.double()
    out, sums = gemm._product(a, b, sums=True)
    near = dict(rtol=1e-5, atol=3e-7 * k + 1e-5)
    torch.testing.assert_close(out.double(), wanted, **near)
    torch.testing.assert_close(sums.double(), a.double().sum(1), **near)
    before = torch.randn(m, n)
    after = before.clone()
    assert ops.matmul(a, b, add_to=after) is after
    torch.testing.assert_close(after.double(), before.double() + wanted, **near)
    after, again = gemm._product(a, b, before.clone(), sums=True)
    torch.testing.assert_close(after.double(), before.double() + wanted, **near)
    torch.testing.assert_close(again.double(), a.double().sum(1), **near)  # which are never added to
    if gemm.compiled():
        threads = torch.get_num_threads()
        try:
            for other in (1, 2, 3, 6):
                torch.set_num_threads(other)
                again, total = gemm._product(a, b, sums=True)
                assert torch.equal(again, out) and torch.equal(total, sums)
        finally:
            torch.set_num_threads(threads)


@pytest.fixture
def may_round():
    """What torch calls "medium": products of fp32 matrices in bf16."""
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def rounded(x):
    return x.bfloat16().double()


# Of odd depth, and as many steps as are packed together, or one more.
@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 384, 32), (9, 385, 33), (70, 3, 300), (1030, 800, 7), (17, 50, 129)])
@pytest.mark.parametrize("transposed", [False, True])
def test_product_of_rounded_numbers(compiled, may_round, sizes, transposed):
    check_rounded(*sizes, transposed)


def check_rounded(m, k, n, transposed):
    """Against float64 of what is rounded to bf16; sums are of the numbers themselves. A CPU that cannot multiply them
    does as without."""
    assert library.serves(torch.device("cpu"))
    wide = torch.randn(k, m + 3)[:, 1:-2] if transposed else torch.randn(m, k + 3)[:, 1:-2]
    a, weight, bias = wide.t() if transposed else wide, torch.randn(n, k + 1)[:, :-1], torch.randn(n)
    wanted, near = rounded(a) @ rounded(weight).t(), dict(rtol=1e-5, atol=3e-7 * k + 1e-5)
    exact = {}
    for may in (False, True):
        out, sums, added = torch.empty(m, n), torch.empty(m), torch.ones(m, n)
        torch.ops.modelcenter.product_(out, a, weight.t(), sums, False, may)
        torch.ops.modelcenter.product_(added, a, weight.t().contiguous(), None, True, may)
        biased = torch.ops.modelcenter.linear(a.contiguous(), weight, bias, may)
        exact[may] = [out, sums, added, biased]
    out, sums, added, biased = exact[True]
    if not library.cpu().rounds:
        assert all(torch.equal(x, y) for x, y in zip(exact[True], exact[False], strict=True))
        return
    torch.testing.assert_close(out.double(), wanted, **near)
    torch.testing.assert_close(added.double(), wanted + 1, **near)
    torch.testing.assert_close(biased.double(), wanted + bias.double(), **near)
    torch.testing.assert_close(sums.double(), a.double().sum(1), **near)
    assert m * n == 1 or not torch.allclose(out, exact[False][0], rtol=1e-4, atol=1e-4)
    threads = torch.get_num_threads()
    try:
        for other in (1, 2, 3, 6):
            torch.set_num_threads(other)
            again, total = torch.empty(m, n), torch.empty(m)
            torch.ops.modelcenter.product_(again, a, weight.t(), total, False, True)
            assert torch.equal(again, out) and torch.equal(total, sums)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("onednn", ["compiled"], indirect=True)
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_which_products_are_rounded(onednn, precision):
    """Those of layers, in both directions, where torch's setting allows it, and only there."""
    rounds = gemm.multiplies_in_bf16()
    assert rounds == library.cpu().rounds
    kept = rounded if rounds and precision == "medium" else torch.Tensor.double
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((64, 48), (40, 48), (40,)))
    grad = torch.randn(64, 40)
    torch.set_float32_matmul_precision(precision)
    try:
        out = ops.linear(x, w, b)
        out.backward(grad)
    finally:
        torch.set_float32_matmul_precision("highest")
    wanted = kept(x) @ kept(w).t() + b.double(), kept(grad) @ kept(w), kept(grad).t() @ kept(x), grad.double().sum(0)
    for ours, theirs in zip((out, x.grad, w.grad, b.grad), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)


def test_what_is_no_number_is_none_when_rounded(compiled, may_round):
    assert library.serves(torch.device("cpu"))
    a, b = torch.randn(9, 5), torch.randn(5, 33)
    a[3, 2], b[1, 32], a[8, 4] = float("nan"), float("inf"), 3.4e38  # which rounds to infinity
    out = torch.empty(9, 33)
    torch.ops.modelcenter.product_(out, a, b, None, False, True)
    rounds = library.cpu().rounds
    wanted = (rounded(a) @ rounded(b)) if rounds else a @ b
    assert torch.equal(out.isfinite(), wanted.isfinite())


# Rows that go together or are left over, a depth that ends within a vector or is cut, columns that are left over.
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 48])
@pytest.mark.parametrize("depth, columns", [(5, 3), (64, 8), (1037, 261)])
def test_product_of_few_rows(compiled, rows, depth, columns):
    assert library.serves(torch.device("cpu"))
    check_few(rows, depth, columns)


def check_few(rows, depth, columns):
    """Against float64, in strided memory; with the same bits on any number of threads, and of each row alone (with
    AVX-512 the operator has no way of its own for few)."""
    x, weight, bias = (
        torch.randn(rows, depth + 3)[:, 1:-2],
        torch.randn(columns, depth + 1)[:, :-1],
        torch.randn(columns),
    )
    around = torch.full((rows, columns + 5), 7.0)
    for b in (bias, None):
        out = torch.ops.modelcenter.linear(x, weight, b)
        wanted = F.linear(*(t if t is None else t.double() for t in (x, weight, b)))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=3e-7 * depth + 1e-5)
        torch.ops.modelcenter.linear_(around[:, 2:-3], x, weight, b)
        assert torch.equal(around[:, 2:-3], out) and (around[:, :2] == 7).all() and (around[:, -3:] == 7).all()
        for i in range(rows if library.cpu().isa != "avx512" else 0):
            assert torch.equal(torch.ops.modelcenter.linear(x[i : i + 1], weight, b), out[i : i + 1])
        threads = torch.get_num_threads()
        try:
            for other in (1, 2, 3, 6):
                torch.set_num_threads(other)
                assert torch.equal(torch.ops.modelcenter.linear(x, weight, b), out)
        finally:
            torch.set_num_threads(threads)


def test_what_is_no_number_stays_in_its_row_and_column(compiled):
    assert library.serves(torch.device("cpu"))
    x, weight = torch.randn(5, 21), torch.randn(9, 21)
    x[3, 2], weight[8, 20] = float("nan"), float("inf")
    out = torch.ops.modelcenter.linear(x, weight, None)
    assert torch.equal(out.isfinite(), F.linear(x, weight).isfinite())


@pytest.mark.parametrize("isa, intel, takes", [("avx2", False, True), ("avx2", True, False), ("avx512", False, False)])
def test_which_products_of_few_rows_are_compiled(compiled, monkeypatch, isa, intel, takes):
    """On AMD's CPUs with AVX2 alone, without gradients, up to 48 rows."""
    monkeypatch.setattr(gemm, "onednn_linear", lambda: (False, ""))
    monkeypatch.setattr(gemm, "_is_intel", lambda: intel)
    monkeypatch.setattr(library, "cpu", lambda: library.Status(True, "", isa))
    product, shapes = gemm._compiled_nt, []
    monkeypatch.setattr(gemm, "_compiled_nt", lambda a, *more: shapes.append(tuple(a.shape)) or product(a, *more))
    w, b, x = torch.randn(7, 6, requires_grad=True), torch.randn(7, requires_grad=True), torch.randn(2, 24, 6)

    def taken(call):
        shapes.clear()
        wanted = F.linear(x.double(), w.double(), b.double()).detach()
        torch.testing.assert_close(call().double(), wanted, rtol=1e-5, atol=1e-5)
        return shapes == [(48, 6)]

    with torch.no_grad():
        assert taken(lambda: ops.linear(x, w, b)) == takes
        assert not taken(lambda: ops.linear(x.double(), w.double(), b.double()))
        x = torch.randn(49, 6)
        assert not taken(lambda: ops.linear(x, w, b))
        ops.linear(torch.randn(6), w, b)
        assert shapes == [(1, 6)] * takes
        with torch.autocast("cpu", torch.bfloat16):
            assert ops.linear(x[:5], w, b).dtype == torch.bfloat16
    x = torch.randn(2, 24, 6)
    assert not taken(lambda: ops.linear(x, w, b))  # gradients are torch's business
    assert taken(lambda: gemm.matmul_nt(x.flatten(0, 1), w.detach(), b.detach()).view(2, 24, 7)) == takes


@pytest.mark.parametrize("columns", [41, gemm._MANY, 2 * gemm._MANY + 77])
@pytest.mark.parametrize("bias", [True, False])
def test_product_in_room_that_is_given(onednn, columns, bias):
    """Also in rows that do not follow one another, of more columns than are multiplied at once; beside it all stays."""
    a, b, c = torch.randn(40, 19), torch.randn(columns, 19), torch.randn(columns) if bias else None
    wanted = F.linear(*(x if x is None else x.double() for x in (a, b, c)))
    around = torch.full((40, columns + 9), 7.0)
    for room in (None, torch.empty(40, columns), around[:, 4:-5]):
        found = ops.matmul_nt(a, b, c, room)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)
        if room is not None and (gemm.compiled() or (columns > gemm._MANY and not onednn)):
            assert found.data_ptr() == room.data_ptr()
    assert (around[:, :4] == 7).all() and (around[:, -5:] == 7).all()
    room = torch.empty(40, 19)
    found = ops.matmul(wanted.float(), b, room=room)
    torch.testing.assert_close(found.double(), wanted @ b.double(), rtol=1e-4, atol=1e-3)
    assert found.data_ptr() == room.data_ptr() or (onednn and not gemm.compiled())
    assert ops.matmul_nt(a.bfloat16(), b.bfloat16(), room=around[:, 4:-5]).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.matmul_nt(a, b, c, torch.empty(40, columns)).dtype == torch.bfloat16
        product = ops.matmul(a, b.t(), room=torch.empty(40, columns))
        assert product.dtype == (torch.float32 if onednn else torch.bfloat16)


def test_product_passes_on_what_is_not_a_number(onednn):
    a, b = torch.randn(9, 4), torch.randn(4, 33)
    a[3, 2], b[1, 32] = float("nan"), float("inf")
    out = ops.matmul(a, b)
    assert torch.equal(out.isfinite(), (a @ b).isfinite())


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(a=torch.ones(2, 5)), "is not the size of"),
        (dict(out=torch.ones(3, 2).t()), "the rows of out are not contiguous"),
        (dict(out=torch.ones(3).expand(2, 3)), "the rows of out are not contiguous"),
        (dict(b=torch.ones(4, 6)[:, ::2]), "neither rows nor columns of b"),
        (dict(a=torch.ones(2, 8)[:, ::2]), "neither rows nor columns of a"),
        (dict(a=torch.ones(2, 4, dtype=torch.float64)), "a must be an fp32 tensor of 2 dimensions"),
        (dict(sums=torch.ones(3)), "sums must be contiguous, with 2 numbers"),
        (dict(overlap=True), "overlap in memory"),
    ],
)
def test_operands_that_do_not_fit_are_refused(compiled, change, said):
    assert library.serves(torch.device("cpu"))
    given = {"out": torch.zeros(2, 3), "a": torch.ones(2, 4), "b": torch.ones(4, 3), "sums": None, **change}
    if given.pop("overlap", False):
        room = torch.zeros(20)
        given["out"], given["a"] = room[:6].view(2, 3), room[5:13].view(2, 4)
    with pytest.raises(RuntimeError, match=said):
        torch.ops.modelcenter.product_(*given.values(), False)
    torch.ops.modelcenter.product_(torch.zeros(0, 3), torch.ones(0, 4), torch.ones(4, 3), None, False)
    empty, sums = torch.full((2, 3), 7.0), torch.full((2,), 7.0)
    torch.ops.modelcenter.product_(empty, torch.ones(2, 0), torch.ones(0, 3), sums, False)
    assert not empty.any() and not sums.any()
    wide = torch.full((2, 5), 7.0)
    torch.ops.modelcenter.product_(wide[:, 1:4], torch.ones(2, 0), torch.ones(0, 3), None, False)
    assert wide.tolist() == [[7.0, 0.0, 0.0, 0.0, 7.0]] * 2
    torch.ops.modelcenter.product_(torch.zeros(2, 0), torch.ones(2, 4), torch.ones(4, 0), sums, False)
    assert sums.tolist() == [4.0, 4.0]
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    for bias in (torch.ones(2), torch.ones(6)[::2]):
        with pytest.raises(RuntimeError, match="bias must be contiguous, with 3 numbers"):
            torch.ops.modelcenter.linear(x, weight, bias)
    with pytest.raises(RuntimeError, match="out .2, 5. is not the size of"):
        torch.ops.modelcenter.linear_(torch.empty(2, 5), x, weight, None)


def test_operators_give_the_same_where_no_gradient_is_wanted(either):
    """They are then called without autograd, also on weights that have one."""
    x = torch.randn(gemm._FEW_OF_MKL + 1, 40)  # products of fewer may be another operator's, with other roundings
    weight, scale = (torch.nn.Parameter(torch.randn(shape)) for shape in ((24, 40), (40,)))
    calls = (
        lambda: ops.linear(x, weight),
        lambda: ops.rms_norm(x, scale, 1e-6),
        lambda: ops.gelu_tanh(x),
        lambda: ops.gated(ops.silu, x, x),
    )
    for call in calls:
        with torch.no_grad():
            alone = call()
        assert torch.equal(alone, call()) and not alone.requires_grad
    assert calls[0]().requires_grad and calls[1]().requires_grad


@pytest.mark.parametrize("forward_mode", ("torch.func", "dual level"))
def test_forward_derivatives(either, forward_mode):
    """Without grad mode nothing but a tangent says that derivatives are taken."""
    weight, scale = torch.randn(24, 40), torch.randn(40)
    pairs = [
        (lambda x: ops.linear(x, weight), lambda x: F.linear(x, weight)),
        (lambda x: ops.rms_norm(x, scale, 1e-6), lambda x: F.rms_norm(x, (40,), scale, 1e-6)),
        (lambda x: ops.gated(ops.gelu, x, x), lambda x: F.gelu(x) * x),
        *ACTIVATIONS,
    ]
    x, tangent = torch.randn(2, 3, 40)
    for ours, theirs in pairs:
        with torch.no_grad():
            if forward_mode == "torch.func":
                found, wanted = (torch.func.jvp(f, (x,), (tangent,))[1] for f in (ours, theirs))
            else:
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(x, tangent)
                    found, wanted = (forward_ad.unpack_dual(f(dual)).tangent for f in (ours, theirs))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def rms_norm_and_gradients(shape):
    rng = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=rng) for _ in range(2))
    x, weight = x.requires_grad_(), torch.rand(shape[-1], generator=rng, requires_grad=True)
    out = ops.rms_norm(x, weight, 0.01)
    return x, weight, grad, [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (5, 7, 64), (33, 200)], ids=str)
def test_rms_norm(either, shape):
    """Against float64, on rows of odd length, and the same bits whatever the threads."""
    x, weight, grad, found = rms_norm_and_gradients(shape)
    d, w = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = d / (d.square().mean(-1, keepdim=True) + 0.01).sqrt() * w
    for ours, right in zip(found, [wanted, *torch.autograd.grad(wanted, (d, w), grad.double())], strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=2e-6)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        again = rms_norm_and_gradients(shape)[-1]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_rms_norm_of_16_bits_takes_no_copy(monkeypatch):
    """torch's kernel on a GPU computes in fp32 anyway, and a copy in fp32 would be kept for backward."""
    seen = []
    monkeypatch.setattr(F, "rms_norm", lambda x, *_, **__: seen.append(x) or x)
    ops.rms_norm(x := torch.ones(4, 6).bfloat16(), torch.ones(6).bfloat16(), 1e-6)
    assert seen[0] is x


def test_rms_norm_of_other_tensors_is_torchs(either):
    x, weight = torch.randn(4, 6), torch.rand(6, requires_grad=True)
    torch.testing.assert_close(ops.rms_norm(x.t().contiguous().t(), weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    half, rows = ops.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6), x.bfloat16().float()
    assert half.equal(F.rms_norm(rows, (6,), eps=1e-6).bfloat16() * weight.bfloat16())
    assert ops.rms_norm(x[:0], weight, 1e-6).shape == (0, 6)
    assert ops.rms_norm(x.to("meta"), weight.to("meta"), 1e-6).shape == (4, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_another_width_is_an_error(either, dtype):
    """Also where the width of the weight divides that of the rows."""
    with pytest.raises(ValueError, match=r"weight has shape \(32,\), expected the shape of a row of x, \(64,\)"):
        ops.rms_norm(torch.randn(2, 64, dtype=dtype), torch.ones(32, dtype=dtype), 1e-6)


def losses_and_gradient(rows, classes, smoothing):
    rng = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, classes, generator=rng) * 5
    targets = torch.randint(0, classes, (rows,), generator=rng)
    taken = logits.clone()
    return logits, targets, [ops.cross_entropy_(taken, targets, 7, smoothing), taken]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(1, 1), (5, 65), (40, 3), (3, 5000)], ids=str)
def test_cross_entropy(either, shape, smoothing):
    """Against torch's in float64; without `train` the logits stay."""
    logits, targets, (losses, gradient) = losses_and_gradient(*shape, smoothing)
    x = logits.double().requires_grad_()
    wanted = F.cross_entropy(x, targets, reduction="none", label_smoothing=smoothing)
    (wanted.sum() / 7).backward()
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-5, atol=1e-7)
    kept = logits.clone()
    assert torch.equal(ops.cross_entropy_(kept, targets, 7, smoothing, train=False), losses)
    assert torch.equal(kept, logits)
    rows, classes = shape
    around = torch.full((rows, classes + 5), 7.0)
    apart = around[:, 2:-3].copy_(logits)
    assert torch.equal(ops.cross_entropy_(apart, targets, 7, smoothing), losses) and torch.equal(apart, gradient)
    assert (around[:, :2] == 7).all() and (around[:, -3:] == 7).all()


def test_cross_entropy_of_what_is_not_a_number(either):
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("inf"), 0.0, 0.0], [0.0, -float("inf"), 0.0]])
    losses = ops.cross_entropy_(logits, torch.tensor([0, 1, 2]), 1)
    assert not losses[:2].isfinite().any() and losses[2].item() == pytest.approx(0.6931472)
    assert not logits[0].isfinite().any() and logits[2].tolist() == pytest.approx([0.5, 0.0, -0.5])


def test_targets_that_are_no_class_are_refused(compiled):
    for targets, said in ((torch.tensor([0, 3]), "target 3 of row 1 is none of 3"), (torch.ones(2), "int64")):
        with pytest.raises(RuntimeError, match=said):
            ops.cross_entropy_(torch.zeros(2, 3), targets, 1)
    for logits in (torch.zeros(3, 2).t(), torch.zeros(3).expand(2, 3)):
        with pytest.raises(RuntimeError, match="the rows of logits are not contiguous"):
            ops.cross_entropy_(logits, torch.tensor([0, 1]), 1)


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

"""Norms, and what is added before them: the compiled operators of a CPU, and the choice between these and torch's."""

import pytest
import rows_cases
import torch
import torch.nn.functional as F

from engine import ops
from engine.ops import Added, library, norm_after, norm_before

EPS, KEY, SITE = 0.01, 1 << 40, 7
FORMS = {"before": norm_before, "after": norm_after}


@pytest.mark.parametrize(("rows", "n"), rows_cases.NORMS)
def test_the_operators_are_those_of_fp64(compiled, rows, n):
    assert library.serves(torch.device("cpu"))
    for odd in (0, 1):
        rows_cases.check_norms(rows, n, torch.float32, "cpu", odd)


def problem(shape=(3, 11, 24), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = shape[-1]
    x, branch, weight, bias, *grads = (
        torch.randn(s, generator=generator).to(dtype) + 0.5 for s in (shape, shape, (n,), (n,), shape, shape)
    )
    tokens = torch.arange(x.numel() // n).view(shape[:-1]) << 31
    return [t.requires_grad_() for t in (x, branch, weight, bias)], tokens, grads


def apart(form, x, weight, bias, added):
    """By torch's operators in fp64, with the masks of `dropout`."""
    total = x
    if added is not None:
        mask = ops.dropout(torch.ones(x.shape), added.p, key=added.key, site=added.site, tokens=added.tokens)
        total = x + added.branch * mask.double()
    out = (
        F.rms_norm(total, weight.shape, weight, EPS)
        if bias is None
        else F.layer_norm(total, weight.shape, weight, bias, EPS)
    )
    return (total, out) if form == "before" else (out, out)


@pytest.mark.parametrize("p", [None, 0.0, 0.2])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients(either, form, centered, p):
    if form == "after" and p is None:
        return
    (x, branch, weight, bias), tokens, grads = problem()
    found = []
    for exact in (False, True):
        leaves = [
            t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for t in (x, branch, weight, bias)
        ]
        added = None if p is None else Added(leaves[1], p, KEY, SITE, tokens)
        of_bias = leaves[3] if centered else None
        call = apart if exact else lambda form, x, *args: FORMS[form](x, *args[:2], EPS, *args[2:])
        out = call(form, leaves[0], leaves[2], of_bias, added)
        used = [leaf for leaf, use in zip(leaves, (True, p is not None, True, centered), strict=True) if use]
        found.append([t.detach().double() for t in out])
        for wanted in ([0, 1], [0], [1]):  # one of the two may go unused
            got = torch.autograd.grad(
                [out[i] for i in wanted], used, [grads[i].to(out[i].dtype) for i in wanted], retain_graph=True,
                allow_unused=True,
            )  # fmt: skip
            found[-1] += [torch.zeros((), dtype=torch.float64) if g is None else g.double() for g in got]
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right.broadcast_to(ours.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_operator_takes_gets_it(compiled, form, monkeypatch):
    (x, branch, weight, bias), tokens, _ = problem()
    calls, run = [], library.operator
    monkeypatch.setattr(library, "operator", lambda name: calls.append(name) or run(name))
    out = FORMS[form](x, weight, bias, EPS, Added(branch, 0.2, KEY, SITE, tokens))
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    assert calls == ["norm", "norm_backward"]
    calls.clear()
    with torch.no_grad():
        FORMS[form](x, weight, None, EPS, Added(branch))
    assert calls == ["norm"]
    calls.clear()
    for other in (  # 16 bits, and a branch of another shape or dtype
        problem(dtype=torch.bfloat16)[0], [x, branch[:, :1], weight, bias], [x, branch.bfloat16(), weight, bias],
    ):  # fmt: skip
        FORMS[form](other[0], *other[2:], EPS, Added(other[1]))
    assert not calls


def test_the_bits_of_dropout_add(compiled):
    """Sums and masks are those of the operators that stand alone, also with a key from torch's generator."""
    (x, branch, weight, bias), tokens, (grad, _) = problem((50, 200))
    total, _ = norm_before(x, weight, bias, EPS, Added(branch, 0.3, KEY, SITE, tokens))
    assert torch.equal(total, ops.dropout_add(branch, x, 0.3, key=KEY, site=SITE, tokens=tokens))
    (dbranch,) = torch.autograd.grad(total, branch, grad)
    assert torch.equal(dbranch != 0, ops.dropout(torch.ones(50, 200), 0.3, key=KEY, site=SITE, tokens=tokens) != 0)
    found = []
    for call in (
        lambda: norm_before(x, weight, None, EPS, Added(branch, 0.3))[0],
        lambda: ops.dropout_add(branch, x, 0.3),
    ):
        torch.manual_seed(3)
        found += [call(), torch.rand(())]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("form", FORMS)
def test_where_all_or_nothing_is_dropped(either, form):
    """Nothing takes no key from torch's generator."""
    (x, branch, weight, bias), *_ = problem()
    state = torch.get_rng_state()
    for p, total in ((None, x + branch), (0.0, x + branch), (1.0, x), (0.999995, x)):
        added = Added(branch) if p is None else Added(branch, p)
        found = FORMS[form](x, weight, bias, EPS, added)
        assert p or torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(found, FORMS[form](total, weight, bias, EPS), rtol=1e-6, atol=1e-6)


def test_the_same_bits_whatever_the_threads(compiled):
    (x, branch, weight, bias), tokens, grads = problem((170, 96))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = norm_before(x, weight, bias, EPS, Added(branch, 0.1, KEY, SITE, tokens))
            found.append([*out, *torch.autograd.grad(out, (x, branch, weight, bias), grads)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (3,), (0, 1), (2, 3)])
def test_what_is_frozen_has_no_gradient(either, trained):
    leaves, tokens, grads = problem()
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in trained)
    out = norm_before(leaves[0], *leaves[2:], EPS, Added(leaves[1], 0.2, KEY, SITE, tokens))
    torch.autograd.backward(
        [t for t in out if t.requires_grad], [g for t, g in zip(out, grads, strict=True) if t.requires_grad]
    )
    assert [leaf.grad is not None for leaf in leaves] == [i in trained for i in range(4)]


def test_inputs_that_do_not_fit_each_other_are_named(either):
    (x, branch, weight, bias), tokens, _ = problem()
    with pytest.raises(ValueError, match="p is 1.5, expected a probability"):
        norm_before(x, weight, bias, EPS, Added(branch, 1.5))
    with pytest.raises(ValueError, match=r"tokens has 2 numbers for an x of shape \(3, 11, 24\)"):
        norm_before(x, weight, bias, EPS, Added(branch, 0.5, KEY, SITE, tokens.flatten()[:2]))
    with pytest.raises(ValueError, match=r"weight has shape \(23,\), expected the shape of a row of x, \(24,\)"):
        norm_after(x, weight[:23], None, EPS, Added(branch))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm_after(x, weight[:23], bias[:23], EPS, Added(branch))


def test_operators_refuse_what_does_not_fit(compiled):
    assert library.serves(torch.device("cpu"))
    x, weight, draw = torch.ones(4, 6), torch.ones(6), (None, 0, 0, 0)
    norm, back = torch.ops.modelcenter.norm, torch.ops.modelcenter.norm_backward
    for wrong, said in (
        ((x, weight[:0], None, EPS, None), "weight has no numbers"),
        ((x, weight[:5], None, EPS, None), "the rows of x are not as long as the weight, 5"),
        ((x, weight, weight[:5], EPS, None), "bias has 5 numbers, expected 6"),
        ((x, weight, None, EPS, x[:3]), "branch has 18 numbers, expected 24"),
        ((x, weight, None, EPS, x.double()), "branch holds a dtype"),
        ((x, weight.bfloat16(), None, EPS, None), "weight must be of fp32"),
        ((x.bfloat16(), weight.bfloat16(), None, EPS, None), "x must hold fp32 numbers"),
    ):
        with pytest.raises(RuntimeError, match=said):
            norm(*wrong, *draw, 0)
    with pytest.raises(RuntimeError, match="tokens must be contiguous int64 numbers"):
        norm(x, weight, None, EPS, x.clone(), torch.arange(3), 0, 0, 5, 0)
    with pytest.raises(RuntimeError, match="stats has 4 numbers, expected 8"):
        back(x, None, False, x, weight, x[:, 0].contiguous(), True, True, *draw, 0)
    with pytest.raises(RuntimeError, match="extra has 18 numbers, expected 24"):
        back(x, x[:3], False, x, weight, x[:, 0].contiguous(), False, True, *draw, 0)
    with pytest.raises(RuntimeError, match="threshold must be 0 to 65535"):
        norm(x, weight, None, EPS, x.clone(), None, 0, 0, 65536, 0)


def test_a_second_derivative_raises(compiled):
    (x, branch, weight, bias), *_ = problem()
    out = norm_after(x, weight, bias, EPS, Added(branch))[0]
    with pytest.raises(RuntimeError, match="Norm has no second derivative"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [None, 0.2])
def test_without_gradients_it_is_the_same(either, form, p):
    (x, branch, weight, bias), tokens, _ = problem()
    added = Added(None) if p is None else Added(branch, p, KEY, SITE, tokens)
    wanted = FORMS[form](x, weight, bias, EPS, added)
    with torch.no_grad():
        found = FORMS[form](x, weight, bias, EPS, added)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found, wanted, strict=True) if a is not x)

"""Mixtures of experts: the operators against a loop over tokens, and split over ranks against one process."""

import contextlib

import engine_toys as toys
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine
from engine.ops import Experts, remade
from engine.ops.experts import experts, route
from engine.ops.grouped import grouped_linears

WIDTH, INNER, COUNT, CHOSEN = 6, 10, 5, 2


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mixture(normalized=True, activation=F.silu):
    found = Experts(WIDTH, INNER, COUNT, CHOSEN, activation, normalized)
    for i, parameter in enumerate(found.parameters()):
        parameter.data = drawn(*parameter.shape, seed=i)
    return found


def by_token(x, logits, gate, up, down, normalized, activation=F.silu):
    """Every token alone, with torch's operators in the dtype of x."""
    rows = []
    for token, scores in zip(x, logits, strict=True):
        probabilities, chosen = scores.softmax(-1).topk(CHOSEN)
        total = probabilities.sum() if normalized else 1.0
        parts = [
            p / total * (down[e] @ (activation(gate[e] @ token) * (up[e] @ token)))
            for p, e in zip(probabilities, chosen.tolist(), strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows) if rows else x + 0 * sum(value.sum() for value in (logits, gate, up, down))


def gradients(call, *inputs):
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    out = call(*inputs)
    (out * drawn(*out.shape, seed=9).to(out.dtype)).sum().backward()
    return out.detach(), [value.grad for value in inputs]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 3, 90])  # with 3, some experts have none; 90 use the products of many rows
def test_against_a_loop_over_tokens(either, tokens, normalized):
    model = mixture(normalized)
    given = drawn(tokens, WIDTH, seed=5), 3 * drawn(tokens, COUNT, seed=6), *model.parameters()
    out, found = gradients(model.mix, *given)
    exact, wanted = gradients(lambda *values: by_token(*values, normalized), *(value.double() for value in given))
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-5)


def test_without_a_gate(either):
    x, logits = drawn(30, WIDTH, seed=5), drawn(30, COUNT, seed=6)
    model = Experts(WIDTH, INNER, COUNT, CHOSEN, F.gelu, normalized=False, gated=False)
    for i, parameter in enumerate(model.parameters()):
        parameter.data = drawn(*parameter.shape, seed=i)
    out, found = gradients(lambda x, logits, *own: model.mix(x, logits, None, *own), x, logits, *model.parameters())
    values = [value.double() for value in (x, logits, *model.parameters())]
    exact, wanted = gradients(lambda *values: every_expert(*values), *values)
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-5)


def every_expert(x, logits, up, down):
    """All experts of all tokens, of which the chosen ones are weighted."""
    probabilities, chosen = logits.softmax(-1).topk(CHOSEN)
    weights = torch.zeros_like(logits).scatter(1, chosen, probabilities)
    parts = torch.einsum("tei,ehi->teh", F.gelu(torch.einsum("th,eih->tei", x, up)), down)
    return torch.einsum("te,teh->th", weights, parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model = mixture().to(dtype)
    given = drawn(20, WIDTH, seed=5).to(dtype), 3 * drawn(20, COUNT, seed=6).to(dtype), *model.parameters()
    out, found = gradients(model.mix, *given)
    assert out.dtype == dtype
    exact, wanted = gradients(lambda *values: by_token(*values, True), *(value.double() for value in given))
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.25}
    torch.testing.assert_close(out.double(), exact, **tolerance)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, **tolerance)


def test_autocast_casts_the_factors():
    model, x, logits = mixture(), drawn(20, WIDTH, seed=5), drawn(20, COUNT, seed=6)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x, logits)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and model.gate.grad.dtype == torch.float32
    assert torch.equal(out, model.bfloat16()(x.bfloat16(), logits))


def test_only_what_is_asked_for_gets_a_gradient():
    """Frozen experts below a trained layer, trained experts over frozen ones, and no gradient at all."""
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    x, one, other = drawn(7, WIDTH), drawn(3, INNER, WIDTH, seed=1), drawn(3, 4, WIDTH, seed=2)
    whole = [value.clone().requires_grad_() for value in (x, one, other)]
    outs = grouped_linears(whole[0], ends, *whole[1:])
    wanted = torch.autograd.grad([out.square().sum() for out in outs], whole)
    assert not wanted[1][1].any() and wanted[1][0].any()
    for trained in ([0], [1], [2], [0, 2], [1, 2]):
        values = [value.clone().requires_grad_(i in trained) for i, value in enumerate((x, one, other))]
        loss = sum(out.square().sum() for out in grouped_linears(values[0], ends, *values[1:]))
        for i, grad in zip(trained, torch.autograd.grad(loss, [values[i] for i in trained]), strict=True):
            torch.testing.assert_close(grad, wanted[i])
    first, _ = grouped_linears(whole[0], ends, *whole[1:])  # of two outputs only one is used
    assert torch.autograd.grad(first.sum(), whole[2], allow_unused=True) == (None,)


def test_what_backward_keeps():
    """Rows for the gradient of a matrix, and matrices for that of the rows."""
    ends = torch.tensor([3, 4], dtype=torch.int32)
    for rows, matrix in ((True, False), (False, True)):
        x, weight = drawn(4, WIDTH).requires_grad_(rows), drawn(2, 3, WIDTH).requires_grad_(matrix)
        (out,) = grouped_linears(x, ends, weight)
        assert [t is None for t in out.grad_fn.saved_tensors] == [rows, matrix]


def test_what_backward_recomputes():
    """The product of the activation, which the last layer of the experts reads; with the same gradients."""
    model, x, logits = mixture(), drawn(50, WIDTH, seed=5).requires_grad_(), drawn(50, COUNT, seed=6)
    found = []
    for again in (False, True):
        with remade.remaking() if again else contextlib.nullcontext():
            out = model(x, logits)
        found.append((remade_inputs(out), torch.autograd.grad(out.sum(), [x, *model.parameters()])))
    assert [count for count, _ in found] == [0, 1]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)


def remade_inputs(out):
    """How many grouped products before `out` recompute their input."""
    seen, left, count = set(), [out.grad_fn], 0
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            count += "Grouped" in type(node).__name__ and node.plans is not None
            left += [parent for parent, _ in node.next_functions]
    return count


def test_a_second_derivative_is_refused():
    model, x = mixture(), drawn(4, WIDTH).requires_grad_()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(model(x, drawn(4, COUNT, seed=1)).sum(), x, create_graph=True)
    (out,) = grouped_linears(x, torch.tensor([4], dtype=torch.int32), model.up[:1])
    with pytest.raises(RuntimeError, match="GroupedLinears has no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


class Toy(nn.Module):
    """Two layers with a router, of which tensor parallelism splits the experts only."""

    def __init__(self):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, COUNT, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(mixture(normalized) for normalized in (True, False))
        for i, parameter in enumerate(self.parameters()):
            parameter.data = 0.3 * drawn(*parameter.shape, seed=20 + i)

    def forward(self, x):
        for router, layer in zip(self.routers, self.layers, strict=True):
            x = x + layer(x, router(x))
        return x


def trained(sizes):
    if sizes:
        engine.init_distributed(**sizes)
    model = Toy()
    if sizes:
        model = engine.shard(model, tp_plan={"layers.*": "experts"}, units=list(model.layers))
    x = drawn(30, WIDTH, seed=3)
    rows = x if not sizes else x.chunk(engine.data_size())[engine.data_rank()]
    loss = engine.accumulate(model, [rows], lambda part, totals: model(part).square().sum() / totals["n"], counts)
    for layer in model.layers if sizes else ():
        assert not layer.tp_group._inputs._results  # which would keep the inputs of the last layer
    return loss.item(), {name: toys.whole(p.grad) for name, p in model.named_parameters()}


def counts(part):
    return {"n": len(part)}


def test_split_by_their_inner_channels(two):
    loss, wanted = trained({})
    for found, grads in two.run(trained, {"tp_size": 2}):
        assert found == pytest.approx(loss, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-4)


def uneven():
    engine.init_distributed(tp_size=2)
    model = nn.ModuleDict({"layer": nn.Linear(3, 3)})
    engine.shard(model, tp_plan={"layer": "experts"})


def test_a_style_for_experts_alone(two):
    with pytest.raises(RuntimeError, match="layer the style 'experts', which is for Experts, but it is a Linear"):
        two.run(uneven)


def test_probabilities_are_those_of_32_bits():
    logits = drawn(40, COUNT, seed=2).bfloat16()
    for normalized in (True, False):
        routing = route(logits, CHOSEN, normalized)
        exact, chosen = logits.double().softmax(-1).topk(CHOSEN)
        torch.testing.assert_close(
            routing.weights, (exact / (exact.sum(-1, keepdim=True) if normalized else 1.0)).float(), rtol=1e-6, atol=0
        )
        assert torch.equal(routing.experts, chosen)


def test_the_operator_takes_any_number_of_experts_per_token():
    x, logits, model = drawn(8, WIDTH), drawn(8, COUNT, seed=2), mixture()
    for k in (1, COUNT):
        routing = route(logits, k, normalized=False)
        out = experts(x, routing, model.gate, model.up, model.down, F.silu)
        parts = torch.stack([(F.silu(x @ g.T) * (x @ u.T)) @ d.T for g, u, d in zip(*model.parameters(), strict=True)])
        mask = torch.zeros(8, COUNT).scatter_(1, routing.experts, routing.weights)
        torch.testing.assert_close(out, torch.einsum("te,eth->th", mask, parts), rtol=1e-5, atol=1e-5)

"""The compiled attention of packed sequences: against float64 with the same masks, and on bad input."""

import pytest
import torch

from engine.ops import attention, library
from engine.ops.attention import Dropped, Heads, Rules
from engine.ops.philox import random_bits
from modelcenter.layers.attention_options import AttentionOptions
from modelcenter.layers.bucketed_attention import bucketed_attention
from modelcenter.layers.bucketed_sdpa import bucketed_sdpa
from modelcenter.layers.dropout import NO_DROPOUT
from modelcenter.layers.mask import Mask
from modelcenter.layers.packed_attention import packed_attention
from modelcenter.layers.packing import Packed

KEY, SITE, FIRST_HEAD = -(2**61) + 7, 3, 2
# Lengths around the widths of vectors, tiles, blocks of queries and blocks of random numbers.
KINDS = {
    "plain": dict(lengths=[1, 31, 32, 33, 7, 17, 16], width=64),
    "dropped": dict(lengths=[5, 0, 130, 16], width=8, p=0.3),
    "causal": dict(lengths=[40, 1, 129, 64, 17], width=3, causal=True, p=0.1),
    "window": dict(lengths=[70, 33, 150], width=20, causal=True, window=11, kv_heads=1),
    "near": dict(lengths=[70, 33, 1, 150, 16], width=20, window=11, kv_heads=2, p=0.1),
    # The first key that a block sees is the second of a pair, or the last the first of one.
    "even window": dict(lengths=[70, 33, 150], width=16, causal=True, window=10),
    "even near": dict(lengths=[70, 33, 150], width=16, window=10, p=0.1),
    "bias": dict(lengths=[3, 65, 40, 17], width=33, bias=True, p=0.2),
    "causal bias": dict(lengths=[50, 8], width=16, bias=True, causal=True, kv_heads=2),
    "cross": dict(lengths=[5, 40, 0, 33], keys=[90, 3, 8, 1], width=32, kv_heads=2, p=0.1),
    # Caps below most scores, among them, above, and so far above that errors of tanh would show.
    "capped": dict(lengths=[70, 33, 1, 150], width=20, causal=True, window=11, kv_heads=2, cap=0.5),
    "capped and dropped": dict(lengths=[5, 0, 40, 17], keys=[90, 3, 8, 1], width=33, p=0.2, cap=3.0),
    "capped bias": dict(lengths=[3, 65, 17], width=16, bias=True, causal=True, kv_heads=1, cap=30.0),
    "hardly capped": dict(lengths=[40, 17], width=16, cap=3000.0),
}


@pytest.fixture(autouse=True)
def loaded(compiled):
    """Then torch.empty gives NaNs, which the operator must have written over."""
    assert library.cpu().loaded
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def offsets(lengths):
    """Such as a table of batches holds them, not contiguous."""
    return torch.tensor([0, *lengths]).cumsum(0).int()[:, None].expand(-1, 2).contiguous()[:, 0]


def problem(lengths, width, keys=None, kv_heads=4, bias=False, p=0.0, **mask):
    torch.manual_seed(0)
    queries, keys = offsets(lengths), offsets(lengths if keys is None else keys)
    rows, key_rows = int(queries[-1]), int(keys[-1])
    inputs = [torch.randn(rows, 4 * width), *(torch.randn(key_rows, kv_heads * width) for _ in range(2))]
    inputs += [torch.randn(4, 2 * max(lengths) + 5)] if bias else []
    heads = Heads(4, kv_heads, 0.4, **mask)
    return inputs, queries, keys, heads, Dropped(p, KEY, SITE, torch.randint(0, 2**45, (rows,)), FIRST_HEAD)


def truth(inputs, queries, keys, heads, dropped):
    q, k, v, *bias = inputs
    share, outs = heads.heads // heads.kv_heads, []
    for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        one = q[a:b].unflatten(1, (heads.heads, -1)).transpose(0, 1)
        both = (x[c:d].unflatten(1, (heads.kv_heads, -1)).transpose(0, 1).repeat_interleave(share, 0) for x in (k, v))
        theirs, values = both
        scores = heads.scale * one @ theirs.transpose(1, 2)
        scores = scores if heads.cap is None else heads.cap * torch.tanh(scores / heads.cap)
        apart = torch.arange(d - c) - torch.arange(b - a)[:, None]  # key minus query
        for table in bias:
            scores = scores + table[:, table.shape[1] // 2 + apart]
        far = apart.abs() >= (heads.window or max(b - a, d - c))
        scores = scores.masked_fill(far | (heads.causal & (apart > 0)), -torch.inf)
        weights = scores.softmax(-1)
        if dropped.p and b > a:
            for head in range(heads.heads):
                numbers = dropped.tokens[a:b] + ((FIRST_HEAD + head) << 20)
                kept = random_bits(numbers, 0, int(d - c), KEY, SITE) >= round(dropped.p * 65536)
                weights = weights.clone()
                weights[head] = weights[head] * kept * 65536 / (65536 - round(dropped.p * 65536))
        outs.append((weights @ values).transpose(0, 1).flatten(1))
    return torch.cat(outs)


def found(inputs, *rest):
    inputs = [x.detach().requires_grad_() for x in inputs]
    q, k, v, *bias = inputs
    queries, keys, heads, dropped = rest
    out = attention.attention(q, k, v, queries, keys, heads, *(bias or [None]), dropped)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view(out.shape))]


def check_attention(**kind):
    inputs, *rest = problem(**kind)
    doubles = [x.double().requires_grad_() for x in inputs]
    out = truth(doubles, *rest)
    slope = torch.linspace(-1, 1, out.numel()).view(out.shape).double()
    ours = found(inputs, *rest)
    for mine, right in zip(ours, [out, *torch.autograd.grad(out, doubles, slope)], strict=True):
        torch.testing.assert_close(
            mine.double(), right, rtol=1e-5, atol=2e-6 * right.detach().abs().max().item() + 1e-6
        )
    same_on_threads(ours, inputs, *rest)


def same_on_threads(ours, *problem):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, ours, found(*problem)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_and_gradients(kind):
    check_attention(**kind)


@pytest.fixture
def medium():
    """torch's setting that lets products of fp32 matrices round to bf16."""
    if not library.cpu().rounds:
        pytest.skip("this CPU has no instructions for products in bf16")
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_numbers_rounded_to_bf16(medium, kind):
    """Of q, k and v that need no rounding, so that what is left is that of weights and slopes to 8 bits: sums, softmax,
    masks and the bias are those of fp32."""
    (q, k, v, *bias), *rest = problem(**kind)
    inputs = [*(x.bfloat16().float() for x in (q, k, v)), *bias]
    ours = found(inputs, *rest)
    doubles = [x.double().requires_grad_() for x in inputs]
    out = truth(doubles, *rest)
    slope = torch.linspace(-1, 1, out.numel()).view(out.shape).double()
    for mine, right in zip(ours, [out, *torch.autograd.grad(out, doubles, slope)], strict=True):
        error = mine.double() - right.detach()
        assert 1e-4 < error.norm() / right.norm() < 7e-3
        assert error.abs().max() < 0.02 * right.abs().max()
    same_on_threads(ours, inputs, *rest)


def test_backward_rounds_as_forward_did(medium):
    inputs, queries, keys, heads, dropped = problem(**KINDS["causal"])
    wanted = found(inputs, queries, keys, heads, dropped)
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention.attention(q, k, v, queries, keys, heads, None, dropped)
    torch.set_float32_matmul_precision("highest")
    ours = torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape))
    assert all(map(torch.equal, ours, wanted[1:]))


@pytest.mark.parametrize("kind", ["window", "near"])
def test_a_window_in_rectangles_is_the_same(kind):
    """Of sequences of several lengths, one of which is padded by more than the window."""
    lengths = [7, 30, 29, 1, 44]
    (q, k, v), queries, keys, heads, _ = problem(**{**KINDS[kind], "lengths": lengths, "window": 3, "p": 0.0})
    wanted = found([q, k, v], queries, keys, heads, attention.NOTHING_DROPPED)
    packed = Packed.from_cu_seqlens(queries, None, sum(lengths))
    pairs, mask = packed.sequences.bucket_pairs(None), Mask(heads.causal, heads.window)
    assert any(pair[1].keep is not None for pair in pairs)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    options = AttentionOptions(heads.heads, heads.kv_heads, heads.scale, mask, NO_DROPOUT)
    slope = torch.linspace(-1, 1, q.numel()).view(q.shape)
    for way in (bucketed_attention(*inputs, pairs, options), bucketed_sdpa(*inputs, pairs, options)):
        ours = [way.detach(), *torch.autograd.grad(way, inputs, slope)]
        for mine, right in zip(ours, wanted, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_sequences_without_keys_give_zeros():
    (q, k, v), queries, _, heads, dropped = problem([3, 2], 8)
    out, dq, dk, dv = found([q, k[:4], v[:4]], queries, offsets([0, 4]), heads, dropped)
    assert not out[:3].any() and not dq[:3].any() and out[3:].all() and dk.any() and dv.any()


@pytest.mark.parametrize("kind", ["causal bias", "cross"])
def test_gradients_of_some_inputs_that_are_not_contiguous(kind):
    inputs, *rest = problem(**KINDS[kind])
    _, *wanted = found(inputs, *rest)
    for i, right in enumerate(wanted):
        some = [x.t().contiguous().t().requires_grad_(i == j) for j, x in enumerate(inputs)]
        out = attention.attention(*some[:3], *rest[:3], *(some[3:] or [None]), rest[3])
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape).t().contiguous().t()
        assert torch.equal(torch.autograd.grad(out, some[i], slope)[0], right)


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_a_window_as_large_as_a_number_can_be_is_none(kind):
    inputs, queries, keys, heads, dropped = problem(**KINDS[kind])
    wide = found(inputs, queries, keys, heads._replace(window=2**63 - 1), dropped)
    assert all(map(torch.equal, wide, found(inputs, queries, keys, heads, dropped)))


@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_and_those_beyond_fp32(causal):
    """One key takes all where scores are far apart; where all are less than any number there is no softmax."""
    (q, k, v), *rest = problem([3, 40], 8, causal=causal)
    q[3:] *= 1e30
    q[:3], k[:3] = 1e20, -1e20
    out = found([q, k, v], *rest)[0]
    wanted = truth([q.double(), k.double(), v.double()], *rest)
    torch.testing.assert_close(out[3:].double(), wanted[3:], rtol=1e-5, atol=1e-6)
    assert out[:3].isnan().all()


def test_a_number_that_is_none_stays_in_its_sequence():
    (q, k, v), *rest = problem([3, 40], 8, causal=True)
    k[1, 0] = torch.nan
    out = found([q, k, v], *rest)[0]
    assert out[1].isnan().any() and not out[0].isnan().any() and not out[3:].isnan().any()


@pytest.mark.parametrize("p", [0.999995, 1.0])
def test_all_weights_dropped(p):
    """So near to 1 that none of 16 bits are above."""
    inputs, *rest, dropped = problem([3, 40], 8, bias=True)
    inputs = [x.requires_grad_() for x in inputs]
    (q, k, v, bias), (queries, keys, heads) = inputs, rest
    out = attention.attention(q, k, v, queries, keys, heads, bias, dropped._replace(p=p))
    assert not out.any() and not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))
    (q, k, v, bias), queries, _, heads, dropped = problem([3, 2], 8, bias=True)
    between = torch.zeros(4, 2)
    out = attention.attention_by_segments(q, k, v, queries, heads, RULES, bias, between, dropped._replace(p=p))
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize("which", ("q", "bias", "cu_queries", "tokens"))
def test_what_backward_needs_may_not_have_changed(which):
    """Weights are worked out again from it."""
    inputs, queries, keys, heads, dropped = problem([5, 8], 8, bias=True, p=0.2)
    queries = queries.contiguous()
    leaf = inputs[1].requires_grad_()
    q, _, v, bias = inputs
    out = attention.attention(q, leaf, v, queries, keys, heads, bias, dropped)
    {"q": q, "bias": bias, "cu_queries": queries, "tokens": dropped.tokens}[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("serves", [True, False])
def test_a_second_derivative_is_refused_and_not_wrong(monkeypatch, serves):
    """In both ways that a CPU has; the gradient depends on weights that are not in the graph."""
    monkeypatch.setattr(attention, "serves", lambda *_: serves)
    x = torch.randn(5, 8, requires_grad=True)
    packed = Packed.from_cu_seqlens(torch.tensor([0, 2, 5], dtype=torch.int32), None, 5)
    out = packed_attention(x, x, x, packed, 2).sum()
    with pytest.raises(RuntimeError, match="Attention has no second derivative"):
        torch.autograd.grad(out, x, create_graph=True)
    assert torch.autograd.grad(out, x)[0].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"queries": torch.tensor([0, 9], dtype=torch.int32)}, "cu_queries must rise from 0 to 5"),
        ({"queries": torch.tensor([0, 4, 3, 5], dtype=torch.int32)}, "cu_queries must not fall"),
        ({"keys": torch.tensor([0, 2, 3, 5], dtype=torch.int32)}, "of 2 and 3 sequences"),
        ({"keys": torch.tensor([[0, 5]])}, "cu_keys must be contiguous int32 offsets"),
        ({"heads": Heads(3, 3, 1.0)}, "are no 3 heads of 3 kv_heads"),
        ({"heads": Heads(4, 3, 1.0)}, "are no 4 heads of 3 kv_heads"),
        ({"keys": torch.tensor([0, 3, 5], dtype=torch.int32), "heads": Heads(4, 4, 1.0, True)}, "of a sequence to its"),
        (
            {"keys": torch.tensor([0, 3, 5], dtype=torch.int32), "heads": Heads(4, 4, 1.0, window=2)},
            "and that of a window",
        ),
        ({"bias": torch.zeros(4, 3)}, r"bias must be \(4, 5 or more\)"),
        ({"k": torch.zeros(5, 32, dtype=torch.float64)}, "k must be 160 fp32 numbers"),
        ({"dropped": Dropped(0.1, 1, 1, torch.zeros(4, dtype=torch.int64))}, "tokens must be 5 contiguous int64"),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_refused(change, message):
    (q, k, v), queries, keys, heads, dropped = problem([2, 3], 8)
    given = dict(q=q, k=k, v=v, cu_queries=queries, cu_keys=keys, heads=heads, bias=None, dropped=dropped)
    given |= {{"queries": "cu_queries", "keys": "cu_keys"}.get(name, name): x for name, x in change.items()}
    with pytest.raises(RuntimeError, match=message):
        attention.attention(**given)


# Of a sequence of tokens of two kinds, and one of one kind.
RULES = Rules(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 1, 0, 0], [0, 3, -1, 4, 0], [2, 1])))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rules": RULES._replace(kinds=RULES.kinds[:4])}, "kinds must be 5 contiguous int32"),
        ({"rules": RULES._replace(kinds=RULES.kinds.long())}, "kinds must be 5 contiguous int32"),
        ({"rules": RULES._replace(kinds=RULES.kinds + 1)}, "kinds: 2 of sequence 0, which has 2"),
        ({"rules": RULES._replace(kinds=RULES.kinds - 1)}, "kinds: -1 of sequence 0, which has 2"),
        ({"rules": RULES._replace(rules=RULES.rules[1:])}, "rules must be 5 contiguous int32"),
        ({"rules": RULES._replace(rules=RULES.rules * 2)}, "rules: place 3 of segment_bias, which has 2"),
        ({"rules": RULES._replace(counts=RULES.counts[:1])}, "counts must be 2 contiguous int32"),
        ({"rules": RULES._replace(counts=-RULES.counts)}, "counts must not be negative"),
        ({"segment_bias": None}, "rules: place 1 of segment_bias, which has 0"),
        ({"segment_bias": torch.zeros(3, 1)}, r"segment_bias must be \(4, ...\), beside a bias"),
        ({"bias": None}, r"segment_bias must be \(4, ...\), beside a bias"),
        ({"heads": Heads(4, 4, 1.0, True)}, "of each sequence to itself, and not causal"),
    ],
)
def test_segments_that_do_not_fit_their_rules_are_refused(change, message):
    (q, k, v, bias), queries, _, heads, dropped = problem([3, 2], 8, bias=True)
    given = dict(q=q, k=k, v=v, cu_seqlens=queries, heads=heads, rules=RULES, bias=bias, segment_bias=torch.zeros(4, 2))
    assert attention.attention_by_segments(**given).isfinite().all()
    given |= change
    with pytest.raises(RuntimeError, match=message):
        attention.attention_by_segments(**given, dropped=dropped)

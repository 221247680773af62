"""The compiled attention whose scores know distances: against float64, by torch's rectangles, and on bad input."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine.ops import library
from engine.ops.attention import Dropped, Heads
from engine.ops.distance_attention import attention_by_distances
from engine.ops.philox import random_bits
from modelcenter.layers import packed_attention
from modelcenter.layers.distances import Distances
from modelcenter.layers.packing import Packed

KEY, SITE, FIRST_HEAD, HEADS = -(2**61) + 7, 3, 2, 3
# Lengths around the widths of vectors, tiles, panels and blocks of queries; so many that a head's are cut into parts.
KINDS = {
    "both": dict(lengths=[1, 31, 32, 33, 7, 17, 16, 0, 48, 15], width=64),
    "dropped": dict(lengths=[5, 0, 130, 16], width=8, p=0.3),
    "of keys": dict(lengths=[70, 33, 100], width=33, tables="keys"),
    "of queries": dict(lengths=[70, 33, 101], width=3, tables="queries", p=0.1),
    "neither": dict(lengths=[40, 9], width=16, tables=""),
    "causal": dict(lengths=[40, 1, 129, 64, 17], width=20, causal=True),
    "window": dict(lengths=[70, 33, 150, 1], width=8, window=11),
    "many": dict(lengths=[3, 1, 8, 2] * 20, width=4),
}


@pytest.fixture(autouse=True)
def loaded(compiled):
    """Then torch.empty gives NaNs, which the operator must have written over."""
    assert library.cpu().loaded
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(lengths, width, tables="keys queries", p=0.0, **mask):
    torch.manual_seed(0)
    offsets, rows = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    q, k, v = torch.randn(3, rows, HEADS * width)
    keys, queries = (
        torch.randn(2 * max(lengths) + 5, HEADS * width) if name in tables else None for name in ("keys", "queries")
    )
    dropped = Dropped(p, KEY, SITE, torch.randint(0, 2**45, (rows,)), FIRST_HEAD)
    return [q, k, v, keys, queries], offsets, Heads(HEADS, HEADS, 0.3, **mask), dropped


def truth(inputs, offsets, heads, dropped):
    by_head = [None if x is None else x.unflatten(1, (HEADS, -1)).transpose(0, 1) for x in inputs]
    *_, of_keys, of_queries = by_head
    outs = []
    for a, b in zip(offsets[:-1], offsets[1:], strict=True):
        q, k, v = (x[:, a:b] for x in by_head[:3])
        apart = torch.arange(b - a) - torch.arange(b - a)[:, None]  # key minus query
        scores = q @ k.transpose(1, 2)
        if of_keys is not None:
            scores = scores + (q[:, :, None] * of_keys[:, of_keys.shape[1] // 2 + apart]).sum(-1)
        if of_queries is not None:
            scores = scores + (k[:, None] * of_queries[:, of_queries.shape[1] // 2 + apart]).sum(-1)
        hidden = (apart.abs() >= (heads.window or b - a)) | (heads.causal & (apart > 0))
        weights = (heads.scale * scores).masked_fill(hidden, -torch.inf).softmax(-1)
        if dropped.p and b > a:
            least = round(dropped.p * 65536)
            numbers = dropped.tokens[a:b] + (FIRST_HEAD + torch.arange(HEADS)[:, None] << 20)
            kept = random_bits(numbers.flatten(), 0, int(b - a), KEY, SITE) >= least
            weights = weights * kept.view(weights.shape) * 65536 / (65536 - least)
        outs.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(outs)


def slope_of(out):
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)


def found(inputs, offsets, heads, dropped, call=attention_by_distances):
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out = call(*inputs[:3], offsets, heads, *inputs[3:], dropped)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None], slope_of(out))]


def near(ours, wanted):
    for mine, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=2e-6 * right.abs().max().item() + 1e-6)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_and_gradients(kind):
    """And their bits are the same on any number of threads."""
    inputs, *rest = problem(**kind)
    doubles = [None if x is None else x.double() for x in inputs]
    ours = found(inputs, *rest)
    wanted = found(doubles, *rest, call=lambda q, k, v, o, h, x, y, d: truth([q, k, v, x, y], o, h, d))
    near(ours, wanted)
    threads = torch.get_num_threads()
    for count in (2, 3):
        torch.set_num_threads(count)
        try:
            assert all(map(torch.equal, ours, found(inputs, *rest)))
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["both", "of keys", "of queries"])
def test_the_reference_is_torchs_rectangles(monkeypatch, kind):
    """What runs without the compiled operators."""
    (q, k, v, *tables), offsets, heads, dropped = problem(**{**KINDS[kind], "p": 0.0})
    ours = found([q, k, v, *tables], offsets, heads, dropped)
    monkeypatch.setattr(packed_attention.attention, "serves", lambda *_: False)
    packed = Packed.from_cu_seqlens(offsets, None, q.shape[0])

    def by_rectangles(q, k, v, offsets, heads, keys, queries, dropped):
        tables = (None if x is None else x.unflatten(1, (HEADS, -1)).transpose(0, 1) for x in (keys, queries))
        distances = Distances(*tables)
        return packed_attention.packed_attention(q, k, v, packed, HEADS, scale=heads.scale, distances=distances)

    near(ours, [x.double() for x in found([q, k, v, *tables], offsets, heads, dropped, by_rectangles)])


def test_a_layer_takes_it_and_keeps_no_square(monkeypatch):
    (q, k, v, *tables), offsets, heads, _ = problem([90, 5, 100], 8)
    packed, sizes = Packed.from_cu_seqlens(offsets, None, q.shape[0]), []
    monkeypatch.setattr(packed_attention, "bucketed_attention", None)
    monkeypatch.setattr(packed_attention.attention, "serves", lambda *_: True)
    distances = Distances(*(x.unflatten(1, (HEADS, -1)).transpose(0, 1) for x in tables))
    assert all(
        x is not None and x.data_ptr() == table.data_ptr() for x, table in zip(distances.rows(), tables, strict=True)
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda x: x):
        ours = packed_attention.packed_attention(
            q.requires_grad_(), k, v, packed, HEADS, scale=heads.scale, distances=distances
        )
    assert torch.equal(ours, attention_by_distances(q, k, v, offsets, heads, *tables))
    assert sizes and max(sizes) <= max(q.numel(), tables[0].numel())


@pytest.mark.parametrize("kind", ["both", "of queries"])
def test_gradients_of_some_inputs_that_are_not_contiguous(kind):
    inputs, *rest = problem(**KINDS[kind])
    _, *wanted = found(inputs, *rest)
    present = [i for i, x in enumerate(inputs) if x is not None]
    for i, right in zip(present, wanted, strict=True):
        some = [x if x is None else x.t().contiguous().t().requires_grad_(i == j) for j, x in enumerate(inputs)]
        offsets, heads, dropped = rest
        out = attention_by_distances(*some[:3], offsets, heads, *some[3:], dropped)
        slope = slope_of(out).t().contiguous().t()
        assert torch.equal(torch.autograd.grad(out, some[i], slope)[0], right)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens(lengths):
    """Then tables have gradients of zeros."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    empty, tables = torch.zeros(3, 0, HEADS * 8), torch.randn(2, 3, HEADS * 8)
    out, *grads = found([*empty, *tables], offsets, Heads(HEADS, HEADS, 1.0), Dropped())
    assert out.shape == (0, HEADS * 8) and not any(x.any() for x in grads)


def test_distances_that_no_sequence_has_get_no_gradient():
    inputs, *rest = problem([9, 5], 8)
    for table in found(inputs, *rest)[4:]:
        middle = table.shape[0] // 2
        assert table[middle - 8 : middle + 9].all(1).all() and table.count_nonzero() == 17 * table.shape[1]


@pytest.mark.parametrize("kind", ["both", "of keys"])
def test_recomputed_in_backward(kind):
    """What recomputation has made again is given out once."""
    inputs, offsets, heads, dropped = problem(**KINDS[kind])

    def again(*given):
        return checkpoint(attention_by_distances, *given, use_reentrant=False)

    wanted = found(inputs, offsets, heads, dropped)
    assert all(map(torch.equal, found(inputs, offsets, heads, dropped, again), wanted))


def test_all_weights_dropped():
    inputs, offsets, heads, dropped = problem([3, 40], 8)
    assert not any(x.any() for x in found(inputs, offsets, heads, dropped._replace(p=0.999995)))


def test_what_backward_needs_may_not_have_changed_and_no_second_derivative():
    (q, k, v, *tables), offsets, heads, dropped = problem([5, 8], 8)
    keys = tables[0]
    out = attention_by_distances(q.requires_grad_(), k, v, offsets, heads, *tables, dropped).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out, q, create_graph=True)
    keys.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"keys": torch.zeros(8, 24)}, r"of_keys must be \(9 or more, 24\)"),
        ({"keys": torch.zeros(9, 23)}, r"of_keys must be \(9 or more, 24\)"),
        ({"queries": torch.zeros(9, 24, dtype=torch.float64)}, "of_queries must be 216 fp32 numbers"),
        ({"queries": torch.zeros(11, 24)}, "of_queries is of 11 distances, and of_keys of 9"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_queries must rise from 0 to 8"),
        ({"k": torch.zeros(7, 24), "v": torch.zeros(7, 24)}, "cu_keys must rise from 0 to 7"),
        ({"k": torch.zeros(8, 12)}, "k must be 192 fp32 numbers"),
        ({"heads": Heads(5, 5, 1.0)}, "are no 5 heads"),
        ({"dropped": Dropped(0.1, 1, 1, torch.zeros(4, dtype=torch.int64))}, "tokens must be 8 contiguous int64"),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_refused(change, message):
    q, k, v = torch.zeros(3, 8, 24)
    given = dict(q=q, k=k, v=v, cu_seqlens=torch.tensor([0, 3, 8]), heads=Heads(HEADS, HEADS, 1.0))
    given |= dict(keys=torch.zeros(9, 24), queries=torch.zeros(9, 24))
    assert attention_by_distances(**given).isfinite().all()
    with pytest.raises(RuntimeError, match=message):
        attention_by_distances(**(given | change))

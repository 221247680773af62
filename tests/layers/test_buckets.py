"""Rectangles of sequences: which share one, and on which device."""

import random

import pytest
import torch

from modelcenter.layers import sequences as sequences_module
from modelcenter.layers.bucketed_sdpa import _from_rectangles, _to_rectangles
from modelcenter.layers.buckets import Bucket, length_multiple, make_bucket, make_places, plan_buckets, plan_pairs
from modelcenter.layers.host_copies import to_device
from modelcenter.layers.packing import Packed
from modelcenter.layers.sequences import Sequences

CPU, META = torch.device("cpu"), torch.device("meta")


def test_plan_covers_each_sequence_once():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([0, 1, 2, rng.randint(1, 9), rng.randint(1, 600)]) for _ in range(rng.randint(0, 120))]
        groups = plan_buckets(lengths)
        flat = sorted(i for group in groups for i in group)
        assert flat == [i for i, n in enumerate(lengths) if n]
        keys = [rng.randint(0, 300) for _ in lengths]
        flat = sorted(i for group in plan_pairs(lengths, keys) for i in group)
        assert flat == [i for i, n in enumerate(lengths) if n]


def test_plan_separates_short_from_long_only_when_it_pays():
    assert len(plan_buckets([5, 6, 7, 8])) == 1
    assert len(plan_buckets([4] * 64 + [512] * 4)) == 2
    assert plan_buckets([]) == []


def test_a_gpu_is_given_fewer_and_larger_rectangles():
    """There launching the kernels of one costs more than the padding that it would save."""
    cu = torch.tensor([0, 5, 20, 60, 160, 360], dtype=torch.int32)
    found = {}
    for device in ("cpu", "meta"):
        ends = to_device(cu, torch.device(device))
        packed, memory = (Packed.from_cu_seqlens(ends, None, 360).sequences for _ in range(2))
        found[device] = len(packed.bucket_pairs()), len(packed.bucket_pairs(memory))
    assert min(found["cpu"]) > 2 and found["meta"] == (1, 1)


def test_lengths_on_a_gpu_are_multiples_where_there_is_padding():
    """Masks of such rectangles need no copy; where all are of one length they stay as they are."""
    lengths, starts = [5, 20, 20], [0, 5, 25, 45]
    assert length_multiple(CPU) == 1 and length_multiple(META) == 16
    for numbers, on_cpu, on_gpu in (([0, 1], 20, 32), ([0], 5, 5), ([1, 2], 20, 20)):
        assert make_bucket(numbers, lengths, starts, CPU).length == on_cpu
        bucket = make_bucket(numbers, lengths, starts, META)
        assert bucket.length == on_gpu
        assert bucket.keep is None or bucket.keep.shape == (len(numbers), on_gpu)
    # A plan counts by these lengths: at the first cost the padding of 5 to 20 is worth a rectangle, of 16 to 32 not.
    cost = 20 * 28 - 5 * 13 - 1
    assert len(plan_buckets([5, 20], cost)) == 2 and len(plan_buckets([5, 15], 1, 16)) == 1
    assert len(plan_pairs([5, 20], [5, 20], 100)) == 2 and len(plan_pairs([5, 15], [3, 16], 1, 16)) == 1


def test_a_small_ragged_batch_is_given_two_rectangles_on_a_gpu():
    """32 texts of up to 416 tokens: one rectangle would be five times as much work, a third one saves 0.2 ms."""
    draws = torch.randn(32, generator=torch.Generator().manual_seed(1)).mul(0.7).exp().mul(128)
    cu = torch.tensor([0, *(int(n) for n in draws)]).cumsum(0).int()
    packed = Packed.from_cu_seqlens(to_device(cu, META), None, int(cu[-1])).sequences
    assert [(b.n, b.length) for b, _ in packed.bucket_pairs()] == [(6, 416), (26, 160)]


LENGTHS = {
    "ragged": ([3, 20, 1, 7, 7, 31, 2, 19], 0), "with empty": ([0, 3, 0, 30, 1, 0], 0), "equal": ([5, 5, 5], 0),
    "equal but apart": ([4, 45, 4, 45], 0), "sorted": ([3, 3, 9, 9], 0), "with a dummy": ([3, 20, 0, 6], 5),
    "one": ([1], 0),
}  # fmt: skip


def sides(name: str, cost: int, memory: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequences, Sequences | None]:
    """Sequences of these lengths, and others for a memory."""
    monkeypatch.setattr(sequences_module, "bucket_cost", lambda device: cost)
    lengths, dummy = LENGTHS[name]
    ends = torch.tensor([0, *lengths, *([dummy] if dummy else [])]).cumsum(0).int()
    found = Sequences(ends, max(lengths), [*lengths, *([dummy] if dummy else [])], dummy)
    # One has keys, but no query.
    return found, Sequences.of_lengths([1 + (5 * n) % 23 for n in lengths], CPU) if memory else None


@pytest.mark.parametrize("cost", [1, 500, 10**6])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_each_token_has_one_place_in_the_rectangles(name, memory, cost, monkeypatch):
    """Each token stands where the rectangles have it, once."""
    queries, of_keys = sides(name, cost, memory, monkeypatch)
    pairs = queries.bucket_pairs(of_keys)
    for side, (places, tokens) in enumerate(
        zip(queries.places(of_keys), (queries.starts()[-1], (of_keys or queries).starts()[-1]), strict=True)
    ):
        buckets: list[Bucket] = [pair[side] for pair in pairs]
        index = torch.cat([torch.arange(b.start, b.stop) if b.index is None else b.index for b in buckets])
        keep = torch.cat([torch.ones(b.n * b.length).bool() if b.keep is None else b.keep.flatten() for b in buckets])
        assert places.shapes == [(b.n, b.length) for b in buckets]
        if places.index is None:
            assert index.tolist() == list(range(tokens)) and keep.all()
            continue
        assert torch.equal(places.index, index)
        padding = set() if places.padding is None else set(places.padding.tolist())
        outside = set() if places.outside is None else set(places.outside.tolist())
        assert padding == {i for i, real in enumerate(keep.tolist()) if not real}
        assert outside == set(range(tokens)) - set(index.tolist())
        assert all(index[places.at[i]] == i and keep[places.at[i]] for i in range(tokens) if i not in outside)
    assert queries.places(of_keys) is queries.places(of_keys)


@pytest.mark.parametrize("cost", [1, 500, 10**6])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_what_goes_to_rectangles_and_back_is_that_of_an_index(name, memory, grouped, cost, monkeypatch):
    """And so are its gradients, where nothing comes from padding; float64, without rounding."""
    torch.manual_seed(0)
    queries, of_keys = sides(name, cost, memory, monkeypatch)
    pairs, places = queries.bucket_pairs(of_keys), queries.places(of_keys)
    keys, kv_heads = (of_keys or queries).starts()[-1], 2 if grouped else 4
    shapes = (queries.starts()[-1], 4 * 3), (keys, kv_heads * 3), (keys, kv_heads * 3)
    for frozen in (None, 0, 1, 2):
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        needed = [x.requires_grad_() for i, x in enumerate(inputs) if i != frozen]
        every = list(zip(inputs, (places[0], places[1], places[1]), (4, kv_heads, kv_heads), strict=True))
        found = _to_rectangles(every)
        wanted, weights = [], []
        for (x, _, heads), side in zip(every, (0, 1, 1), strict=True):
            some = []
            for pair in pairs:
                b = pair[side]
                index = torch.arange(b.start, b.stop) if b.index is None else b.index
                some.append(x.index_select(0, index).view(b.n, b.length, heads, 3).transpose(1, 2))
                keep = torch.ones(b.n, b.length) if b.keep is None else b.keep
                weights.append(torch.randn_like(some[-1]) * keep[:, None, :, None])
            wanted.append(some)
        flat = [[y for some in one for y in some] for one in (found, wanted)]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True)) and len(flat[0]) == 3 * len(pairs)
        grads = [torch.autograd.grad([y for y in ys if y.requires_grad], needed, [
            w for w, y in zip(weights, ys, strict=True) if y.requires_grad
        ]) for ys in flat]  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    inside = [torch.randn(b.n, 4, b.length, 3, dtype=torch.float64, requires_grad=True) for b, _ in pairs]
    back, rows = _from_rectangles(inside, places[0]), [x.transpose(1, 2).flatten(0, 1).flatten(1) for x in inside]
    tokens = [b.index if b.real is None else b.real for b, _ in pairs]
    tokens = [torch.arange(b.start, b.stop) if i is None else i for i, (b, _) in zip(tokens, pairs, strict=True)]
    rows = [x if b.tokens is None else x[b.tokens] for x, (b, _) in zip(rows, pairs, strict=True)]
    expected = torch.zeros(shapes[0], dtype=torch.float64).index_copy(0, torch.cat(tokens), torch.cat(rows))
    grad = torch.randn_like(expected)
    assert torch.equal(back, expected)
    both = [torch.autograd.grad(y, inside, grad) for y in (back, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_rectangles_have_a_second_derivative():
    queries = Sequences.of_lengths([3, 1, 2], CPU)
    places = make_places([b for b, _ in queries.bucket_pairs()], 6, CPU)
    real = torch.ones(3 * 3, dtype=torch.float64).index_fill(0, places.padding, 0.0).view(3, 1, 3, 1)

    def there_and_back(x):
        (rectangle,), = _to_rectangles([(x, places, 2)])  # fmt: skip
        return _from_rectangles([(rectangle * real) ** 3], places)

    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(there_and_back, x) and torch.autograd.gradgradcheck(there_and_back, x)

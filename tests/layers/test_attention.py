"""Packed attention against torch's scaled_dot_product_attention on each sequence alone, in float64."""

import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.ops import attention, dropout_key, dropout_rows, library
from modelcenter.layers import bucketed_attention, buckets, capped_attention, sequences
from modelcenter.layers import packed_attention as packed_attention_module
from modelcenter.layers.attention_options import AttentionOptions
from modelcenter.layers.bucketed_sdpa import bucketed_sdpa
from modelcenter.layers.distances import Distances
from modelcenter.layers.dropout import AttentionDropout, DrawingModule
from modelcenter.layers.mask import Mask, aligned_rectangles
from modelcenter.layers.packed_attention import packed_attention
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import RelatedSegments, Segments, rules_of

LENGTHS = {
    "one": [9],
    "equal": [5, 5, 5],
    "ragged": [3, 20, 1, 7, 7, 31, 2, 19],
    "equal but apart": [4, 45, 4, 45],
    "with empty": [0, 3, 0, 30, 1],
    "none": [],
}


@pytest.fixture(params=LENGTHS.values(), ids=LENGTHS)
def packed(request):
    ends = torch.tensor([0, *request.param]).cumsum(0).int()
    return Packed.from_cu_seqlens(ends, None, int(ends[-1]))


KINDS = (
    "plain",
    "causal",
    "window",
    "bias",
    "causal bias",
    "grouped",
    "cross",
    "segments with bias",
    "distances",
    "distances of keys",
    "capped window, grouped",
    "capped cross",
    "capped segments with bias",
)
KINDS_OF_SEGMENTS = 3


class Problem:
    """Random q, k, v and bias of one kind of attention, and its truth in float64, sequence by sequence."""

    def __init__(self, packed, kind, heads=4):
        lengths = packed.sequences.host_lengths()
        self.packed, self.kind, self.heads = packed, kind, heads
        self.kv_heads = 2 if "grouped" in kind else heads
        self.cap = 0.9 if "capped" in kind else None  # of scores of about 1
        keys = [n and 1 + (5 * n) % 23 for n in lengths] if "cross" in kind else lengths
        self.memory = Packed.from_cu_seqlens(torch.tensor([0, *keys]).cumsum(0).int(), None, sum(keys)).sequences
        self.causal, self.window = (
            "window" in kind or kind in ("causal", "causal bias", "grouped"),
            5 if "window" in kind else None,
        )
        self.inputs = [torch.randn(packed.num_tokens, heads * 3)]
        self.inputs += [torch.randn(sum(keys), self.kv_heads * 3) for _ in range(2)]
        if "bias" in kind:
            self.inputs.append(torch.randn(2 * packed.max_seqlen + 3, heads).t())  # its heads lie apart
        if "distances" in kind:
            tables = 1 if "keys" in kind else 2
            self.inputs += [torch.randn(heads, 2 * packed.max_seqlen + 3, 3) for _ in range(tables)]
        self.segments = None
        if "segments" in kind:
            context, span, segment = (torch.randint(0, n, (packed.num_tokens,)) for n in (2, 2, KINDS_OF_SEGMENTS))
            self.segments = Segments.of(context, span, segment)
            self.inputs.append(torch.randn(heads, KINDS_OF_SEGMENTS, KINDS_OF_SEGMENTS))
        self.scale = 0.7

    def ours(self, path, *inputs):
        """path: "compiled", the operator for a sequence; "buckets", rectangles; "tiles", as if these were large;
        "sdpa", these by torch; "sdpa in blocks", as if these were large, where scores are capped; "wide", as many and
        as long as on a GPU; "shared", with masks made once for many layers, for the first heads and the others apart.
        """
        q, k, v, *bias = inputs
        distances = self.distances(bias)
        mask = Mask(self.causal, self.window, *(bias[:1] if distances is None else ()))
        if self.segments is not None:
            mask = Mask(bias=bias[0], segments=self.segments, segment_bias=bias[1])
        memory = self.memory if "cross" in self.kind else None
        if path in ("sdpa", "sdpa in blocks", "wide"):
            options = AttentionOptions(self.heads, self.kv_heads, self.scale, mask, distances=distances, cap=self.cap)
            return bucketed_sdpa(q, k, v, self.packed.sequences.bucket_pairs(memory), options)
        if path == "shared":
            mask, found = replace(mask, rectangles=aligned_rectangles(self.packed.sequences, mask)), []
            for first, some in ((0, 1), (1, self.heads - 1)):
                own = [x.unflatten(1, (self.heads, -1))[:, first : first + some].flatten(1) for x in (q, k, v)]
                part = mask.of_heads(first, some)
                pairs = self.packed.sequences.bucket_pairs()
                options = AttentionOptions(some, some, self.scale, part, cap=self.cap)
                found.append(bucketed_sdpa(*own, pairs, options, part.rectangles))
            return torch.cat(found, 1)
        more = {"kv_heads": self.kv_heads, "mask": mask, "memory": memory, "scale": self.scale}
        return packed_attention(q, k, v, self.packed, self.heads, **more, distances=distances, cap=self.cap)

    def distances(self, tables):
        """Of the tables that stand behind q, k and v; None: of a kind without."""
        if "distances" not in self.kind:
            return None
        return Distances(None, tables[0]) if "keys" in self.kind else Distances(*tables)

    def truth(self, q, k, v, bias=None, segment_bias=None):
        of_keys, of_queries = self.distances((bias, segment_bias)) or (None, None)
        outs, at = [], 0
        for s, n in enumerate(self.packed.sequences.host_lengths()):
            a, b = self.memory.cu_seqlens[s : s + 2].tolist()
            one = q[at : at + n].unflatten(1, (self.heads, 3)).transpose(0, 1)
            keys, values = (
                x[a:b]
                .unflatten(1, (self.kv_heads, 3))
                .transpose(0, 1)
                .repeat_interleave(self.heads // self.kv_heads, 0)
                for x in (k, v)
            )
            scores = self.scale * one @ keys.transpose(1, 2)
            for rows, table in ((one[:, :, None], of_keys), (keys[:, None], of_queries)):
                if table is not None:
                    apart = torch.arange(n) - torch.arange(n)[:, None]
                    scores = scores + self.scale * (rows * table[:, table.shape[1] // 2 + apart]).sum(3)
            scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
            if "distances" in self.kind:
                bias = segment_bias = None
            for i in range(n):
                for j in range(b - a):
                    segments = (
                        [None, None] if segment_bias is None else [self.segments.values[at + x, 2] for x in (i, j)]
                    )
                    if segments[0] != segments[1]:
                        scores[:, i, j] = scores[:, i, j] + segment_bias[:, segments[0], segments[1]]
                    elif bias is not None:
                        scores[:, i, j] = scores[:, i, j] + bias[:, bias.shape[1] // 2 + j - i]
            hidden = (
                torch.tensor(
                    [[self.causal and (j > i or i - j >= (self.window or n)) for j in range(b - a)] for i in range(n)]
                )
                .view(n, b - a)
                .bool()
            )
            if self.segments is not None:
                context, span, _ = self.segments.values[at : at + n].unbind(-1)
                for i in range(n):
                    for j in range(n):
                        seen = context[j] == 1 or (context[i] == 0 and j <= i)
                        hidden[i, j] = not (seen and span[i] == span[j])
            outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1))
            at += n
        return torch.cat(outs) if outs else q


def choose(monkeypatch, path):
    """The compiled operator is taken where it is, fast or not; nothing else is in its place where it is asked for."""
    monkeypatch.setattr(attention, "serves", lambda q, *_: path == "compiled" and q.numel() > 0)
    if path == "tiles":  # of one query up to a few, the last of them smaller
        monkeypatch.setattr(bucketed_attention, "_KEPT", 40)
        monkeypatch.setattr(bucketed_attention, "_TILE", 300)
    if path == "sdpa in blocks":
        monkeypatch.setattr(capped_attention, "_KEPT", 300)
    if path in ("wide", "shared"):
        monkeypatch.setattr(buckets, "length_multiple", lambda device: 16)
        monkeypatch.setattr(sequences, "length_multiple", lambda device: 16)
        monkeypatch.setattr(sequences, "bucket_cost", lambda device: 600)
    if path == "compiled" and not library.cpu().loaded:
        pytest.skip("the compiled operators are not built")


def is_product(path, kind):
    """Whether what both change is tested with others: only a few kinds have rectangles as a GPU's of their own, and
    caps are before all that segments and an encoder change."""
    if path == "wide" and not ("bias" in kind or kind == "distances"):
        return True
    return path in ("tiles", "sdpa", "wide", "shared") and kind in ("capped cross", "capped segments with bias")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        pytest.param(path, kind, marks=pytest.mark.full if is_product(path, kind) else ())
        for path in ("compiled", "buckets", "tiles", "sdpa", "sdpa in blocks", "wide", "shared")
        for kind in KINDS
        if (path != "shared" or "bias" in kind) and (path != "sdpa in blocks" or "capped" in kind)
    ],
)
def test_values_and_gradients(monkeypatch, packed, path, kind):
    torch.manual_seed(0)
    choose(monkeypatch, path)
    problem = Problem(packed, kind)
    inputs = [x.requires_grad_() for x in problem.inputs]
    out = problem.ours(path, *inputs)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, grad)
    if not packed.num_tokens:
        return
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    wanted = problem.truth(*doubles)
    theirs = torch.autograd.grad(wanted, doubles, grad.double())
    assert out.shape == wanted.shape and (out - wanted).abs().max() < 1e-5
    for a, t in zip(ours, theirs, strict=True):
        assert (a - t).abs().max() < 2e-5


def test_no_square_of_a_long_sequence_is_kept(monkeypatch):
    choose(monkeypatch, "tiles")
    packed, sizes = Packed.from_cu_seqlens(torch.tensor([0, 100]), None, 100), []
    problem = Problem(packed, "segments with bias", heads=1)
    inputs = [x.requires_grad_() for x in problem.inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda x: x):
        problem.ours("tiles", *inputs)
    assert sizes and max(sizes) < 100 * 100


def test_a_row_without_memory_is_refused(packed):
    if packed.num_tokens:
        nothing = Packed.from_cu_seqlens(torch.zeros_like(packed.cu_seqlens), None, 0).sequences
        with pytest.raises(ValueError, match="no token for the encoder"):
            packed.sequences.bucket_pairs(nothing)


def test_one_row_without_memory_is_refused():
    rows = Packed.from_cu_seqlens(torch.tensor([0, 2, 5], dtype=torch.int32), None, 5)
    memory = Packed.from_cu_seqlens(torch.tensor([0, 4, 4], dtype=torch.int32), None, 4)
    with pytest.raises(ValueError, match="no token for the encoder"):
        rows.attend_to(torch.randn(4, 8), memory)
    assert rows.memory is None


def test_dropout_backward_is_the_derivative_of_its_forward(packed):
    """With the masks held fixed by the seed, finite differences agree with the gradient."""
    if not packed.num_tokens:
        return
    heads = 2
    q, k, v = (torch.randn(packed.num_tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    direction, grad = torch.randn_like(q), torch.randn_like(q)

    def run(step: float) -> torch.Tensor:
        torch.manual_seed(5)
        moved = [x + step * direction for x in (q, k, v)]
        return (packed_attention(*moved, packed, heads, AttentionDropout(0.3)) * grad).sum()

    analytic = sum((g * direction).sum() for g in torch.autograd.grad(run(0.0), (q, k, v)))
    numeric = (run(1e-6) - run(-1e-6)) / 2e-6
    assert abs(analytic - numeric) < 1e-5 * max(1, abs(numeric))


def test_distances_of_some_heads_and_from_a_place_on():
    """As ranks that share the heads, or the queries of a sequence, ask for them."""
    q, k = torch.randn(1, 4, 9, 3), torch.randn(1, 4, 9, 3)
    whole = Distances(torch.randn(4, 21, 3), torch.randn(4, 21, 3))
    scores = whole.scores(q, k)
    assert torch.allclose(whole.of_heads(1, 2).scores(q[:, 1:3], k[:, 1:3]), scores[:, 1:3], atol=1e-6)
    assert torch.allclose(whole.scores(q[:, :, 5:8], k, first=5), scores[:, :, 5:8], atol=1e-6)


@pytest.mark.parametrize("drawn", ["by the batch", "by the generator", "by given numbers"])
def test_both_ways_on_a_cpu_drop_the_same_weights(monkeypatch, drawn):
    packed = Packed.from_cu_seqlens(torch.tensor([0, 40, 53]), None, 53)
    with dropout_key(3, 4), dropout_rows(torch.tensor([7, 2])):
        draws = packed.with_draws().draws if drawn == "by the batch" else None
    tokens = torch.randint(0, 2**40, (53,)) if drawn == "by given numbers" else None
    (layer := DrawingModule()).site = 11
    drop = AttentionDropout(0.3, draws, layer, 2, tokens)
    inputs, found = [torch.randn(53, 32, requires_grad=True) for _ in range(3)], []
    for path in ("compiled", "buckets", "tiles"):
        choose(monkeypatch, path)
        torch.manual_seed(1)
        out = packed_attention(*inputs, packed, 4, drop, mask=Mask(True))
        found.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for one, other, third in zip(*found, strict=True):
        assert (one - third).abs().max() < 1e-5 and (other - third).abs().max() < 1e-5


def test_all_ways_drop_the_same_weights_of_capped_scores(monkeypatch):
    """Also in blocks of some queries, as a rank has them that shares a sequence with others."""
    packed, (layer := DrawingModule()).site = Packed.from_cu_seqlens(torch.tensor([0, 53]), None, 53), 11
    drop = AttentionDropout(0.3, None, layer, 2, torch.randint(0, 2**40, (53,)))
    inputs, found = [torch.randn(53, 32, requires_grad=True) for _ in range(3)], []
    for path in ("compiled", "buckets", "tiles", "sdpa", "sdpa in blocks"):
        choose(monkeypatch, path)
        torch.manual_seed(1)
        if "sdpa" in path:
            options = AttentionOptions(4, 4, 8**-0.5, Mask(True, 9), drop, cap=0.8)
            out = bucketed_sdpa(*inputs, packed.sequences.bucket_pairs(), options)
        else:
            out = packed_attention(*inputs, packed, 4, drop, mask=Mask(True, 9), cap=0.8)
        found.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for ways in zip(*found, strict=True):
        assert max((way - ways[0]).abs().max() for way in ways[1:]) < 1e-5


def test_no_square_of_a_long_sequence_with_capped_scores_is_kept(monkeypatch):
    """In blocks, which see no more keys than their window has."""
    choose(monkeypatch, "sdpa in blocks")
    packed, sizes, wide = Packed.from_cu_seqlens(torch.tensor([0, 100]), None, 100), [], []
    attend = capped_attention._attend
    monkeypatch.setattr(capped_attention, "_attend", lambda q, k, *rest: wide.append(k.shape[2]) or attend(q, k, *rest))
    inputs = [torch.randn(100, 8, requires_grad=True) for _ in range(3)]
    for mask, most in ((Mask(), 100), (Mask(True), 100), (Mask(True, 7), 9), (Mask(window=7), 15)):
        options, wide[:] = AttentionOptions(1, 1, 0.3, mask, cap=2.0), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            bucketed_sdpa(*inputs, packed.sequences.bucket_pairs(), options)
        assert len(wide) == 34 and max(wide) == most and (sum(wide) < 1800) == mask.causal | (most < 100)
    assert sizes and max(sizes) < 100 * 100


def segments_of(kind, tokens):
    """Segments in runs, as of documents behind one another; of each token by itself; in samples that are related."""
    torch.manual_seed(2)
    context, span, segment, sample = (torch.randint(0, n, (tokens,)) for n in (2, 2, 3, 3))
    if kind != "scattered":
        place = torch.arange(tokens)
        context, span, segment, sample = place % 60 < 25, place // 60, place // 11 % 3, place // 20 % 3
    if kind != "related":
        return Segments.of(context, span, segment), (3, 3)
    sizes, begins = torch.tensor([1, 3, 2])[sample], torch.tensor([0, 1, 10])[sample]
    values = torch.stack((context.long(), span, segment % sizes, sample, sizes, begins), -1)
    return RelatedSegments(values, torch.randint(0, 5, (14,))), (4,)


@pytest.mark.parametrize("kind", ["in runs", "scattered", "related"])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_both_ways_on_a_cpu_attend_by_segments(monkeypatch, kind, dropped):
    packed = Packed.from_cu_seqlens(torch.tensor([0, 130, 130, 143, 230]), None, 230)
    segments, kinds = segments_of(kind, 230)
    inputs = [torch.randn(230, 24), *torch.randn(2, 230, 12), torch.randn(261, 4).t(), torch.randn(4, *kinds)]
    inputs, found = [x.requires_grad_() for x in inputs], []
    for path in ("compiled", "tiles"):
        choose(monkeypatch, path)
        torch.manual_seed(1)
        mask = Mask(bias=inputs[3], segments=segments, segment_bias=inputs[4])
        out = packed_attention(*inputs[:3], packed, 4, AttentionDropout(dropped), kv_heads=2, mask=mask)
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape)
        found.append([out, *torch.autograd.grad(out, inputs, slope, retain_graph=True)])
        assert torch.equal(torch.autograd.grad(out, inputs[4], slope)[0], found[-1][-1])  # alone
    assert found[0][0].grad_fn.name().startswith("AttentionBySegments")
    for ours, wanted in zip(*found, strict=True):
        assert (ours - wanted).abs().max() < 3e-5 * max(1.0, wanted.abs().max())


def test_segments_of_as_many_kinds_as_tokens_are_left_to_rectangles():
    tokens = torch.arange(300)
    segments, ends = Segments.of(tokens < 0, 0 * tokens, tokens), torch.tensor([0, 300])
    assert rules_of(segments, ends, 300) is None and rules_of(segments[:64], torch.tensor([0, 64]), 64) is not None


def test_rules_of_segments_are_worked_out_once_for_all_layers(monkeypatch):
    choose(monkeypatch, "compiled")
    packed, calls = Packed.from_cu_seqlens(torch.tensor([0, 30, 50]), None, 50), []
    monkeypatch.setattr(packed_attention_module, "rules_of", lambda *given: calls.append(1) or rules_of(*given))
    x, masks = torch.randn(50, 12), [Mask(segments=segments_of("in runs", 50)[0]) for _ in range(2)]
    first, again, other = (packed_attention(x, x, x, packed, 4, mask=mask) for mask in (masks[0], masks[0], masks[1]))
    assert len(calls) == 2 and torch.equal(first, again) and torch.equal(first, other)  # others ask for their own


def test_dropout_keeps_the_mean():
    packed = Packed.from_cu_seqlens(torch.tensor([0, 6, 14], dtype=torch.int32), None, 14)
    q, k, v = (torch.randn(14, 8) for _ in range(3))
    wanted = packed_attention(q, k, v, packed, 2)
    mean = sum(packed_attention(q, k, v, packed, 2, AttentionDropout(0.2)) for _ in range(3000)) / 3000
    assert (mean - wanted).abs().max() < 0.06


def test_capped_scores_are_left_to_rectangles_where_there_is_flash_attention(monkeypatch):
    def refuse(*_):
        raise AssertionError("it has no cap")

    packed, x = Packed.from_cu_seqlens(torch.tensor([0, 64, 128]), None, 128), torch.randn(128, 16)
    wanted = packed_attention(x, x, x, packed, 2, cap=0.5)
    monkeypatch.setattr(packed_attention_module, "_has_flash", lambda *_: True)
    for name in ("_varlen", "_of_equal_lengths"):
        monkeypatch.setattr(packed_attention_module, name, refuse)
    assert torch.equal(packed_attention(x, x, x, packed, 2, cap=0.5), wanted)
    with pytest.raises(AssertionError, match="it has no cap"):
        packed_attention(x, x, x, packed, 2)


@pytest.mark.parametrize("kind", ["plain", "causal", "window", "grouped", "cross"])
def test_what_flash_attention_is_asked_for_on_a_gpu(packed, kind, monkeypatch):
    """The operator there and its gradient take the call; its arguments mean what the truth computes."""
    problem, calls = Problem(packed, kind), []
    operator = torch.ops.aten._flash_attention_forward
    on_meta = [x.to("meta", torch.bfloat16).requires_grad_() for x in problem.inputs]
    memory = problem.memory if kind == "cross" else packed.sequences
    mask = Mask(problem.causal, problem.window)
    options = AttentionOptions(problem.heads, problem.kv_heads, 0.7, mask, AttentionDropout(0.1))

    def noted(*args, **kwargs):
        calls.append((args, kwargs))
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted)
    out = packed_attention_module._varlen(*on_meta, packed.sequences, memory, options)
    grads = torch.autograd.grad(out.sum(), on_meta)
    assert [g.shape for g in grads] == [x.shape for x in on_meta] and out.shape == on_meta[0].shape
    ((_, k, _, cu_q, cu_k, longest_q, longest_k, dropout, causal, debug), named) = calls[0]
    assert k.shape[1:] == (problem.kv_heads, 3) and (dropout, debug, named["scale"]) == (0.1, False, 0.7)
    assert cu_q is packed.cu_seqlens and cu_k is memory.cu_seqlens
    # At one query a sequence the kernel swaps the heads of a group with them, as if no sequence were empty.
    assert (longest_q, longest_k) == (max(2, packed.max_seqlen), memory.max_seqlen)
    left, right = named["window_size_left"], named["window_size_right"]
    assert causal == (problem.causal and problem.window is None)
    for i in range(9):
        for j in range(9):
            seen = (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
            assert seen == (not problem.causal or (j <= i and i - j < (problem.window or 9)))


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_flash_attention_across_where_one_side_has_a_dummy_sequence(side, monkeypatch):
    """Under context and sequence parallelism each side is filled up by itself, and the kernel wants as many of both."""
    calls = []
    monkeypatch.setattr(
        torch.ops.aten, "_flash_attention_forward", lambda q, k, v, *offsets, **_: calls.append(offsets[:2]) or (q,)
    )
    split = types.SimpleNamespace(padding=lambda tokens: 2, local=lambda x: x, size=1)
    sides = [Packed.from_cu_seqlens(torch.tensor([0, 3, n], dtype=torch.int32), None, n) for n in (8, 6)]
    at = side == "keys"
    sides[at] = sides[at].split_over(split)
    inputs = [torch.randn(sides[i > 0].num_tokens, 8) for i in range(3)]
    packed_attention_module._varlen(*inputs, sides[0].sequences, sides[1].sequences, AttentionOptions(2, 2, 1.0))
    wanted = [[0, 3, 8, 10], [0, 3, 6, 6]] if side == "queries" else [[0, 3, 8, 8], [0, 3, 6, 8]]
    assert [x.tolist() for x in calls[0]] == wanted and {x.dtype for x in calls[0]} == {torch.int32}


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "cross"])
def test_sequences_of_one_length_on_a_gpu(kind, monkeypatch):
    """One rectangle, in which torch chooses the kernel: the numbers of the CPU's way, and the call of a GPU's."""
    lengths = (64, 128) if kind == "cross" else (64, 64)
    both = [Packed.from_cu_seqlens(torch.tensor([0, n, 2 * n, 3 * n], dtype=torch.int32), n, 3 * n) for n in lengths]
    kv_heads, mask, memory = 2 if kind == "grouped" else 4, Mask(kind == "causal"), both[1].sequences
    more = {"kv_heads": kv_heads, "mask": mask, "scale": 0.7, "memory": memory if kind == "cross" else None}
    inputs = [torch.randn(x.num_tokens, n * 8).requires_grad_() for x, n in zip(both, (4, kv_heads), strict=True)]
    inputs.append(torch.randn_like(inputs[1]).requires_grad_())
    wanted, calls = packed_attention(*inputs, both[0], 4, **more), []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(packed_attention_module, "_has_flash", lambda *_: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or sdpa(*a, **k))
    ours, grad = packed_attention(*inputs, both[0], 4, **more), torch.randn_like(wanted)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    for pair in zip(*(torch.autograd.grad(x, inputs, grad) for x in (ours, wanted)), strict=True):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)
    call = calls[0]
    assert (call["is_causal"], call["enable_gqa"]) == (kind == "causal", kind == "grouped")
    packed_attention(*inputs, both[0], 4, AttentionDropout(0.3), **more)
    assert [call["dropout_p"] for call in calls] == [0.0, 0.3]


@pytest.mark.parametrize(
    ("ends", "longest", "mask", "way"),
    [
        ((0, 64, 128), 64, Mask(), "equal"),
        ((0, 64), 64, Mask(True), "equal"),
        ((0, 64, 128), 64, Mask(True, 5), "any"),  # a window
        ((0, 64, 64), 64, Mask(), "any"),  # an empty sequence
        ((0, 64, 127), 64, Mask(), "any"),
        ((0, 64, 128), 128, Mask(), "any"),  # nobody has the longest length
        ((0, 65, 130), 65, Mask(), "any"),  # a length that will not come again soon
    ],
)
def test_which_sequences_on_a_gpu_are_a_rectangle(ends, longest, mask, way, monkeypatch):
    packed = Packed.from_cu_seqlens(torch.tensor(ends, dtype=torch.int32).to("meta"), longest, ends[-1])
    monkeypatch.setattr(packed_attention_module, "_has_flash", lambda *_: True)
    for name in ("_of_equal_lengths", "_varlen"):
        monkeypatch.setattr(packed_attention_module, name, lambda q, *_, name=name: name)
    q, k, v = (torch.empty(ends[-1], 32, device="meta") for _ in range(3))
    assert packed_attention(q, k, v, packed, 4, mask=mask) == {"equal": "_of_equal_lengths", "any": "_varlen"}[way]


def test_a_gpu_attends_without_cudnn_beside_a_bias(monkeypatch):
    """cuDNN's kernel, which torch prefers there, has no gradient for it."""
    packed, allowed = Packed.from_cu_seqlens(torch.tensor([0, 3, 8], dtype=torch.int32), None, 8), []
    sdpa = F.scaled_dot_product_attention

    def noted(*args, **kwargs):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    packed.sequences.cu_seqlens = packed.cu_seqlens.to("meta")  # its lengths are known
    q, k, v, bias = (torch.randn(*size, device="meta", requires_grad=True) for size in [(8, 8)] * 3 + [(2, 15)])
    out = packed_attention(q, k, v, packed, 2, mask=Mask(bias=bias))
    assert all(g.is_meta for g in torch.autograd.grad(out.sum(), (q, k, v, bias)))
    assert allowed == [False] and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("rectangle", [(9, 9, 0), (2, 9, 7), (5, 6, 1), (1, 1, 8), (0, 4, 0), (4, 0, 2)])
def test_the_bias_of_a_rectangle(rectangle):
    """It and its gradient are those of an index, which a GPU would have to sort for its gradient."""
    queries, keys, first = rectangle
    bias = torch.randn(3, 2 * 9 - 1, dtype=torch.float64, requires_grad=True)
    index = bias.shape[1] // 2 + torch.arange(keys) - torch.arange(first, first + queries)[:, None]
    ours, wanted = Mask(bias=bias).additive(*rectangle), bias[:, index]
    grad = torch.randn_like(wanted)
    assert torch.equal(ours, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, bias, grad) for x in (ours, wanted)))
    assert "Index" not in type(ours.grad_fn).__name__


def test_which_heads_flash_attention_takes(monkeypatch):
    majors = {0: 9, 1: 7}
    properties = lambda device: types.SimpleNamespace(major=majors[device.index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    has, new, old = packed_attention_module._has_flash, torch.device("cuda", 0), torch.device("cuda", 1)
    assert has(new, torch.bfloat16, 64, 0.1) and has(new, torch.float16, 256, 0.0)
    assert not has(old, torch.float16, 64, 0.0) and not has(torch.device("cpu"), torch.bfloat16, 64, 0.0)
    assert not has(new, torch.float32, 64, 0.0) and not has(new, torch.bfloat16, 12, 0.0)
    assert not has(new, torch.bfloat16, 264, 0.0) and not has(new, torch.bfloat16, 256, 0.1)
    assert has(new, torch.bfloat16, 192, 0.1) and not any(has(new, torch.bfloat16, n, 0.0) for n in (200, 224))

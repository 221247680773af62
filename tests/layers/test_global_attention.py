"""Attention in windows and to global tokens, against a dense softmax over both."""

from dataclasses import replace

import pytest
import torch

from engine.ops.dropout_masks import Draws
from modelcenter.layers import global_attention
from modelcenter.layers.dropout import AttentionDropout, name_sites
from modelcenter.layers.global_attention import GlobalAttention
from modelcenter.layers.global_tokens import GlobalTokens
from modelcenter.layers.packing import Packed

HEADS, DIM = 3, 8
LENGTHS = (150, 1, 5, 0, 70, 9)


def make(window, chosen, p=0.0, lengths=LENGTHS, width=HEADS * DIM):
    torch.manual_seed(0)
    layer = GlobalAttention(width, HEADS, p, window=window).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    name_sites(torch.nn.ModuleDict({"attn": layer}))
    ctx = Packed.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0).int(), None, sum(lengths))
    if p:
        tokens = torch.cat([torch.arange(n) + (i << 32) for i, n in enumerate(lengths)])
        ctx.draws = Draws(5, torch.arange(len(lengths)) << 32, tokens)
    ctx.globals = GlobalTokens(torch.tensor(chosen), ctx.sequences)
    return layer, ctx, torch.randn(sum(lengths), width, requires_grad=True)


def dense(layer, x, ctx):
    """The same from whole matrices of weights, one sequence at a time."""
    projections = layer.q, layer.k, layer.v, layer.q_global, layer.k_global, layer.v_global
    parts = [f(x).unflatten(1, (HEADS, -1)).transpose(0, 1) for f in projections]
    drops = [
        AttentionDropout(layer.dropout, ctx.draws, kind) for kind in (layer, layer.far_weights, layer.global_weights)
    ]

    def dropped(weights, drop, tokens):
        if not drop.p:
            return weights
        return drop.drop(weights, drop.key, drop.numbers(len(x), tokens, 1, HEADS))

    mixed, chosen = [], ctx.globals.tokens
    starts = ctx.sequences.starts()
    for start, stop in zip(starts, starts[1:], strict=False):
        q, k, v, q_global, k_global, v_global = (part[:, start:stop] for part in parts)
        here = chosen[(chosen >= start) & (chosen < stop)] - start
        place = torch.arange(stop - start)
        inside = (place[:, None] - place).abs() < layer.window
        seen = torch.cat([inside, ~inside[:, here]], 1)
        scores = q @ torch.cat([k, k[:, here]], 1).transpose(1, 2) / DIM**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        near, far = weights.split([stop - start, len(here)], -1)
        rows = slice(start, stop)
        out = dropped(near, drops[0], rows) @ v + dropped(far, drops[1], rows) @ v[:, here]
        weights = (q_global[:, here] @ k_global.transpose(1, 2) / DIM**0.5).softmax(-1)
        of_global = dropped(weights, drops[2], here + start) @ v_global
        mixed.append(out.index_copy(1, here, of_global).transpose(0, 1).flatten(1))
    return layer.out(torch.cat(mixed))


def check(layer, ctx, x, tolerance=1e-5):
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    named = dict(layer.named_parameters())
    found, wanted = (
        dict(zip(("out", "x", *named), (out, *torch.autograd.grad(out, [x, *named.values()], grad)), strict=True))
        for out in (layer(x, ctx), dense(layer, x, ctx))
    )
    for name, truth in wanted.items():
        of_keys = name in ("k.bias", "k_global.bias")  # whose gradient is zero, but for rounding
        scale = wanted["v.bias"] if of_keys else truth
        assert (found[name] - truth).abs().max() <= tolerance * scale.abs().max(), name


CHOSEN = {
    "first": [0, 150, 151, 156, 226],
    "many": [0, 1, 2, 3, 64, 65, 100, 149, 151, 190, 225],
    "in one sequence": [77],
    "all of one": [*range(156, 226)],
}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("window", [3, 40, 149, 300])
def test_equals_one_softmax(window, chosen, p):
    check(*make(window, CHOSEN[chosen], p))


@pytest.mark.parametrize(
    "window, chosen", [(3, "many"), (40, "first"), (40, "all of one"), (149, "first"), (80, "many")]
)
def test_without_the_compiled_operator(window, chosen, monkeypatch):
    monkeypatch.setattr(global_attention.attention, "serves", lambda *_: False)
    check(*make(window, CHOSEN[chosen]))


def test_blocks_of_global_scores(monkeypatch):
    """Few scores at once: the same."""
    monkeypatch.setattr(global_attention, "_FAR_SCORES", 20)
    check(*make(5, CHOSEN["many"], 0.2))


def test_extreme_scores():
    """Scores of global tokens far above and far below those of the window."""
    for factor in (5.0, 1000.0):
        layer, ctx, x = make(3, CHOSEN["first"])
        with torch.no_grad():
            x[ctx.globals.tokens] *= factor
        out = layer(x, ctx)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [x, *layer.parameters()]))
        torch.testing.assert_close(out, dense(layer, x, ctx), atol=1e-5 * factor, rtol=1e-4)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "in torch"])
@pytest.mark.parametrize("number", [2, 4, 5])
def test_dropout_does_not_depend_on_the_batch(number, compiled, monkeypatch):
    """Of a sequence that a window covers, of one with far global tokens, and of one that has none."""
    if not compiled:
        monkeypatch.setattr(global_attention.attention, "serves", lambda *_: False)
    layer, ctx, x = make(7, CHOSEN["many"], 0.4)
    starts, length = ctx.sequences.starts(), LENGTHS[number]
    start, stop = starts[number], starts[number + 1]
    alone = Packed.from_cu_seqlens(torch.tensor([0, length]).int(), length, length)
    alone.draws = Draws(5, ctx.draws.sequences[number : number + 1], ctx.draws.tokens[start:stop])
    own = [token - start for token in CHOSEN["many"] if start <= token < stop]
    alone.globals = GlobalTokens(torch.tensor(own, dtype=torch.int64), alone.sequences)
    whole = layer(x, ctx)
    torch.testing.assert_close(layer(x[start:stop], alone), whole[start:stop], atol=2e-5, rtol=1e-5)
    layer.eval()
    assert (layer(x, ctx) - whole)[start:stop].abs().max() > 0.1


class OtherHalf:
    """As a TokenSplit gives them to the second of two ranks: all tokens, and half of the heads."""

    size, rank = 2, 1

    def to_heads(self, x):
        return x[..., x.shape[2] // 2 :]

    def to_tokens(self, x):
        return x


def test_ranks_that_share_tokens():
    """Each has the dropout masks of its heads; heads that cannot be shared out are an error."""
    torch.manual_seed(0)
    layer, ctx, x = make(7, CHOSEN["many"], 0.4)
    split = replace(ctx, split=OtherHalf())
    with pytest.raises(ValueError, match="cp_size: got 2 with 3 attention heads .* use a divisor"):
        layer(x, split)
    layer = GlobalAttention(4 * DIM, 4, 0.4, window=7).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    name_sites(torch.nn.ModuleDict({"attn": layer}))
    layer.out, x = torch.nn.Identity(), torch.randn(sum(LENGTHS), 4 * DIM)
    torch.testing.assert_close(layer(x, split), layer(x, ctx)[:, 2 * DIM :], atol=2e-5, rtol=1e-5)


def test_sixteen_bits():
    layer, ctx, x = make(5, CHOSEN["many"])
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, ctx)
    torch.testing.assert_close(found.float(), layer(x, ctx), atol=0.3, rtol=0.05)
    assert layer.bfloat16()(x.bfloat16(), ctx).dtype == torch.bfloat16


def test_tokens_of_which_sequences_are_far():
    _, ctx, _ = make(10, [0, 155, 160, 226])
    chosen = ctx.globals
    assert chosen.sequences.lengths == [1, 0, 1, 0, 1, 1] and chosen.sequences.cu_seqlens.tolist() == [
        0,
        1,
        1,
        2,
        2,
        3,
        4,
    ]
    assert [(s.start, s.stop, s.tokens.tolist()) for s in chosen.far(10)] == [(0, 150, [0]), (156, 226, [160])]
    assert [s.start for s in chosen.far(66)] == [0] and not chosen.far(150)
    assert [s.start for s in chosen.far(65)] == [0, 156]
    tokens, near = chosen.near(10)
    assert tokens.tolist() == [*range(150, 156), *range(226, 235)] and near.lengths == [1, 5, 0, 9]

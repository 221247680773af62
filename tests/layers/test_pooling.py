"""Poolings of hidden states, each text by itself as a plain formula, whatever the batch is and whoever holds it."""

import pytest
import torch

import engine
from engine.parallel import context, functional, mesh
from modelcenter.embedding_settings import POOLINGS, EmbeddingSettings
from modelcenter.layers.heads.embedding import DenseLayers
from modelcenter.layers.packing import Packed
from modelcenter.layers.pooling import Pooling

LENGTHS, LEFT_OUT, WIDTH = [4, 1, 6, 3], [2, 0, 5, 1], 5


def plain(states, pooling, left_out):
    """(width,) of the states (tokens, width) of one text."""
    kept, weights = states[left_out:], torch.arange(left_out + 1, len(states) + 1, dtype=states.dtype)[:, None]
    return {
        "mean": kept.mean(0),
        "cls": kept[0],
        "last": kept[-1],
        "max": kept.amax(0),
        "mean_sqrt_len": kept.sum(0) / len(kept) ** 0.5,
        "weighted_mean": (weights * kept).sum(0) / weights.sum(),
    }[pooling]


def states_of(lengths=LENGTHS, dtype=torch.float64):
    return torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype)


def packed(side, lengths=LENGTHS):
    """The same texts, packed or padded on a side. Places are counted in a text, wherever it stands in its row."""
    if side == "packed":
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        positions = torch.arange(sum(lengths))[None] + 7
        return Packed.from_cu_seqlens(ends, None, sum(lengths), positions)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return Packed.from_mask(tuple(mask.shape), mask.long(), torch.device("cpu"))


@pytest.mark.parametrize("side", ["packed", "left", "right"])
@pytest.mark.parametrize("left_out", [None, LEFT_OUT], ids=["whole", "without prompts"])
def test_each_text_is_pooled_by_itself(side, left_out):
    ctx = packed(side)
    x = states_of().requires_grad_()
    pooling = Pooling(ctx, None if left_out is None else torch.tensor(left_out))
    weights = torch.randn(len(LENGTHS), WIDTH, dtype=torch.float64)
    for name in POOLINGS:
        found = pooling.by(name, x)
        texts = zip(x.split(LENGTHS), left_out or [0] * len(LENGTHS), strict=True)
        expected = torch.stack([plain(text, name, count) for text, count in texts])
        rough = name == "mean" and left_out is None  # added up in fp32
        torch.testing.assert_close(found, expected, rtol=1e-6 if rough else 1e-12, atol=1e-6 if rough else 1e-12)
        gradients = [
            torch.autograd.grad((vectors * weights).sum(), x, retain_graph=True)[0] for vectors in (found, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
        tokens = pooling.tokens(name)
        assert (tokens is not None) == (name in ("cls", "last"))
        assert tokens is None or torch.equal(x[tokens], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_made_in_fp32(dtype):
    lengths = [700, 300]
    x = states_of(lengths, torch.float32).abs().to(dtype)
    for name in POOLINGS:
        found = Pooling(packed("packed", lengths)).by(name, x)
        assert found.dtype == dtype
        expected = torch.stack([plain(text.double(), name, 0) for text in x.split(lengths)])
        torch.testing.assert_close(found.double(), expected, rtol=4e-3 if dtype == torch.bfloat16 else 1e-5, atol=0)


def test_no_text_is_pooled_to_nothing():
    ctx, x = packed("packed", [0, 0]), torch.zeros(0, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match="row 0 of the batch has no token"):
        Pooling(ctx).by("max", x)
    none = Packed.from_cu_seqlens(torch.zeros(1, dtype=torch.int32), 0, 0)
    for name in POOLINGS:
        for left_out in (None, torch.zeros(0, dtype=torch.long)):
            found = Pooling(none, left_out).by(name, x)
            assert found.shape == (0, WIDTH)
            found.sum().backward()  # a rank without texts takes part


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ([2, 1, 5, 1], "prompt_lengths: row 1 has 1 for a text of 1 tokens, expected 0 to 0, so that some are left"),
        ([-1, 0, 0, 0], "row 0 has -1 for a text of 4 tokens, expected 0 to 3"),
        ([2, 0, 5], r"prompt_lengths: got shape \(3,\) of torch.int64, expected \(4,\) whole numbers"),
        ([2.0, 0.0, 5.0, 1.0], "of torch.float32, expected"),
    ],
)
def test_prompts_that_cannot_be(left_out, said):
    with pytest.raises(ValueError, match=said):
        Pooling(packed("packed"), torch.tensor(left_out))


def over_ranks():
    """The gradients of each pooling on 2 ranks, each with half of the tokens; a sequence lies on both."""
    engine.init_distributed(cp_size=2)
    split = context.TokenSplit(mesh.device_mesh())
    found = {}
    for left_out in (None, LEFT_OUT):
        whole = packed("packed", LENGTHS[:-1] + [2])  # 13 tokens, so that there is a dummy
        ctx = whole.split_over(split)
        x = split.local(torch.cat([states_of(LENGTHS[:-1] + [2]), torch.full((1, WIDTH), 9.0)])).requires_grad_()
        pooling = Pooling(ctx, None if left_out is None else torch.tensor(left_out))
        for name in POOLINGS:
            vectors = pooling.by(name, x)
            # As the engine: each rank has the loss of the whole batch, and gradients are averaged.
            (gradient,) = torch.autograd.grad((vectors * torch.arange(WIDTH)).sum(), x)
            every = functional._gather(gradient, split._group)[:-1] / 2
            found[name, left_out is None] = vectors.detach(), every
    return found


def test_ranks_that_share_the_tokens():
    lengths = LENGTHS[:-1] + [2]
    x = states_of(lengths).requires_grad_()
    for ours in engine.testing.run(over_ranks, 2, timeout=60):
        for (name, whole), (vectors, gradient) in ours.items():
            counts = [0] * len(lengths) if whole else LEFT_OUT
            expected = torch.stack([plain(text, name, n) for text, n in zip(x.split(lengths), counts, strict=True)])
            (expected_gradient,) = torch.autograd.grad((expected * torch.arange(WIDTH)).sum(), x)
            torch.testing.assert_close(vectors, expected.detach(), rtol=1e-6, atol=1e-6, msg=f"{name} {whole}")
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6, msg=f"{name} {whole}")


def test_dense_layers():
    """With each kind of residual, against torch's layers."""
    dense = [{"width": 7}, {"width": 7, "activation": "gelu", "residual": True}]
    dense += [{"width": 3, "activation": "identity", "bias": False, "residual": True}]
    layers = DenseLayers(WIDTH, EmbeddingSettings(dense=dense).dense_by_number)
    torch.manual_seed(0)
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter)
    assert {name: tuple(p.shape) for name, p in layers.named_parameters()} == {
        "2.linear.weight": (7, WIDTH), "2.linear.bias": (7,), "3.linear.weight": (7, 7), "3.linear.bias": (7,),
        "4.linear.weight": (3, 7), "4.residual.weight": (3, 7),
    }  # fmt: skip
    x = torch.randn(4, WIDTH)
    p = dict(layers.named_parameters())
    first = torch.tanh(x @ p["2.linear.weight"].T + p["2.linear.bias"])
    second = first + torch.nn.functional.gelu(first @ p["3.linear.weight"].T + p["3.linear.bias"])
    expected = second @ p["4.linear.weight"].T + second @ p["4.residual.weight"].T
    torch.testing.assert_close(layers(x), expected)

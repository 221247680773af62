"""Classes drawn from a head's softmax: those of the inverse distribution function in fp64, however it is cut."""

import numpy as np
import pytest
import torch
from torch import nn

import engine
from engine.loss import DRAW_BITS, sample_classes
from engine.loss.sampling import _first_beyond
from engine.parallel import tensor

LAST = 2**DRAW_BITS - 1


def problem(vocab, rows):
    rng = torch.Generator().manual_seed(vocab)
    hidden, weight, bias = (torch.randn(*s, generator=rng) for s in ((rows, 6), (vocab, 6), (vocab,)))
    return hidden, weight, bias, torch.randint(0, LAST + 1, (rows,), generator=rng)


def wanted(hidden, weight, bias, draws, cap=None):
    """In fp64, class by class."""
    logits = (hidden @ weight.T + bias).double().numpy()
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    masses = np.exp(logits - logits.max(1, keepdims=True))
    ends = masses.cumsum(1) / masses.sum(1, keepdims=True)
    return [int((row <= draw / 2.0**DRAW_BITS).sum()) for row, draw in zip(ends, draws.tolist(), strict=True)]


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 1000])
def test_the_inverse_of_the_distribution_function(vocab, monkeypatch):
    """Of every row, in several chunks, across and at the ends of the blocks that are added up first."""
    monkeypatch.setattr(engine.loss.chunks, "_CHUNK_BYTES", 4 * 16 * 1008)
    hidden, weight, bias, draws = problem(vocab, 300)
    hidden.requires_grad_()
    found = sample_classes(hidden, weight, bias, draws)
    assert found.dtype == torch.int64 and not found.requires_grad
    assert found.tolist() == wanted(hidden.detach(), weight, bias, draws)
    assert vocab == 1 or len(set(found.tolist())) > 1
    capped = sample_classes(hidden, weight, bias, draws, cap=0.8)
    assert capped.tolist() == wanted(hidden.detach(), weight, bias, draws, 0.8)
    assert vocab == 1 or not torch.equal(capped, found)
    if vocab == 3:
        shares = torch.softmax(hidden.detach() @ weight.T + bias, -1).mean(0)
        many = [sample_classes(hidden, weight, bias, torch.randint(0, LAST + 1, (300,))) for _ in range(100)]
        assert torch.allclose(torch.cat(many).bincount(minlength=3) / 30_000, shares, atol=0.02)


def test_the_least_and_the_greatest_draw():
    """Each is a class that can be: none whose probability is 0, and none behind the last."""
    hidden, weight, bias, _ = problem(600, 50)
    bias[:290], bias[311:] = -1e30, -1e30
    least, most = (sample_classes(hidden, weight, bias, torch.full((50,), n)) for n in (0, LAST))
    assert (least == 290).all() and ((most > 290) & (most <= 310)).all() and (most == 310).sum() > 40
    one = torch.full((600,), -1e30)
    one[299] = 0.0
    for draw in (0, 1, LAST // 2, LAST - 1, LAST):
        assert sample_classes(hidden[:1], weight * 0, one, torch.tensor([draw])).item() == 299


def test_no_rows_and_logits_that_are_not_finite():
    """A diverged step is skipped later; until then the tokens must be some of the vocabulary."""
    hidden, weight, bias, draws = problem(300, 9)
    assert sample_classes(hidden[:0], weight, bias, draws[:0]).shape == (0,)
    for value in (float("nan"), float("inf")):
        hidden[3:5] = value
        found = sample_classes(hidden, weight, bias, draws)
        assert ((found >= 0) & (found < 300)).all()
        kept = [i for i in range(9) if i not in (3, 4)]
        assert found[kept].tolist() == wanted(hidden[kept], weight, bias, draws[kept])


def on_ranks(vocab):
    engine.init_distributed(tp_size=engine.world_size())
    hidden, weight, bias, draws = problem(vocab, 200)
    table = nn.Linear(6, vocab)
    with torch.no_grad():
        table.weight.copy_(weight)
        table.bias.copy_(bias)
    tensor.parallelize(table, engine.parallel.mesh.device_mesh()["tp"], {"weight": "vocab", "bias": "vocab"})
    return sample_classes(hidden, table.weight, table.bias, draws)


@pytest.mark.parametrize("vocab", [3, 1000])  # over 4 ranks: 1 1 1 0, 250 each
def test_a_vocabulary_that_ranks_share(four, vocab):
    hidden, weight, bias, draws = problem(vocab, 200)
    for found in four.run(on_ranks, vocab):
        assert found.tolist() == wanted(hidden, weight, bias, draws)


def test_a_target_that_rounding_puts_at_the_end():
    """Sums of sums and running sums may differ in their last bits: the class is then the last that can be."""
    ends = torch.tensor([[0.0, 0.25, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    for beyond in (0.0, 1e-15, 1.0):
        at, rest = _first_beyond(ends, ends[:, -1:] + beyond)
        assert at.tolist() == [[2], [0]] and (rest < torch.tensor([[0.75], [0.5]])).all()

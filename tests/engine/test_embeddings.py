"""Looked-up embeddings: torch's, but for gradients in 16 bits on a CPU, and of a table that is a head too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.loss import linear_cross_entropy, linear_log_probs
from engine.ops import Embedding, embedding, embeddings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("padding, ids_dtype", [(None, torch.int64), (3, torch.int64), (-1, torch.int32)])
def test_gradients_of_rows_that_many_tokens_look_up(dtype, padding, ids_dtype):
    """torch's own stop growing at 256 of the first row in bf16."""
    table = Embedding(5, 3, padding_idx=padding).to(dtype)
    ids = torch.tensor([0] * 4096 + [1, 4, 4, 3], dtype=ids_dtype).view(4, -1)
    out = table(ids)
    assert torch.equal(out, table.weight[ids.long()])
    out.backward(torch.ones_like(out))
    counts = [4096.0, 1.0, 0.0, 1.0, 2.0]
    if padding is not None:
        counts[padding] = 0.0
    assert table.weight.grad.dtype == dtype and table.weight.grad[:, 0].tolist() == counts


def test_what_is_not_trained_takes_torchs_way():
    weight = torch.randn(5, 3).bfloat16()
    assert embedding(torch.tensor([2]), weight).grad_fn is None
    weight.requires_grad_()
    with torch.no_grad():
        assert embedding(torch.tensor([2]), weight).grad_fn is None
    with pytest.raises(IndexError):
        embedding(torch.tensor([5]), weight)
    table = nn.Embedding(5, 3)
    mine = Embedding(5, 3)
    mine.load_state_dict(table.state_dict())
    assert torch.equal(mine(torch.tensor([1, 4])), table(torch.tensor([1, 4])))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_what_is_not_known_is_refused(option):
    with pytest.raises(ValueError, match=f"does not support {next(iter(option))}"):
        Embedding(5, 3, **option)


ROWS, WIDTH = 11, 4
IDS, LABELS = torch.tensor([[1, 7, 7], [3, 0, 7]]), torch.tensor([2, -100, 7, 1, 5, 0])


class Tied(nn.Module):
    """A head that is the table of two look-ups, as a T5's; `torchs`: by torch's operators alone."""

    def __init__(self, torchs=False, padding=None, head="cross-entropy"):
        super().__init__()
        torch.manual_seed(0)
        self.table = Embedding(ROWS, WIDTH, padding_idx=padding)
        self.torchs, self.head = torchs, head

    def forward(self, second=IDS):
        find = self.table if not self.torchs else lambda ids: F.embedding(ids, self.weight, self.table.padding_idx)
        x = (find(IDS).tanh() + find(second).sin()).flatten(0, 1)
        if self.head == "log-probs":
            if not self.torchs:
                return linear_log_probs(x, self.weight, None, LABELS.clamp(min=0)).square().sum()
            return torch.log_softmax(x @ self.weight.t(), 1).gather(1, LABELS.clamp(min=0)[:, None]).square().sum()
        if not self.torchs:
            return linear_cross_entropy(x, self.weight, None, LABELS, 5)
        return F.cross_entropy(x @ self.weight.t(), LABELS)

    @property
    def weight(self):
        return self.table.weight


def trained(**options):
    """A tied model after its first backward, from which on its table is known to be a head's too."""
    model = Tied(**options)
    model().backward()
    model.zero_grad()
    return model


@pytest.fixture
def additions(monkeypatch):
    """Where the sums are to which look-ups have added their rows."""
    found, add = [], embeddings._GivenGradient._add
    monkeypatch.setattr(embeddings._GivenGradient, "_add", lambda self, g: found.append(g.data_ptr()) or add(self, g))
    return found


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("head", ["cross-entropy", "log-probs"])
def test_a_head_that_is_the_table(head, padding, additions):
    model, peer = (Tied(torchs, padding, head) for torchs in (False, True))
    for microbatch in range(1, 4):
        model().backward()
        peer().backward()
        torch.testing.assert_close(model.weight.grad, peer.weight.grad)
        assert len(additions) == microbatch - 1, "the first look-up did not know of a head"
        assert not model.weight._backward_hooks
    model.zero_grad()
    model().backward()
    assert model.weight.grad.data_ptr() == additions[-1], "copied"


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_graph_that_is_kept_gives_its_gradient_twice(recomputed, additions):
    model = trained()
    total = checkpoint(model, use_reentrant=False) if recomputed else model()
    total.backward(retain_graph=True)
    first = model.weight.grad.clone()
    total.backward()
    assert torch.equal(model.weight.grad, 2 * first) and len(additions) == 2
    (asked,) = torch.autograd.grad(model(), model.weight)
    assert torch.equal(asked, first)


def test_a_hook_sees_the_whole_gradient(additions):
    model = trained()
    model().backward()
    wanted, seen = model.weight.grad, []
    model.zero_grad()
    model.weight.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    additions.clear()
    model().backward()
    assert torch.equal(seen[0], wanted) and torch.equal(model.weight.grad, 2 * wanted) and not additions


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


def test_passes_that_do_not_reach_the_table_leave_nothing(additions):
    model = trained()
    model().backward()
    wanted = model.weight.grad.clone()
    model.zero_grad()
    bias = torch.zeros(ROWS, requires_grad=True)  # all that is asked for, though the look-ups are gone through

    found = model.table(IDS).flatten(0, 1)
    torch.autograd.grad(linear_cross_entropy(found, model.weight, bias, LABELS, 5), [found, bias])
    assert not model.weight._backward_hooks

    early = Raises.apply(model.table(IDS))  # whose look-up is not reached, after the second's
    total = linear_cross_entropy((early + model.table(IDS)).flatten(0, 1), model.weight, None, LABELS, 5)
    with pytest.raises(ArithmeticError):
        total.backward()
    model.zero_grad()
    model().backward()
    assert torch.equal(model.weight.grad, wanted)


def test_a_look_up_in_a_pass_without_the_head(additions):
    model = trained()
    model().backward()
    head = model.weight.grad.clone()
    additions.clear()
    model.table(IDS).sum().backward()
    rows = torch.bincount(IDS.flatten(), minlength=ROWS).float()[:, None]
    torch.testing.assert_close(model.weight.grad, head + rows)
    assert not additions

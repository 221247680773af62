"""Muon and Adafactor against torch's, in little memory, also of matrices that ranks cut along both dimensions."""

import pytest
import torch
from optimizer_toys import torchs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.optim import Adafactor, Muon, adafactor


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(adjust, nesterov):
    torch.manual_seed(0)
    starts = [torch.randn(12, 30), torch.randn(30, 12), torch.randn(7, 7)]
    ours, theirs = ([nn.Parameter(x.clone()) for x in starts] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    mine = Muon(ours, adjust_lr=adjust, **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **settings)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step(), reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"eps": (1e-4, 1e-2), "d": 2.0, "lr": 0.5},
        {"eps": (4.0, 1e-2)},  # above most gradients
        {"beta2_decay": -0.3},
    ],
    ids=["default", "decay", "eps", "large eps", "decay of the moments"],
)
def test_adafactor_is_torchs(settings):
    shapes = ((5, 7), (9,), (2, 3, 4), (1, 6), (8, 1), ())
    ours, mine = torchs(lambda p: Adafactor(p, **settings), shapes)
    theirs, reference = torchs(lambda p: torch.optim.Adafactor(p, foreach=False, **settings), shapes)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=4e-7)
        for name, value in reference.state[b].items():
            torch.testing.assert_close(mine.state[a][name], value, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("start", [0.0, 1e-5], ids=["zeros", "small"])
def test_small_parameters_and_gradients_of_zero(start):
    """A parameter moves by its size, but not by less than eps2; and no gradient makes none of it a NaN."""
    found = []
    for kind, more in ((Adafactor, {}), (torch.optim.Adafactor, {"foreach": False})):
        torch.manual_seed(0)
        moved = [nn.Parameter(start * torch.randn(shape)) for shape in ((4, 6), (5,))]
        still = [nn.Parameter(torch.randn(shape)) for shape in ((3, 7), (2,))]
        optimizer = kind([*moved, *still], **more)
        for _ in range(3):
            for p in moved:
                p.grad = torch.randn_like(p)
            for p in still:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        found.append([*moved, *still])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=4e-9)
    assert all(p.abs().max() > 1e-5 for p in found[0][:2])


def test_muon_takes_a_gradient_of_zero():
    """As of a layer that a batch does not reach, on a rank that has to reduce something."""
    weight = nn.Parameter(torch.ones(3, 5))
    weight.grad = torch.zeros_like(weight)
    Muon([weight], lr=0.5, weight_decay=0.0).step()
    assert torch.equal(weight, torch.ones(3, 5))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
            self.bytes = max(self.bytes, found.untyped_storage().nbytes())
        return found


def test_adafactor_takes_little_memory_beside_its_states(monkeypatch):
    """It works on a block of rows at a time, also of what has more than two dimensions, to the same effect."""
    shapes = ((300, 40), (3, 50, 8), (70,))
    whole, _ = torchs(lambda p: Adafactor(p, weight_decay=0.1), shapes)
    monkeypatch.setattr(adafactor, "_BLOCK", 400)
    blocks, optimizer = torchs(lambda p: Adafactor(p, weight_decay=0.1), shapes)
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    optimizer.param_groups[0]["params"] = blocks[:2]
    with Largest() as seen:
        optimizer.step()
    assert 0 < seen.bytes <= 400 * 8

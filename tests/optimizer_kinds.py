"""Every optimizer with a few settings, matrices to optimise, and steps."""

import pytest
import torch
from torch import nn

from engine.optim import Adafactor, AdamOffloadOptimizer, AdamOptimizer, AdamW8bit, Lion, Muon

KINDS = {
    "adam": AdamOptimizer,
    "offload": lambda p, **kwargs: AdamOffloadOptimizer(p, bucket=100, **kwargs),
    "adam8": lambda p, **kwargs: AdamW8bit(p, min_size=1, **kwargs),
    "lion": Lion,
    "muon": lambda p, **kwargs: Muon(p, ns_steps=3, adjust_lr="match_rms_adamw", **kwargs),
    "adafactor": Adafactor,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def matrices(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(n, 4, generator=rng).to(dtype)) for n in (6, 3))


def steps(parameters, optimizer, seed, number=2):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(number):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
        optimizer.step()


def same(these, those):
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def steps_as_apart(ours, mine, theirs, apart):
    """Whether one optimizer for all parameters gives the same as one for each of their copies."""
    for turn in range(3):
        steps(ours, mine, turn, 1)
        for p, q, optimizer in zip(ours, theirs, apart, strict=True):
            q.grad = p.grad.clone()
            optimizer.step()
    return same(ours, theirs)

"""What parity checks are made of: random parameters, one forward and backward, and a comparison of tensors."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.compare import difference, hub_gradients
from modelcenter.models.base import Model


def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter, biases and norms too, a value that matters."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=rng)
            if p.dim() > 1:
                p.copy_(noise / math.sqrt(p.shape[-1]) * 1.5)
            else:
                p.copy_(0.3 * noise + ("norm" in name.lower() and name.endswith("weight")))
    return model


def assert_same(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raise AssertionError with the size of the difference beyond `tolerance` (see compare.difference)."""
    gap = difference(ours.detach(), theirs.detach())
    assert gap <= tolerance, f"{what}: difference {gap:.2e} > {tolerance:.0e}"


def run_backward(model: Model, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients under hub names) of one batch."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    return out, hub_gradients(model)

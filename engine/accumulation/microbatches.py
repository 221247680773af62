"""Running the microbatches of a step one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from engine import runtime


def run_in_turn(
    microbatches: Iterable[Any],
    loss_of: Callable[[Any, int], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    before: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Run forward and backward of each microbatch. Returns the sum of the losses: 0-d, fp32, detached.

    Args:
        loss_of: ``loss_of(microbatch, number)`` runs forward.
        before: called with the number of each microbatch before its forward.
    """
    total = torch.zeros(())
    for step, microbatch in enumerate(microbatches):
        if before is not None:
            before(step)
        loss = loss_of(microbatch, step)
        part = loss.detach().to(torch.float32, copy=True)
        total = total + part if step else part  # adding a CPU zero would make the host wait for the GPU
        backward(loss)
    return total


def checked_loss(loss: Any, step: int) -> torch.Tensor:
    """What ``forward`` returned, if it is a loss that can be differentiated."""
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(
            f"forward returned {found} as the loss of microbatch {step}, expected a 0-d tensor that depends on the "
            "parameters: sum over its items"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"the loss of microbatch {step} on rank {runtime.rank()} does not depend on the parameters, so this rank "
            "cannot take part in the reduction of the gradients: a loss over no items must be an empty sum, not a "
            "constant"
        )
    return loss


def shown_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the model shows now, each once, in no particular order. Faster than ``model.parameters()``,
    which runs a generator in every module and builds names."""
    found: dict[int, nn.Parameter] = {}
    left = [model]
    while left:
        module = left.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
        if module._modules:
            left += [child for child in module._modules.values() if child is not None]
    return list(found.values())

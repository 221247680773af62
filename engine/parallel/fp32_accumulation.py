"""Gradients of 16-bit parameters, accumulated in fp32 over the microbatches of one step and rounded once.

Autograd, and FSDP where it reduces each microbatch (levels 2 and 3), add a gradient to the one before in the
parameter's dtype. In bf16 a sum stops growing once it is 256 times what is added, so a gradient would depend on how
the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engine.shards import show_own_parameters
from engine.tensors import local_tensor, with_local


@contextmanager
def accumulate_in_fp32(model: nn.Module, shown: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let the gradients of 16-bit parameters, those from before included, be added up in fp32 inside; they have the
    parameter's dtype again afterwards. A parameter whose gradient comes once needs no memory for it.

    shown: the parameters of the model as it shows them.
    """
    if not _trained_in_16_bits(shown):
        yield
        return
    show_own_parameters(model)  # the shards have the gradients, whatever a forward without a backward has left shown
    parameters = _trained_in_16_bits(model.parameters())
    sums: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def take(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if (total := sums.get(parameter)) is None:
            sums[parameter] = gradient
            return
        wide = local_tensor(total).float()
        sums[parameter] = with_local(gradient, wide.add_(local_tensor(gradient)))

    handles = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    try:
        for parameter in parameters:
            take(parameter)
        # Here and not in a hook: FSDP runs that on another stream, which would free what it still reads.
        for summed, total in sums.items():
            sums[summed] = with_local(total, local_tensor(total).detach().float())
        yield
    finally:
        for handle in handles:
            handle.remove()
        for summed, total in sums.items():
            summed.grad = with_local(total, local_tensor(total).to(summed.dtype))


def _trained_in_16_bits(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]

"""Mistakes that a port makes, for tests of the tests: each spoils a model of ours, and parity must notice.

Modules have the same names in every architecture, so one set of mutations serves all of them.
"""

from collections.abc import Callable
from typing import Any

import torch

from modelcenter.layers.sequences import Sequences


def _swap_k_and_v(model: Any) -> None:
    attn = model.units[1].attn
    attn.k.weight, attn.v.weight = attn.v.weight, attn.k.weight


def _transpose(model: Any) -> None:
    with torch.no_grad():
        weight = model.units[0].attn.q.weight
        weight.copy_(weight.t().clone().reshape(weight.shape))


def _drop_eps(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-12


def _zero_bias(model: Any) -> None:
    """Of the last attention, or where that has none the unit's last vector: a bias or the weight of a norm."""
    unit = model.units[-1]
    bias = unit.attn.out.bias
    with torch.no_grad():
        (bias if bias is not None else [p for p in unit.parameters() if p.dim() == 1][-1]).zero_()


def _wrong_activation(model: Any) -> None:
    mlp = model.units[0].mlp
    getattr(mlp, "experts", mlp).activation = torch.tanh


def _swap_layers(model: Any) -> None:
    units = model.units
    units[0], units[1] = units[1], units[0]


def _cross_boundaries(model: Any) -> None:
    """Attention as if the batch were one sequence."""
    begin = model.begin

    def merged(batch: Any) -> Any:
        x, ctx = begin(batch)
        n = ctx.num_tokens
        ctx.sequences = Sequences.of_lengths([n], x.device)
        return x, ctx

    model.begin = merged


MUTATIONS: dict[str, Callable[[Any], None]] = {
    "k and v swapped": _swap_k_and_v,
    "a transposed weight": _transpose,
    "a dropped eps": _drop_eps,
    "a zeroed bias": _zero_bias,
    "another activation": _wrong_activation,
    "layers swapped": _swap_layers,
    "attention across rows": _cross_boundaries,
}

"""Feed-forward networks with a mixture of experts."""

import torch
from torch import Tensor, nn

from engine.ops import Experts, linear
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS, GatedMLP
from modelcenter.layers.packing import Packed


class Router(nn.Module):
    """x (T, hidden_size) -> the logits (T, num_experts) by which each token's experts are chosen."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class SparseMLP(nn.Module):
    """Each token passes through `experts_per_token` of `num_experts` gated networks. x: (T, hidden_size) -> the same.

    shared_size: intermediate size of one more network, which all tokens pass through, with a gate of its own
    (Qwen2-MoE); None: there is none.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        activation: str,
        normalized: bool = True,
        shared_size: int | None = None,
    ):
        """normalized: whether the probabilities of a token's experts are divided by their sum."""
        super().__init__()
        self.router = Router(hidden_size, num_experts)
        self.experts = Experts(
            hidden_size, intermediate_size, num_experts, experts_per_token, ACTIVATIONS[activation], normalized
        )
        self.shared: GatedMLP | None = None
        if shared_size is not None:
            self.shared = GatedMLP(hidden_size, shared_size, activation)
            self.shared_gate = Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        out: Tensor = self.experts(x, self.router(x))
        if self.shared is not None:
            out = out + self.shared_gate(x).sigmoid() * self.shared(x, ctx)
        return out

"""Feed-forward networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import Activation, gated, gelu, gelu_tanh, silu
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.linear import Linear, activated, each, first_output
from modelcenter.layers.packing import Packed

# Hugging Face's names. "gelu_new" and its synonyms are the tanh approximation.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": silu,
    "swish": silu,
    "tanh": torch.tanh,
}


class MLP(nn.Module):
    """down(dropout(activation(up(x)))). x: (..., hidden_size) -> the same."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[activation], Dropout(dropout)
        self.up = Linear(hidden_size, intermediate_size, bias)
        self.down = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        x = ctx.scaled(activated(x, self.up, self.activation))
        return self.down(self.dropout(x, ctx, first_channel=first_output(self.up)))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202). x: (..., hidden_size) -> the same."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False, dropout: float = 0.0
    ):
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[activation], Dropout(dropout)
        self.gate = Linear(hidden_size, intermediate_size, bias)
        self.up = Linear(hidden_size, intermediate_size, bias)
        self.down = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        gate, x = each(x, self.gate, self.up)
        x = gated(self.activation, gate, ctx.scaled(x))
        return self.down(self.dropout(x, ctx, first_channel=first_output(self.up)))

"""Transformer blocks: how attention, feed-forward, residual and norm are wired."""

from torch import Tensor, nn

from engine.ops import dropout_add
from modelcenter.layers.packing import Packed


class PostNormBlock(nn.Module):
    """norm(x + attn(x)), then norm(x + mlp(x)), as the original Transformer. x: (T, hidden_size) -> the same."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, hidden_size: int, norm_eps: float, dropout: float):
        super().__init__()
        self.attn = attn
        self.attn_norm = nn.LayerNorm(hidden_size, norm_eps)
        self.mlp = mlp
        self.mlp_norm = nn.LayerNorm(hidden_size, norm_eps)
        self.dropout = dropout

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        x = self.attn_norm(dropout_add(self.attn(x, ctx), x, self.dropout, self.training))
        return self.mlp_norm(dropout_add(self.mlp(x), x, self.dropout, self.training))

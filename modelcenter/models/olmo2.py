"""OLMo 2 (arXiv:2501.00656), after transformers' Olmo2Model and its heads: Llama's body with norms after the sublayers,
and queries and keys that are normalised over all heads at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import BranchNormBlock
from modelcenter.layers.norm import WideRMSNorm
from modelcenter.models.llama import LlamaBody, LlamaBodyConfig


@dataclass(kw_only=True)
class Olmo2Config(LlamaBodyConfig):
    """Fields of OLMo 2. attention_bias: q, k, v and out have biases."""

    model_type: ClassVar[str] = "olmo2"

    norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False


class WideNormAttention(SelfAttention):
    """SelfAttention that normalises all heads of q, and all of k, as one vector. norm(channels) makes the norms."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, norm: Callable[[int], nn.Module], **more: Any):
        super().__init__(hidden_size, num_heads, dropout, **more)
        self.norms = True
        self.q_norm = norm(self.num_heads * self.head_dim)
        self.k_norm = norm(self.num_kv_heads * self.head_dim)

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)


class WideNormBody(LlamaBody):
    """LlamaBody with queries and keys that are normalised over all heads, and a config with `attention_bias`."""

    config: Any

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, kind=WideNormAttention, norm=self.norm, bias=self.config.attention_bias)

    def tp_plan(self) -> dict[str, str]:
        # Each rank has some of the channels; the mean is that of all.
        return super().tp_plan() | {"layers.*.attn.q_norm": "norm", "layers.*.attn.k_norm": "norm"}


class Olmo2(WideNormBody):
    """OLMo 2 with the head of `task`."""

    config_class = Olmo2Config
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification")

    config: Olmo2Config

    def norm(self, width: int) -> nn.Module:
        return WideRMSNorm(width, self.config.norm_eps)

    def block(self, layer: int) -> nn.Module:
        width = self.config.hidden_size
        return BranchNormBlock(self.attention(layer), self.mlp(layer), lambda: self.norm(width))

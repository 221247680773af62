"""GTE, Alibaba's encoders (Zhang et al. 2024, arXiv:2407.19669), after transformers' GteModel and its heads: NomicBERT
with biases in attention and in the output of the feed-forward networks, and dropout inside these.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import GatedMLP
from modelcenter.models.nomic_bert import NomicBert, NomicBertConfig


@dataclass(kw_only=True)
class GteConfig(NomicBertConfig):
    """Fields of GTE: NomicBERT's, except that head_dim is hidden_size / num_heads.

    type_vocab_size: if 0, there are no token types, and given ones are ignored, as in transformers.
    """

    model_type: ClassVar[str] = "gte"

    hidden_act: str = "gelu"
    max_positions: int = 8192
    type_vocab_size: int = 1
    rope_theta: float = 160000.0
    dropout: float = 0.1
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.head_dim is not None
        whole = f"hidden_size / num_heads, {self.hidden_size // self.num_heads}: GTE has no field for it"
        self.require(self.head_dim * self.num_heads == self.hidden_size, "head_dim", whole)

    @property
    def head_act(self) -> str:
        return "gelu"  # whatever hidden_act is


class Gte(NomicBert):
    """GTE with the head of `task`."""

    config_class = GteConfig

    config: GteConfig

    def make_body(self) -> None:
        super().make_body()
        if self.config.type_vocab_size == 0:
            self.token_type = None

    def make_block(self) -> nn.Module:
        c, width = self.config, self.config.hidden_size
        mlp = GatedMLP(width, c.intermediate_size, c.hidden_act, dropout=c.dropout)
        mlp.down = Linear(c.intermediate_size, width)  # the only one of the three with a bias
        return PostNormBlock(SelfAttention(width, c.num_heads, c.attention_dropout), mlp, width, c.norm_eps, c.dropout)

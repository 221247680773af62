"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613), after transformers' NomicBertModel and its heads: BERT with
rotary positions instead of a table, gated feed-forward networks, and no biases in its layers except those of norms.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.mlp import GatedMLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.encoder import CLASSIFYING_TASKS, Encoder, EncoderConfig
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class NomicBertConfig(EncoderConfig):
    """Fields of NomicBERT; sizes count elements, dropouts are probabilities.

    head_dim: None: hidden_size / num_heads. rope_scaling: see layers.rotary.Rotary; "dynamic" allows texts longer than
    max_positions, the length in training.
    """

    model_type: ClassVar[str] = "nomic_bert"

    hidden_act: str = "silu"
    max_positions: int = 2048
    type_vocab_size: int = 2
    head_dim: int | None = None
    rope_theta: float = 1000.0
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_heads
        self.require(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", "an even number: rotary turns pairs")
        self.require_probabilities("classifier_dropout")

    @property
    def head_dropout(self) -> float:
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout


class NomicBert(Encoder):
    """NomicBERT with the head of `task`."""

    config_class = NomicBertConfig
    tasks = CLASSIFYING_TASKS
    pooled_tasks = ("sequence-classification",)
    bounded = False

    config: NomicBertConfig

    def make_body(self) -> None:
        c, width = self.config, self.config.hidden_size
        assert c.head_dim is not None
        self.embed = Embedding(c.vocab_size, width, padding_idx=c.pad_token_id)
        self.position = None
        self.token_type = Embedding(c.type_vocab_size, width)
        self.embed_norm = LayerNorm(width, c.norm_eps)
        self.embed_dropout = Dropout(c.dropout)
        self.project_in = None
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling, c.max_positions)
        self.layers = self.make_layers()

    def make_block(self) -> nn.Module:
        c, width = self.config, self.config.hidden_size
        return PostNormBlock(
            SelfAttention(width, c.num_heads, c.attention_dropout, head_dim=c.head_dim, bias=False),
            GatedMLP(width, c.intermediate_size, c.hidden_act),
            width,
            c.norm_eps,
            c.dropout,
        )

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        length = self.rotary.length(batch.get("position_ids"), ctx.longest)
        ctx.rotary = self.rotary(ctx.positions, x.dtype, length)
        return x, ctx

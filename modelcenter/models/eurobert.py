"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500), after transformers' EuroBertModel and its heads: Llama's layers
with bidirectional attention; no pooler, and no dropout except of attention weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.heads import DenseClassifier, LateClassifier, LinearMaskedLM, TokenClassifier
from modelcenter.layers.mlp import GatedMLP
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.encoder import CLASSIFYING_TASKS, Encoder, EncoderConfig
from modelcenter.models.inputs import Batch

POOLINGS = ("late", "mean", "bos")


@dataclass(kw_only=True)
class EuroBertConfig(EncoderConfig):
    """Fields of EuroBERT; sizes count elements.

    num_kv_heads: number of key and value heads; None: num_heads. head_dim: None: hidden_size / num_heads. rope_scaling:
    see layers.rotary.Rotary. attention_bias: q, k, v and out have biases; mlp_bias: gate, up, down and the head over
    the vocabulary have biases.
    pooling: the logits of a text are the mean of its tokens' logits ("late"), or computed from the mean of its states
    ("mean") or from its first token's state ("bos"). dropout: 0; the model has none.
    """

    model_type: ClassVar[str] = "eurobert"

    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_positions: int = 8192
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    pooling: str = "late"
    pad_token_id: int | None = 128001
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_heads
        self.require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"a divisor of {self.num_heads} heads")
        self.require(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", "an even number: rotary turns pairs")
        self.require(self.dropout == 0, "dropout", "0: EuroBERT drops nothing but attention's weights")
        self.require_one_of("pooling", POOLINGS)


class EuroBert(Encoder):
    """EuroBERT with the head of `task`. It takes no token_type_ids."""

    config_class = EuroBertConfig
    tasks = CLASSIFYING_TASKS
    pooled_tasks = ()
    tells_types = False
    bounded = False

    config: EuroBertConfig

    def make_body(self) -> None:
        c, width = self.config, self.config.hidden_size
        assert c.head_dim is not None
        self.embed = Embedding(c.vocab_size, width, padding_idx=c.pad_token_id)
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling, c.max_positions)
        self.layers = self.make_layers()
        self.final_norm = RMSNorm(width, c.norm_eps)

    def make_block(self) -> nn.Module:
        c, width = self.config, self.config.hidden_size
        attn = SelfAttention(
            width,
            c.num_heads,
            c.attention_dropout,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
        )
        mlp = GatedMLP(width, c.intermediate_size, c.hidden_act, c.mlp_bias)
        return PreNormBlock(attn, mlp, lambda: RMSNorm(width, c.norm_eps), 0.0)

    def make_head(self, task: str) -> nn.Module | None:
        c, width = self.config, self.config.hidden_size
        match task:
            case "masked-lm":
                return LinearMaskedLM(width, c.vocab_size, c.tie_embeddings, c.mlp_bias)
            case "sequence-classification":
                kind = LateClassifier if c.pooling == "late" else DenseClassifier
                return kind(width, c.num_labels, 0.0, c.problem_type, "gelu")
            case "token-classification":
                return TokenClassifier(width, c.num_labels, 0.0)
        return super().make_head(task)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        x = self.embedded(batch, ctx, self.embed)
        length = self.rotary.length(batch.get("position_ids"), ctx.longest)
        ctx.rotary = self.rotary(ctx.positions, x.dtype, length)
        self.attend_to_encoder(batch, ctx)
        return x, ctx

    def finish(self, x: Tensor) -> Tensor:
        return self.final_norm(x)

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        whole = self.task == "sequence-classification" and self.config.pooling != "bos"
        return None if whole else super().reads(ctx, batch)

    def run_head(
        self, x: Tensor, pooled: Tensor | None, ctx: Packed, batch: Batch, counts: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if self.task == "sequence-classification" and self.config.pooling == "late":
            return self.head(x, batch, counts, ctx)
        if self.task == "sequence-classification" and self.config.pooling == "mean":
            pooled = ctx.mean_by_sequence(x)
        return super().run_head(x, pooled, ctx, batch, counts)

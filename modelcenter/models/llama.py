"""Llama 1 to 3 (Touvron et al. 2023, arXiv:2302.13971; Dubey et al. 2024, arXiv:2407.21783), after transformers'
LlamaModel and its heads, and the body that Llama shares with Qwen, Mistral and MiniCPM.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.mlp import ACTIVATIONS, GatedMLP
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.decoder import Decoder
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class LlamaBodyConfig(ModelConfig):
    """Fields of Llama, Qwen, Mistral and MiniCPM; sizes count elements, dropouts are probabilities.

    num_kv_heads: number of key and value heads; None: num_heads. head_dim: None: hidden_size / num_heads. rope_scaling:
    see layers.rotary.Rotary. pad_token_id: the embedding of this token is not trained.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int
    hidden_act: str = "silu"
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        if self.head_dim is None:
            self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of {self.num_heads} heads")
            self.head_dim = self.hidden_size // self.num_heads
        self.require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"a divisor of {self.num_heads} heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number: rotary turns pairs of channels")
        self.require_one_of("hidden_act", ACTIVATIONS)
        self.require_probabilities("attention_dropout")
        self.require_token("pad_token_id", self.vocab_size)


@dataclass(kw_only=True)
class LlamaConfig(LlamaBodyConfig):
    """Fields of Llama. attention_bias: q, k, v and out have biases; mlp_bias: gate, up and down have biases."""

    model_type: ClassVar[str] = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaBody(Decoder):
    """Grouped-query attention with rotary positions and a gated feed-forward network, each preceded by an RMSNorm.

    Subclasses override `attention`, `mlp` and `make_rotary` where theirs differ.
    """

    config: LlamaBodyConfig
    # Whether embedding_scale also applies to embeddings that the caller gives, and to a tuned prompt's.
    scales_given: ClassVar[bool] = False

    def __init__(self, config: LlamaBodyConfig, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        self.embed = Embedding(c.vocab_size, width, padding_idx=c.pad_token_id)
        self.rotary = self.make_rotary()
        self.layers = nn.ModuleList(self.block(i) for i in range(c.num_layers))
        self.final_norm = self.norm(width)
        self.head = self.make_head(
            task, 0.1 if c.classifier_dropout is None else c.classifier_dropout, self.logit_scale
        )

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings. This scale and the two below are 1 except in MiniCPM and Granite."""
        return 1.0

    @property
    def branch_scale(self) -> float:
        """Factor of what attention and the feed-forward network add to the residual stream."""
        return 1.0

    @property
    def logit_scale(self) -> float:
        """Factor of the hidden states that enter the vocabulary projection."""
        return 1.0

    def make_rotary(self) -> Rotary:
        """The rotary angles of a head."""
        c = self.config
        assert c.head_dim is not None
        return Rotary(c.head_dim, c.rope_theta, c.rope_scaling, c.max_positions)

    def norm(self, width: int) -> nn.Module:
        """A norm over `width` channels."""
        return RMSNorm(width, self.config.norm_eps)

    def block(self, layer: int) -> nn.Module:
        """The block of layer 0, 1, ..."""
        width = self.config.hidden_size
        return PreNormBlock(
            self.attention(layer), self.mlp(layer), lambda: self.norm(width), 0.0, scale=self.branch_scale
        )

    def attention(self, layer: int, *, kind: type[SelfAttention] = SelfAttention, **options: Any) -> nn.Module:
        """The attention of layer 0, 1, ..., a `kind`; options are those of its constructor."""
        c = self.config
        return kind(
            c.hidden_size,
            c.num_heads,
            c.attention_dropout,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            **{"causal": True, **options},
        )

    def mlp(self, layer: int) -> nn.Module:
        """The feed-forward network of layer 0, 1, ..."""
        return GatedMLP(self.config.hidden_size, self.config.intermediate_size, self.config.hidden_act)

    def check_length(self, longest: int) -> None:
        """Raise ValueError for a sequence of more tokens than the architecture allows. Llama has no limit."""

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        x = self.embedded(batch, ctx, self.embed)
        if self.embedding_scale != 1.0 and (self.scales_given or batch.get("inputs_embeds") is None):
            x = x * self.embedding_scale
        self.check_length(ctx.longest)
        length = self.rotary.length(batch.get("position_ids"), ctx.longest)
        ctx.rotary = self.rotary(ctx.positions, x.dtype, length)
        return x, ctx


class Llama(LlamaBody):
    """Llama with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = LlamaConfig

    config: LlamaConfig

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=self.config.attention_bias, **options)

    def mlp(self, layer: int) -> nn.Module:
        c = self.config
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, c.mlp_bias)

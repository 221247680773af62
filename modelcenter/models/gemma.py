"""Gemma 1 (arXiv:2403.08295) and the text models of Gemma 3 (arXiv:2503.19786), including EmbeddingGemma
(arXiv:2509.20354), after transformers' GemmaModel and Gemma3TextModel with their heads: Llama's body with scaled
embeddings, and norms that multiply by 1 + weight. Gemma 3 has norms before and after each sublayer and on the heads of
queries and keys; most of its layers have sliding-window attention with a rotary base of their own.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modelcenter.layers.block import SandwichNormBlock
from modelcenter.layers.norm import UnitOffsetRMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.inputs import Batch
from modelcenter.models.layer_types import LayerTypesFields
from modelcenter.models.llama import LlamaBody, LlamaBodyConfig
from modelcenter.models.outputs import ModelOutput


@dataclass(kw_only=True)
class GemmaConfig(LlamaBodyConfig):
    """Fields of Gemma 1. attention_bias: q, k, v and out have biases."""

    model_type: ClassVar[str] = "gemma"

    num_kv_heads: int | None = 16
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_positions: int = 8192
    attention_bias: bool = False
    pad_token_id: int | None = 0
    tie_embeddings: bool = True


@dataclass(kw_only=True)
class Gemma3Config(GemmaConfig, LayerTypesFields):
    """Fields of Gemma 3.

    layer_types: for each layer "full_attention" or "sliding_attention", in which a token attends to `sliding_window`
    tokens, itself and those before it, and rotates by local_rope_theta without scaling. None: every full_every-th layer
    is full.
    use_bidirectional_attention: a token also attends to later ones; a window has half of its tokens on each side.
    query_pre_attn_scalar: scores are divided by its square root.
    """

    model_type: ClassVar[str] = "gemma3_text"

    num_kv_heads: int | None = 4
    max_positions: int = 131072
    rope_theta: float = 1000000.0
    local_rope_theta: float = 10000.0
    full_every: int = 6
    sliding_window: int = 4096
    query_pre_attn_scalar: int = 256
    use_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.sliding_window > 0, "sliding_window", "at least 1")
        self.require(self.full_every > 0, "full_every", "a number of layers, at least 1")
        self.require(self.query_pre_attn_scalar > 0, "query_pre_attn_scalar", "more than 0")

    def slides(self, layer: int) -> bool:
        return (layer + 1) % self.full_every > 0 if self.layer_types is None else super().slides(layer)

    def window(self, layer: int) -> int | None:
        """Layer 0, 1, ... attends to tokens less than this many positions away; None: to all."""
        if not self.slides(layer):
            return None
        return self.sliding_window // 2 + 1 if self.use_bidirectional_attention else self.sliding_window


class GemmaBody(LlamaBody):
    """What all Gemmas share."""

    config: GemmaConfig

    def norm(self, width: int) -> nn.Module:
        return UnitOffsetRMSNorm(width, self.config.norm_eps)

    def look_up(
        self, table: nn.Module, rows: Tensor, given: Tensor, name: str = "input_ids", size: str = "vocab_size"
    ) -> Tensor:
        """Embeddings are scaled on lookup; the caller's embeddings and tuned prompts are not, as in transformers."""
        return scaled_by_width(super().look_up(table, rows, given, name, size))

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=self.config.attention_bias, **options)

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """Norms start as 1 + 0."""
        spec = super().init_spec()
        return {name: ("zeros",) if rule == ("ones",) else rule for name, rule in spec.items()}


class SandwichBody(GemmaBody):
    """What Gemma 2 and later share: a norm before and after each sublayer."""

    def block(self, layer: int) -> nn.Module:
        width = self.config.hidden_size
        return SandwichNormBlock(self.attention(layer), self.mlp(layer), lambda: self.norm(width), 0.0)


class Gemma(GemmaBody):
    """Gemma 1 with the head of `task`."""

    config_class = GemmaConfig
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification", "token-classification")


class Gemma3(SandwichBody):
    """Gemma 3 with the head of `task`."""

    config_class = Gemma3Config
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification")

    config: Gemma3Config

    def __init__(self, config: Gemma3Config, task: str = "base"):
        super().__init__(config, task)
        assert config.head_dim is not None
        self.local_rotary = Rotary(config.head_dim, config.local_rope_theta)
        if config.use_bidirectional_attention:
            self.usual_pooling = "mean"

    def attention(self, layer: int, **options: Any) -> nn.Module:
        c = self.config
        return super().attention(
            layer,
            causal=not c.use_bidirectional_attention,
            window=c.window(layer),
            scale=c.query_pre_attn_scalar**-0.5,
            head_norm=self.norm,
        )

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        ctx.local_rotary = self.local_rotary(ctx.positions, x.dtype)
        return x, ctx

    def run_checked(self, batch: dict[str, Any]) -> ModelOutput:
        if self.config.use_bidirectional_attention:
            self._refuse_to_write(batch)
        return super().run_checked(batch)

    def _refuse_to_write(self, batch: Batch) -> None:
        """Raise ValueError for inputs and tasks that need causal attention."""
        if self.task == "causal-lm":  # a checkpoint that lacks it can be loaded, and converted
            decides = "False for causal-lm: else a token sees the one it predicts"
            self.config.require(False, "use_bidirectional_attention", decides)
        for name in ("use_cache", "past_key_values"):
            if batch.get(name, False) is not False:
                raise ValueError(f"{name}: in this model a token sees those after it, so no past is kept; leave it out")

    def tp_plan(self) -> dict[str, str]:
        # Each rank normalises its own heads.
        return super().tp_plan() | {"layers.*.attn.q_norm": "partial", "layers.*.attn.k_norm": "partial"}


def scaled_by_width(embeddings: Tensor) -> Tensor:
    """(T, hidden_size) times sqrt(hidden_size), which is rounded to their dtype, as in transformers."""
    return embeddings * torch.tensor(embeddings.shape[-1] ** 0.5, dtype=embeddings.dtype)

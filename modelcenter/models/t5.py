"""T5 v1.0 (Raffel et al. 2019, arXiv:1910.10683), v1.1, Flan-T5, mT5 and umT5, after transformers' models.

Two independent flags say whether the head is tied to the embedding, and whether its input is scaled. v1.0 ties and
scales; v1.1, Flan-T5 and mT5 do neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.ops import Embedding
from engine.ops.autocast import product_dtype
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.by_length import ByLength
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.mask import Mask, shared_rectangles
from modelcenter.layers.mlp import ACTIVATIONS, MLP, GatedMLP
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.relative import RelativeBias
from modelcenter.models.base import UnitCall
from modelcenter.models.encoder_decoder import ENCODER_TASKS, EncoderDecoder, Side


@dataclass(kw_only=True)
class T5Config(ModelConfig):
    """Fields of T5; sizes count elements, dropouts are probabilities.

    Attributes:
        num_layers: of the encoder. num_decoder_layers: None: num_layers.
        head_dim: num_heads * head_dim need not be hidden_size.
        gated: the feed-forward network has a gate, to which the activation applies.
        scale_decoder_outputs: multiply the decoder's final states by hidden_size ** -0.5 before the vocabulary
            projection. None: if embeddings are tied.
        bias_per_layer: each layer has its own relative position bias; else each side has one.
    """

    model_type: ClassVar[str] = "t5"
    is_encoder_decoder: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_decoder_layers: int | None = None
    num_heads: int
    head_dim: int = 64
    intermediate_size: int
    hidden_act: str = "relu"
    gated: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    dropout: float = 0.1
    classifier_dropout: float = 0.0
    scale_decoder_outputs: bool | None = None
    pad_token_id: int = 0
    eos_token_id: int | list[int] = 1
    decoder_start_token_id: int = 0
    initializer_factor: float = 1.0

    bias_per_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("hidden_act", ACTIVATIONS)
        self.require(self.num_buckets >= 4 and self.num_buckets % 2 == 0, "num_buckets", "an even number, at least 4")
        self.require(self.max_distance > self.num_buckets // 2, "max_distance", "more than num_buckets / 2")
        self.require_probabilities("dropout", "classifier_dropout")
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_layers
        if self.scale_decoder_outputs is None:
            self.scale_decoder_outputs = self.tie_embeddings


def carried_scale(x: Tensor, fp16_scale: float) -> float:
    """The factor by which the hidden states x are scaled: fp16_scale if they or, under autocast, products are in
    float16."""
    return fp16_scale if product_dtype(x) == torch.float16 else 1.0


class T5Norm(RMSNorm):
    """RMSNorm of hidden states scaled by `carried_scale`; the output is that of unscaled states."""

    def __init__(self, hidden_size: int, eps: float, fp16_scale: float):
        super().__init__(hidden_size, eps)
        self.fp16_scale = fp16_scale

    def rule(self, x: Tensor) -> tuple[Tensor, None, float]:
        return self.weight, None, self.eps * carried_scale(x, self.fp16_scale) ** 2


class T5Side(Side):
    """A side with its relative position bias (None if each block has its own), and dropout before and after it."""

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, position: RelativeBias | None, dropout: float):
        super().__init__(layers, final_norm)
        self.position = position
        self.embed_dropout, self.final_dropout = Dropout(dropout), Dropout(dropout)


class BiasedBlock(PreNormBlock):
    """A block with its own relative position bias (umT5)."""

    position: RelativeBias

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        return super().forward(x, replace(ctx, bias=self.position(ctx.longest)))


class T5(EncoderDecoder):
    """T5 with the head of `task`; encoder tasks have no decoder. Names in the body do not depend on the task."""

    config_class = T5Config
    tasks = (*EncoderDecoder.tasks, "embedding")
    # The published models were trained in bfloat16 and have hidden states beyond 65,504, the largest float16. In
    # float16, hidden states are scaled by this from the embeddings to the final norm: a power of two rounds nothing.
    fp16_scale: ClassVar[float] = 2.0**-8

    config: T5Config

    def __init__(self, config: T5Config, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        assert c.num_decoder_layers is not None
        self.embed = Embedding(c.vocab_size, width)
        self.encoder = self._side(c.num_layers, decodes=False)
        self.decoder = None if task in ENCODER_TASKS else self._side(c.num_decoder_layers, decodes=True)
        self.head = self.make_head(task, c.classifier_dropout, width**-0.5 if c.scale_decoder_outputs else 1.0)

    def _side(self, num_layers: int, decodes: bool) -> T5Side:
        c = self.config
        width, kind = c.hidden_size, BiasedBlock if c.bias_per_layer else PreNormBlock
        sizes: Any = {"head_dim": c.head_dim, "bias": False, "scale": 1.0}

        def norm() -> RMSNorm:
            return T5Norm(width, c.norm_eps, self.fp16_scale)

        buckets: ByLength[Tensor] = ByLength()  # the same for the biases of all layers

        def position() -> RelativeBias:
            return RelativeBias(c.num_buckets, c.num_heads, c.max_distance, bidirectional=not decodes, held=buckets)

        layers = nn.ModuleList(
            kind(
                SelfAttention(width, c.num_heads, c.dropout, causal=decodes, **sizes),
                (GatedMLP if c.gated else MLP)(width, c.intermediate_size, c.hidden_act, bias=False, dropout=c.dropout),
                norm,
                c.dropout,
                cross=CrossAttention(width, c.num_heads, c.dropout, **sizes) if decodes else None,
            )
            for _ in range(num_layers)
        )
        if c.bias_per_layer:
            for layer in layers:
                layer.position = position()
        return T5Side(layers, norm(), None if c.bias_per_layer else position(), c.dropout)

    def set_attention_bias(self, ctx: Packed, side: Side) -> None:
        assert isinstance(side, T5Side)
        if side.position is not None:
            ctx.bias = side.position(ctx.longest)
            ctx.rectangles = shared_rectangles(ctx, Mask(side is self.decoder, bias=ctx.bias))

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, T5Side)
        scale = carried_scale(x, self.fp16_scale)
        return side.embed_dropout(x if scale == 1.0 else x * scale, ctx)

    def after_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, T5Side)
        return side.final_dropout(side.final_norm(x), ctx)

    def run_units(
        self, units: Sequence[UnitCall], states: list[Tensor], ctx: Packed, *args: Any, **options: Any
    ) -> list[Tensor]:
        ctx.branch_scale = carried_scale(states[-1], self.fp16_scale)
        return super().run_units(units, states, ctx, *args, **options)

    def returned_states(self, states: list[Tensor], ctx: Packed) -> tuple[Tensor, ...]:
        if (scale := carried_scale(states[0], self.fp16_scale)) != 1.0:
            states = [*(state.float() / scale for state in states[:-1]), states[-1]]
        return super().returned_states(states, ctx)

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        sides = ("encoder",) if self.decoder is None else ("encoder", "decoder")
        per_layer = self.config.bias_per_layer
        return plan | {f"{side}.layers.*.position" if per_layer else f"{side}.position": "partial" for side in sides}

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """As in Mesh TensorFlow: products start with unit variance; the scale of attention is in the weights of its
        queries, not applied to its scores."""
        c = self.config
        factor, spec = c.initializer_factor, super().init_spec()
        narrow = factor * c.hidden_size**-0.5
        small = {
            "q.weight": narrow * c.head_dim**-0.5,
            "out.weight": factor * (c.num_heads * c.head_dim) ** -0.5,
            "down.weight": factor * c.intermediate_size**-0.5,
        }
        for name, (kind, *_) in spec.items():
            if kind == "ones":
                continue
            if kind == "normal":
                # Embeddings, the vocabulary projection and the head of token classification have a large std.
                wide = name == "embed.weight" or (name == "head.weight" and self.task[:4] in ("seq2", "toke"))
                std = factor if wide else next((s for end, s in small.items() if name.endswith(end)), narrow)
                spec[name] = ("normal", std)
        return spec


@dataclass(kw_only=True)
class MT5Config(T5Config):
    """Fields of mT5: as in T5 v1.1, and the decoder's outputs are never scaled."""

    model_type: ClassVar[str] = "mt5"

    hidden_act: str = "gelu_new"
    gated: bool = True
    tie_embeddings: bool = False
    scale_decoder_outputs: bool | None = False


class MT5(T5):
    """mT5 (Xue et al. 2020, arXiv:2010.11934) with the head of `task`."""

    config_class = MT5Config


@dataclass(kw_only=True)
class UMT5Config(MT5Config):
    """Fields of umT5, as in T5. The published models have an untied vocabulary projection and no scaling."""

    model_type: ClassVar[str] = "umt5"
    bias_per_layer: ClassVar[bool] = True

    tie_embeddings: bool = True
    scale_decoder_outputs: bool | None = None


class UMT5(T5):
    """umT5 (Chung et al. 2023, arXiv:2304.09151) with the head of `task`; each layer has its own position bias."""

    config_class = UMT5Config

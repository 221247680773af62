"""DeBERTa-v2, DeBERTa-v3 and mDeBERTa (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543), after transformers'
DebertaV2Model and its heads: DeBERTa with biases in all projections, which distances may share, buckets of distances,
and a convolution.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.convolution import TokenConvolution
from modelcenter.layers.disentangled import DistanceEmbedding
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import DenseMultipleChoice, ReplacedTokensInContext
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.deberta import Deberta, DebertaConfig, make_attention
from modelcenter.models.discriminator import Discriminator
from modelcenter.models.encoder import READING_TASKS


@dataclass(kw_only=True)
class DebertaV2Config(DebertaConfig):
    """Fields of DeBERTa-v2 and v3: DeBERTa's and these.

    position_buckets: of distances, per direction; None: one per distance. norm_distances: apply a norm to the
    embeddings of distances. share_projections: project them with the projections of tokens; else with their own.
    conv_width: kernel size of a convolution parallel to the first layer, with activation conv_act; 0: none.
    """

    model_type: ClassVar[str] = "deberta-v2"
    # Whether the labels of pretraining say which tokens were replaced.
    detects_replaced: ClassVar[bool] = True

    position_buckets: int | None = None
    norm_distances: bool = False
    share_projections: bool = False
    conv_width: int = 0
    conv_act: str = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("conv_act", ACTIVATIONS)
        self.require(self.conv_width == 0 or self.conv_width % 2 == 1, "conv_width", "an odd number of tokens, or 0")
        buckets = self.position_buckets
        fits = buckets is None or 2 <= buckets < 2 * (self.distances - 1)
        self.require(fits, "position_buckets", "a number of buckets, at least 2 and less than twice the distances")


class ConvolvedBlock(PostNormBlock):
    """norm(block(x) + activation(dropout(convolution(x)))): the first layer of DeBERTa-v2's larger models."""

    def __init__(self, config: DebertaV2Config, attn: nn.Module, mlp: nn.Module):
        c, width = config, config.hidden_size
        super().__init__(attn, mlp, width, c.norm_eps, c.dropout)
        self.conv = TokenConvolution(width, width, c.conv_width)
        self.conv_dropout, self.conv_activation = Dropout(c.dropout), ACTIVATIONS[c.conv_act]
        self.conv_norm = LayerNorm(width, c.norm_eps)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        ctx = ctx.with_outputs(None)
        near = self.conv_activation(self.conv_dropout(self.conv(x, ctx), ctx))
        return self.conv_norm(super().forward(x, ctx) + near)


class DebertaV2(Deberta, Discriminator):
    """DeBERTa-v2 or v3 with the head of `task`; that of pretraining is v3's."""

    config_class = DebertaV2Config
    tasks = (*READING_TASKS, "pretraining")

    config: DebertaV2Config

    def make_distances(self) -> DistanceEmbedding:
        c = self.config
        eps = c.norm_eps if c.norm_distances else None
        return DistanceEmbedding(c.hidden_size, c.distances, c.position_buckets, eps)

    def make_layers(self) -> nn.ModuleList:
        layers = super().make_layers()
        if self.config.conv_width:
            layers[0] = ConvolvedBlock(self.config, self.make_attention(), self.make_mlp())
        return layers

    def make_attention(self) -> SelfAttention:
        return make_attention(self.config)

    def make_head(self, task: str) -> nn.Module | None:
        c, width = self.config, self.config.hidden_size
        match task:
            case "multiple-choice":
                return DenseMultipleChoice(width, c.head_dropout, c.pooler_act, c.pooler_dropout)
            case "pretraining":
                return ReplacedTokensInContext(width, c.hidden_act, c.norm_eps)
        return super().make_head(task)

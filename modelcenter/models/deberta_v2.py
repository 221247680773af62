"""DeBERTa-v2, DeBERTa-v3 and mDeBERTa (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543), after transformers'
DebertaV2Model and its heads: BERT's blocks with disentangled attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.convolution import TokenConvolution
from modelcenter.layers.disentangled import (
    KINDS,
    DisentangledSelfAttention,
    DistanceEmbedding,
    own_projection,
    with_distances,
)
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import DenseClassifier, DenseMultipleChoice, ReplacedTokensInContext, TokenClassifier
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.discriminator import Discriminator
from modelcenter.models.encoder import READING_TASKS, EncoderConfig
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class DebertaV2Config(EncoderConfig):
    """Fields of DeBERTa-v2 and v3; sizes count elements, dropouts are probabilities.

    type_vocab_size: if 0, token types are accepted and ignored. position_input: add position embeddings to those of
    tokens. relative_attention: scores depend on distances, through the products relative_kinds (KINDS).
    max_distance: distances from this on are treated alike; None: max_positions. position_buckets: per direction; None:
    one per distance. norm_distances: apply a norm to the embeddings of distances. share_projections: project them with
    the projections of tokens; else with their own.
    classifier_dropout: before the last layer of a classifier; None: dropout. pooler_dropout: before the dense layer
    ahead of it, whose activation is pooler_act. conv_width: kernel size of a convolution parallel to the first layer,
    with activation conv_act; 0: none. legacy: which names files use in the head over the vocabulary.
    """

    model_type: ClassVar[str] = "deberta-v2"
    # Whether the labels of pretraining say which tokens were replaced.
    detects_replaced: ClassVar[bool] = True

    norm_eps: float = 1e-7
    type_vocab_size: int = 0
    position_input: bool = True
    relative_attention: bool = False
    relative_kinds: list[str] | None = None
    max_distance: int | None = None
    position_buckets: int | None = None
    norm_distances: bool = False
    share_projections: bool = False
    classifier_dropout: float | None = None
    pooler_dropout: float = 0.0
    pooler_act: str = "gelu"
    conv_width: int = 0
    conv_act: str = "tanh"
    legacy: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("pooler_dropout", "classifier_dropout")
        self.require_one_of("pooler_act", ACTIVATIONS)
        self.require_one_of("conv_act", ACTIVATIONS)
        self.require(self.conv_width == 0 or self.conv_width % 2 == 1, "conv_width", "an odd number of tokens, or 0")
        kinds = self.relative_kinds or []
        self.require(set(kinds) <= set(KINDS), "relative_kinds", f"some of {', '.join(KINDS)}")
        self.require(bool(kinds) or not self.relative_attention, "relative_kinds", f"one of {', '.join(KINDS)} or both")
        self.require(self.max_distance is None or self.max_distance > 1, "max_distance", "a distance, at least 2")
        buckets = self.position_buckets
        fits = buckets is None or 2 <= buckets < 2 * (self.distances - 1)
        self.require(fits, "position_buckets", "a number of buckets, at least 2 and less than twice the distances")
        self.require(self.tie_embeddings or self.legacy, "tie_embeddings", "True where legacy is false")

    @property
    def head_dropout(self) -> float:
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout

    @property
    def distances(self) -> int:
        return self.max_distance or self.max_positions


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


class DebertaV2(Discriminator):
    """DeBERTa-v2 or v3 with the head of `task`; that of pretraining is v3's."""

    config_class = DebertaV2Config
    tasks = (*READING_TASKS, "pretraining")

    config: DebertaV2Config

    def make_body(self) -> None:
        c, width = self.config, self.config.hidden_size
        self.embed = Embedding(c.vocab_size, width, padding_idx=c.pad_token_id)
        self.position = Embedding(c.max_positions, width) if c.position_input else None
        self.token_type = Embedding(c.type_vocab_size, width) if c.type_vocab_size else None
        self.embed_norm = LayerNorm(width, c.norm_eps)
        self.embed_dropout = Dropout(c.dropout)
        self.project_in = None
        self.distances = None
        if c.relative_attention:
            eps = c.norm_eps if c.norm_distances else None
            self.distances = DistanceEmbedding(width, c.distances, c.position_buckets, eps)
        self.layers = nn.ModuleList(self._block(i) for i in range(c.num_layers))

    def _block(self, layer: int) -> nn.Module:
        c, width = self.config, self.config.hidden_size
        kinds = c.relative_kinds or ()
        attn: Callable[..., SelfAttention] = SelfAttention
        if c.relative_attention:
            attn = partial(DisentangledSelfAttention, kinds=kinds, shared=c.share_projections, states_dropout=c.dropout)
        # relative_kinds set the scale of scores even without relative attention.
        scale = (width // c.num_heads * (1 + len(kinds))) ** -0.5
        attention = attn(width, c.num_heads, c.attention_dropout, scale=scale)
        mlp = MLP(width, c.intermediate_size, c.hidden_act)
        if layer == 0 and c.conv_width:
            return ConvolvedBlock(c, attention, mlp)
        return PostNormBlock(attention, mlp, width, c.norm_eps, c.dropout)

    def make_head(self, task: str) -> nn.Module | None:
        c, width = self.config, self.config.hidden_size
        match task:
            case "sequence-classification":
                return DenseClassifier(
                    width, c.num_labels, c.head_dropout, c.problem_type, c.pooler_act, c.pooler_dropout
                )
            case "multiple-choice":
                return DenseMultipleChoice(width, c.head_dropout, c.pooler_act, c.pooler_dropout)
            case "token-classification":
                return TokenClassifier(width, c.num_labels, c.dropout)
            case "pretraining":
                return ReplacedTokensInContext(width, c.hidden_act, c.norm_eps)
        return super().make_head(task)

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.position is not None

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        if self.distances is not None:
            with_distances(ctx, self.distances)
        return x, ctx

    def stage_homes(self) -> dict[str, Any]:
        homes = super().stage_homes()
        return homes if self.distances is None else homes | {"distances": range(len(self.units))}

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        if self.config.relative_attention and not self.config.share_projections:
            own = map(own_projection, self.config.relative_kinds or ())
            plan |= {f"layers.*.attn.{name}": "colwise" for name in own}
        return plan

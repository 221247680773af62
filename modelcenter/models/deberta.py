"""DeBERTa (He et al. 2020, arXiv:2006.03654), the first one, after transformers' DebertaModel and its heads: BERT's
blocks with disentangled attention. What DeBERTa-v2 has in common with it is here, too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.disentangled import (
    KINDS,
    DisentangledSelfAttention,
    DistanceEmbedding,
    own_projection,
    with_distances,
)
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import DenseClassifier, TokenClassifier
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.base import Model
from modelcenter.models.encoder import READING_TASKS, Encoder, EncoderConfig
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class DebertaConfig(EncoderConfig):
    """Fields of every DeBERTa; sizes count elements, dropouts are probabilities.

    embedding_size: width of the embeddings; if it is not hidden_size, a projection follows them. None: hidden_size.
    type_vocab_size: if 0, token types are accepted and ignored. position_input: add position embeddings to those of
    tokens. relative_attention: scores depend on distances, through the products relative_kinds (KINDS).
    max_distance: distances from this on are treated alike; None: max_positions.
    classifier_dropout: before the last layer of a classifier; None: dropout. pooler_dropout: before the dense layer
    ahead of it, whose activation is pooler_act. legacy: which names files use in the head over the vocabulary.
    """

    model_type: ClassVar[str] = "deberta"

    embedding_size: int | None = None  # type: ignore[assignment]  # a number after __post_init__
    norm_eps: float = 1e-7
    type_vocab_size: int = 0
    position_input: bool = True
    relative_attention: bool = False
    relative_kinds: list[str] | None = None
    max_distance: int | None = None
    classifier_dropout: float | None = None
    pooler_dropout: float = 0.0
    pooler_act: str = "gelu"
    legacy: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        self.require_probabilities("pooler_dropout", "classifier_dropout")
        self.require_one_of("pooler_act", ACTIVATIONS)
        kinds, known = self.relative_kinds or [], ", ".join(KINDS)
        self.require(set(kinds) <= set(KINDS), "relative_kinds", f"some of {known}")
        self.require(len(kinds) == len(set(kinds)), "relative_kinds", f"some of {known}, each once")
        self.require(bool(kinds) or not self.relative_attention, "relative_kinds", f"one of {known} or both")
        self.require(self.max_distance is None or self.max_distance > 0, "max_distance", "a distance, at least 1")
        self.require(self.tie_embeddings or self.legacy, "tie_embeddings", "True where legacy is false")
        # The newer head has no layer between the two widths.
        fits = self.legacy or self.embedding_size == self.hidden_size
        self.require(fits, "embedding_size", f"hidden_size={self.hidden_size} where legacy is false")

    @property
    def head_dropout(self) -> float:
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout

    @property
    def distances(self) -> int:
        return self.max_distance or self.max_positions

    @property
    def share_projections(self) -> bool:
        """Whether distances have the projections of tokens; else their own."""
        return False


def make_attention(config: DebertaConfig) -> SelfAttention:
    """The attention of a layer, with biases in all its projections."""
    c, width, kinds = config, config.hidden_size, config.relative_kinds or ()
    # relative_kinds set the scale of scores even without relative attention.
    scale = (width // c.num_heads * (1 + len(kinds))) ** -0.5
    if not c.relative_attention:
        return SelfAttention(width, c.num_heads, c.attention_dropout, scale=scale)
    return DisentangledSelfAttention(
        width, c.num_heads, c.attention_dropout,
        scale=scale, kinds=kinds, shared=c.share_projections, states_dropout=c.dropout,
    )  # fmt: skip


class Deberta(Encoder):
    """DeBERTa with the head of `task`."""

    config_class = DebertaConfig
    tasks = tuple(task for task in READING_TASKS if task != "multiple-choice")  # transformers has no such class
    pooled_tasks = ()

    config: DebertaConfig

    def make_body(self) -> None:
        c, narrow, width = self.config, self.config.embedding_size, self.config.hidden_size
        self.embed = Embedding(c.vocab_size, narrow, padding_idx=c.pad_token_id)
        self.position = Embedding(c.max_positions, narrow) if c.position_input else None
        self.token_type = Embedding(c.type_vocab_size, narrow) if c.type_vocab_size else None
        self.project_in = self.make_projection()
        self.embed_norm = LayerNorm(width, c.norm_eps)
        self.embed_dropout = Dropout(c.dropout)
        self.distances = self.make_distances() if c.relative_attention else None
        self.layers = self.make_layers()

    def make_projection(self) -> nn.Module | None:
        """The projection of embeddings to hidden_size, without a bias; None: they have that width."""
        narrow, width = self.config.embedding_size, self.config.hidden_size
        assert narrow is not None
        return Linear(narrow, width, bias=False) if narrow != width else None

    def make_distances(self) -> DistanceEmbedding:
        """The embeddings of distances, which all layers read: one for each."""
        return DistanceEmbedding(self.config.hidden_size, self.config.distances, None, None)

    def make_block(self) -> nn.Module:
        c = self.config
        return PostNormBlock(self.make_attention(), self.make_mlp(), c.hidden_size, c.norm_eps, c.dropout)

    def make_mlp(self) -> nn.Module:
        return MLP(self.config.hidden_size, self.config.intermediate_size, self.config.hidden_act)

    def make_attention(self) -> SelfAttention:
        """The attention of a layer: keys, of tokens and of distances, have no bias."""
        width = self.config.hidden_size
        attention = make_attention(self.config)
        attention.k = Linear(width, width, bias=False)
        if hasattr(attention, own_projection("c2p")):
            setattr(attention, own_projection("c2p"), Linear(width, width, bias=False))
        return attention

    def make_head(self, task: str) -> nn.Module | None:
        c, width = self.config, self.config.hidden_size
        match task:
            case "sequence-classification":
                return DenseClassifier(
                    width, c.num_labels, c.head_dropout, c.problem_type, c.pooler_act, c.pooler_dropout
                )
            case "token-classification":
                return TokenClassifier(width, c.num_labels, c.dropout)
        return super().make_head(task)

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.position is not None

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        if self.distances is not None:
            with_distances(ctx, self.distances)
        return x, ctx

    def input_states(self, batch: Batch, ctx: Packed, owner: Model) -> Tensor:
        x = self.summed_embeddings(batch, ctx, owner)
        x = x if self.project_in is None else self.project_in(x)  # before the norm, unlike other encoders
        return self.embed_dropout(self.embed_norm(x), ctx)

    def stage_homes(self) -> dict[str, Any]:
        homes = super().stage_homes()
        return homes if self.distances is None else homes | {"distances": range(len(self.units))}

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        if self.config.relative_attention and not self.config.share_projections:
            own = map(own_projection, self.config.relative_kinds or ())
            plan |= {f"layers.*.attn.{name}": "colwise" for name in own}
        return plan

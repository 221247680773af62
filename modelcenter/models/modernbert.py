"""ModernBERT (Warner et al. 2024, arXiv:2412.13663), after transformers' ModernBertModel and its heads: rotary
positions, gated feed-forward networks, pre-norm blocks, and sliding-window attention in most layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import ExtractiveQA, HeadTransform, MaskedLM
from modelcenter.layers.mlp import ACTIVATIONS, GatedMLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.base import VOCABULARY_TASKS, Model
from modelcenter.models.encoder import READING_TASKS, Encoder, EncoderConfig
from modelcenter.models.initial_values import scaled_residuals
from modelcenter.models.inputs import Batch
from modelcenter.models.layer_types import LayerTypesFields

# The matrix of the transform before a head, under its names in all tasks.
_BEFORE_HEADS = ("head.dense.weight", "transform.dense.weight", "head.transform.dense.weight")


@dataclass(kw_only=True)
class ModernBertBodyConfig(EncoderConfig, LayerTypesFields):
    """Fields of ModernBERT and its decoder; sizes count elements, dropouts are probabilities.

    layer_types: for each layer "full_attention" or "sliding_attention", which attends within `window` and rotates by
    local_rope_theta. None: every global_every-th layer is full, from the first on.
    local_attention: distance between the farthest tokens on both sides of an encoder's window.
    dropout: of the embeddings. attention_dropout: of attention weights and attention output. mlp_dropout: inside the
    feed-forward networks.
    """

    max_positions: int = 8192
    global_every: int = 3
    local_attention: int = 128
    rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    classifier_dropout: float = 0.0
    classifier_bias: bool = False
    classifier_act: str = "gelu"
    pad_token_id: int | None = 50283
    initializer_cutoff: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size // self.num_heads % 2 == 0, "num_heads", "heads of an even width: pairs turn")
        self.require_one_of("classifier_act", ACTIVATIONS)
        self.require_probabilities("mlp_dropout", "classifier_dropout")
        self.require(self.global_every > 0, "global_every", "a number of layers, at least 1")

    @property
    def head_dropout(self) -> float:
        return self.classifier_dropout

    def slides(self, layer: int) -> bool:
        return layer % self.global_every > 0 if self.layer_types is None else super().slides(layer)

    def window(self, layer: int) -> int | None:
        """Layer 0, 1, ... attends to tokens less than this many positions away; None: to all."""
        raise AttributeError(f"{type(self).__name__} defines no `window`")


@dataclass(kw_only=True)
class ModernBertConfig(ModernBertBodyConfig):
    """Fields of ModernBERT.

    pooling: the input of heads for whole texts: the first token's state ("cls") or the mean of all states ("mean").
    """

    model_type: ClassVar[str] = "modernbert"

    pooling: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("pooling", ("cls", "mean"))
        self.require(self.local_attention >= 0, "local_attention", "a number of tokens")

    def window(self, layer: int) -> int | None:
        return self.local_attention // 2 + 1 if self.slides(layer) else None


class ModernBertBody(Model):
    """The embeddings, layers and initial values of ModernBERT and its decoder."""

    causal: ClassVar[bool]  # whether no token attends to a later one
    embed_norm: nn.Module
    final_norm: nn.Module

    config: ModernBertBodyConfig

    def make_body(self) -> None:
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size, padding_idx=c.pad_token_id)
        self.embed_norm = self._norm()
        self.embed_dropout = Dropout(c.dropout)
        head_dim = c.hidden_size // c.num_heads
        self.rotary, self.local_rotary = Rotary(head_dim, c.rope_theta), Rotary(head_dim, c.local_rope_theta)
        self.layers = nn.ModuleList(self._block(i) for i in range(c.num_layers))
        self.layers[0].attn_norm = nn.Identity()  # embed_norm has already normalised its input
        self.final_norm = self._norm()

    def _norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_size, self.config.norm_eps, bias=self.config.norm_bias)

    def _block(self, layer: int) -> PreNormBlock:
        c, width = self.config, self.config.hidden_size
        return PreNormBlock(
            SelfAttention(
                width,
                c.num_heads,
                c.attention_dropout,
                bias=c.attention_bias,
                causal=self.causal,
                window=c.window(layer),
            ),
            GatedMLP(width, c.intermediate_size, c.hidden_act, c.mlp_bias, c.mlp_dropout),
            self._norm,
            0.0,
            attn_dropout=c.attention_dropout,
        )

    def vocabulary_head(self, kind: type[MaskedLM]) -> MaskedLM:
        c = self.config
        return kind(
            c.hidden_size,
            c.vocab_size,
            c.classifier_act,
            c.norm_eps,
            c.tie_embeddings,
            dense_bias=c.classifier_bias,
            norm_bias=c.norm_bias,
            bias=c.decoder_bias,
        )

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        x = self.embed_dropout(self.embed_norm(self.embedded(batch, ctx, self.embed)), ctx)
        ctx.rotary = self.rotary(ctx.positions, x.dtype, ctx.longest)
        ctx.local_rotary = self.local_rotary(ctx.positions, x.dtype, ctx.longest)
        return x, ctx

    def finish(self, x: Tensor) -> Tensor:
        return self.final_norm(x)

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """As in transformers: a normal distribution truncated at `initializer_cutoff` standard deviations, with a
        smaller std for the head over the vocabulary and for matrices whose outputs are added to the hidden states."""
        c, spec = self.config, scaled_residuals(super().init_spec(), self.config.num_layers)
        small = ("normal", c.initializer_range / (2 * c.num_layers) ** 0.5)
        for name, rule in spec.items():
            if name in _BEFORE_HEADS or (name == "head.weight" and self.task in VOCABULARY_TASKS):
                spec[name] = small
            elif name == "head.weight":
                spec[name] = ("normal", c.hidden_size**-0.5)
            if rule[0] == "normal":
                spec[name] = ("truncated_normal", spec[name][1], c.initializer_cutoff)
        return spec


class ModernBert(ModernBertBody, Encoder):
    """ModernBERT with the head of `task`."""

    config_class = ModernBertConfig
    tasks = READING_TASKS
    pooled_tasks = ()
    causal = False
    tells_types = False
    head_prefixes = ("head.", "transform.")
    bounded = False

    config: ModernBertConfig

    def make_body(self) -> None:
        super().make_body()
        c = self.config
        self.token_type = None
        self.transform = None
        if self.task not in ("base", "embedding", "multi-vector", "masked-lm", "sparse-embedding"):
            self.transform = HeadTransform(
                c.hidden_size, c.classifier_act, c.norm_eps, bias=c.classifier_bias, norm_bias=c.norm_bias
            )

    def make_head(self, task: str) -> nn.Module | None:
        c = self.config
        match task:
            case "masked-lm":
                return self.vocabulary_head(MaskedLM)
            case "question-answering":
                return ExtractiveQA(c.hidden_size, c.classifier_dropout)
        return super().make_head(task)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        self.attend_to_encoder(batch, ctx)
        return x, ctx

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        pooled = self.task in ("sequence-classification", "multiple-choice")
        return None if pooled and self.config.pooling == "mean" else super().reads(ctx, batch)

    def run_head(
        self, x: Tensor, pooled: Tensor | None, ctx: Packed, batch: Batch, counts: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if self.transform is None:
            return super().run_head(x, pooled, ctx, batch, counts)
        if self.task in ("sequence-classification", "multiple-choice"):
            mean = self.config.pooling == "mean"
            pooled = ctx.mean_by_sequence(x) if mean else ctx.select(x, ctx.first_tokens())
            return super().run_head(x, self.transform(pooled), ctx, batch, counts)
        return super().run_head(self.transform(x), None, ctx, batch, counts)

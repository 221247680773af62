"""OPT (Zhang et al. 2022, arXiv:2205.01068), after transformers' OPTModel and its heads."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock, PreNormBlock
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.decoder import Decoder
from modelcenter.models.inputs import Batch

OFFSET = 2  # rows of the position table before the first position
NORM_EPS = 1e-5  # not a config field


@dataclass(kw_only=True)
class OPTConfig(ModelConfig):
    """Fields of OPT; sizes count elements, dropouts are probabilities.

    embedding_size: width of the embeddings if it is not hidden_size (opt-350m); then there are projections before the
    first layer and after the last. pre_norm: norms precede the sublayers of a block; if False, norms follow them, and
    there is no final norm. remove_final_norm: a pre-norm model has no final norm either (some files before transformers
    4.20).
    """

    model_type: ClassVar[str] = "opt"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    embedding_size: int | None = None  # hidden_size
    hidden_act: str = "relu"
    max_positions: int = 2048
    pre_norm: bool = True
    remove_final_norm: bool = False
    bias: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0
    pad_token_id: int | None = 1
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require_one_of("hidden_act", ACTIVATIONS)
        self.require_probabilities("dropout", "attention_dropout")
        self.require_token("pad_token_id", self.vocab_size)


class OPT(Decoder):
    """OPT with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = OPTConfig
    bounded = True
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification", "question-answering")
    counts_positions = True

    config: OPTConfig

    def __init__(self, config: OPTConfig, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        narrow = c.embedding_size or width
        self.embed = Embedding(c.vocab_size, narrow, padding_idx=c.pad_token_id)
        self.position = Embedding(c.max_positions + OFFSET, width)
        projected = narrow != width
        self.project_in = Linear(narrow, width, bias=False) if projected else None
        self.layers = nn.ModuleList(self._block(c) for _ in range(c.num_layers))
        normed = c.pre_norm and not c.remove_final_norm
        self.final_norm = LayerNorm(width, NORM_EPS) if normed else nn.Identity()
        self.project_out = Linear(width, narrow, bias=False) if projected else None
        self.head = self.make_head(task, width=narrow)

    @staticmethod
    def _block(c: OPTConfig) -> nn.Module:
        attn = SelfAttention(c.hidden_size, c.num_heads, c.attention_dropout, bias=c.bias, causal=True)
        mlp = MLP(c.hidden_size, c.intermediate_size, c.hidden_act, c.bias)
        if c.pre_norm:
            return PreNormBlock(attn, mlp, lambda: LayerNorm(c.hidden_size, NORM_EPS), c.dropout)
        return PostNormBlock(attn, mlp, c.hidden_size, NORM_EPS, c.dropout)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        self.check_positions(batch, ctx, self.config.max_positions)
        x = self.embedded(batch, ctx, self.embed)
        x = x if self.project_in is None else self.project_in(x)
        at = ctx.positions
        return x + self.look_up(self.position, at + OFFSET, at, "position_ids", "max_positions"), ctx

    @property
    def state_width(self) -> int:
        return self.config.embedding_size or self.config.hidden_size

    def finish(self, x: Tensor) -> Tensor:
        x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x)

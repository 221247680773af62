"""BLOOM and BLOOMZ (BigScience 2022, arXiv:2211.05100), after transformers' BloomModel and its heads: GPT-2's layers
with a norm after the embeddings, and ALiBi instead of position embeddings.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.alibi import Alibi
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.mask import Mask, shared_rectangles
from modelcenter.layers.mlp import MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.decoder import Decoder
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class BloomConfig(ModelConfig):
    """Fields of BLOOM; sizes count elements, dropouts are probabilities.

    dropout: of the outputs of attention and feed-forward networks. classifier_dropout: before the token classifier;
    None: `dropout`.
    """

    model_type: ClassVar[str] = "bloom"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None
    initializer_range: float = 0.02
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require_probabilities("dropout", "attention_dropout", "classifier_dropout")


class Bloom(Decoder):
    """BLOOM with the head of `task`. Parameter names in the body do not depend on the task.

    `position_ids` do not affect scores; they only mark where sequences begin.
    """

    config_class = BloomConfig

    config: BloomConfig

    def __init__(self, config: BloomConfig, task: str = "base"):
        super().__init__(config, task)
        c = config
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.embed_norm = LayerNorm(c.hidden_size, c.norm_eps)
        self.alibi = Alibi(c.num_heads)
        self.layers = nn.ModuleList(self._block(c) for _ in range(c.num_layers))
        self.final_norm = LayerNorm(c.hidden_size, c.norm_eps)
        self.head = self.make_head(task, c.dropout if c.classifier_dropout is None else c.classifier_dropout)

    @staticmethod
    def _block(c: BloomConfig) -> nn.Module:
        attn = SelfAttention(c.hidden_size, c.num_heads, c.attention_dropout, causal=True)
        mlp = MLP(c.hidden_size, 4 * c.hidden_size, "gelu_pytorch_tanh")
        return PreNormBlock(attn, mlp, lambda: LayerNorm(c.hidden_size, c.norm_eps), c.dropout)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        x = self.embed_norm(self.embedded(batch, ctx, self.embed))
        ctx.bias = self.alibi(ctx.longest, x.device, x.dtype)
        ctx.rectangles = shared_rectangles(ctx, Mask(causal=True, bias=ctx.bias))
        return x, ctx

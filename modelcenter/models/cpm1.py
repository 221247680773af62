"""ModelCenter's CPM-1 (OpenBMB 2022), after its model_center/model/cpm1.py.

It is not the Hub's CPM-Generate, which is a GPT-2: CPM-1 has relative positions, RMSNorms, a gated feed-forward network
and unscaled scores.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.relative import RelativeBias
from modelcenter.layers.segments import Segments
from modelcenter.models.cpm import CPM, CPMConfig
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class CPM1Config(CPMConfig):
    """Fields of CPM-1.

    attn_scale: divide scores by sqrt(head_dim). length_scale: multiply the products of matrices and embeddings by
    1 / sqrt(in_features).
    """

    model_type: ClassVar[str] = "cpm1"

    num_buckets: int = 32
    max_distance: int = 128
    initializer_range: float = 0.02
    tie_embeddings: bool = False
    attn_scale: bool = False
    length_scale: bool = False


class CPM1(CPM):
    """CPM-1 with the head of `task`."""

    config_class = CPM1Config
    input_defaults = {"context": 0, "span": 0}

    config: CPM1Config

    def __init__(self, config: CPM1Config, task: str = "base"):
        super().__init__(config, task)
        c = config
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.relative = RelativeBias(c.num_buckets, c.num_heads, c.max_distance, bidirectional=True)
        self.layers = self.make_layers(c.length_scale, causal=True, scale=None if c.attn_scale else 1.0)
        self.final_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.head = self.lm_head(task, c.length_scale)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        c = self.config
        ctx = self.pack(batch)
        # Without segments attention is causal, and needs no mask of pairs.
        segments = None
        if any(name in batch for name in self.input_defaults) or (ctx.cache is not None and ctx.cache.has(None)):
            values = self.gathered(ctx, self.token_segments(batch, ctx))
            segments = Segments(nn.functional.pad(values, (0, 1)))
        self.set_attention_bias(ctx, segments)
        x = self.embedded(batch, ctx, self.embed)
        scaled = c.length_scale and "input_ids" in batch
        return x * c.hidden_size**-0.5 if scaled else x, ctx

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        return super().init_spec() | {"relative.weight": ("normal", 1.0)}

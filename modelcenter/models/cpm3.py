"""CPM-3 (OpenBMB 2022), after ModelCenter's model_center/model/cpm3.py: CPM-Ant without segment embeddings, with
weights stored without the factors that forward applies.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.ops import Embedding
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import SegmentBias, Segments
from modelcenter.models.cpm import CPM, CPMConfig
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class CPM3Config(CPMConfig):
    """Fields of CPM-3.

    A separate table holds prompt_types prompts of prompt_length tokens each; prompt: the index of the one put before
    every text. attn_scale, length_scale: as in CPM-1.
    """

    model_type: ClassVar[str] = "cpm3"

    prompt_types: int = 32
    prompt_length: int = 64
    segment_types: int = 34
    prompt: int = 0
    attn_scale: bool = True
    length_scale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.prompt < self.prompt_types, "prompt", f"0 to {self.prompt_types - 1} (prompt_types)")


class CPM3(CPM):
    """CPM-3 with the head of `task`. A learned prompt precedes each sequence; the outputs do not include it."""

    config_class = CPM3Config

    config: CPM3Config

    def __init__(self, config: CPM3Config, task: str = "base"):
        super().__init__(config, task)
        c = config
        self.prefix_tokens = c.prompt_length
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.prompt = Embedding(c.prompt_types * c.prompt_length, c.hidden_size)
        self.relative = SegmentBias(c.num_buckets, c.num_heads, c.max_distance, c.segment_types)
        self.layers = self.make_layers(c.length_scale, scale=None if c.attn_scale else 1.0)
        self.final_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.head = self.lm_head(task, c.length_scale)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        c = self.config
        ctx, ids = self.pack(batch), batch.get("input_ids")
        scale = c.hidden_size**-0.5 if c.length_scale else 1.0
        numbers = torch.arange(c.prompt_length, device=ctx.cu_seqlens.device) + c.prompt * c.prompt_length
        # -1 at text tokens, else the row of the prompt table.
        which = ctx.unpad(torch.full(ctx.shape, -1, device=numbers.device), fill=-1, prefix=numbers)[:, None]
        if ids is None:
            words = ctx.unpad(self.given_embeds(batch, c.hidden_size))
        else:
            words = self.look_up(self.embed, ctx.unpad(ids), ids) * scale
        prompt = self.prompt(which[:, 0].clamp(min=0)) * scale
        # All tokens are causal, including the prompt, unless the caller passes a context.
        values = self.token_segments(batch, ctx, of_prompt=(int("context" in batch), 0, 0))
        self.set_attention_bias(ctx, Segments(self.gathered(ctx, values)))
        return torch.where(which >= 0, prompt.to(words.dtype), words), ctx

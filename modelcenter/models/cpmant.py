"""CPM-Ant (OpenBMB 2022), after transformers' CpmAntModel and OpenBMB/CPM-Live."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.ops import Embedding
from modelcenter.layers.heads import CausalLM
from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.segments import SegmentBias, Segments
from modelcenter.models.cpm import CPM, CPMConfig
from modelcenter.models.inputs import Batch

PROMPT = 2  # the learned prompt that precedes every text
OF_PROMPT, OF_TEXT = 0, 2  # the segments of prompt and text


@dataclass(kw_only=True)
class CPMAntConfig(CPMConfig):
    """Fields of CPM-Ant.

    The embedding table has vocab_size tokens, followed by prompt_types prompts of prompt_length tokens each. The head
    is never tied, whatever tie_embeddings is.
    """

    model_type: ClassVar[str] = "cpmant"

    prompt_types: int = 32
    prompt_length: int = 32
    segment_types: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.prompt_types > PROMPT, "prompt_types", f"more than {PROMPT}, the prompt that texts begin with"
        )
        self.require(self.segment_types > OF_TEXT, "segment_types", f"more than {OF_TEXT}, the segment of a text")


class CPMAnt(CPM):
    """CPM-Ant with the head of `task`. A learned prompt precedes each sequence; the outputs do not include it."""

    config_class = CPMAntConfig
    input_defaults = {"context": 1, "span": 0, "segment": OF_TEXT}
    ties_head = False

    config: CPMAntConfig

    def __init__(self, config: CPMAntConfig, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        self.prefix_tokens = c.prompt_length
        self.embed = Embedding(c.vocab_size + c.prompt_types * c.prompt_length, width)
        self.segment = Embedding(c.segment_types, width)
        self.relative = SegmentBias(c.num_buckets, c.num_heads, c.max_distance, c.segment_types)
        self.layers = self.make_layers(scaled=False)
        self.final_norm = RMSNorm(width, c.norm_eps)
        self.head = CausalLM(width, c.vocab_size, tied=False) if task == "causal-lm" else None

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        c = self.config
        ctx, ids = self.pack(batch), batch.get("input_ids")
        device = ctx.cu_seqlens.device
        prompt = torch.arange(c.prompt_length, device=device) + c.vocab_size + PROMPT * c.prompt_length
        if ids is None:
            x = ctx.unpad(self.given_embeds(batch, c.hidden_size), prefix=self.embed(prompt))
        else:
            known = host_copy(ids)  # a lookup would accept the rows of the prompts
            if known.device.type == "cpu" and known.numel() and int(known.max()) >= c.vocab_size:
                raise self.outside(known, "input_ids", "vocab_size")
            x = self.look_up(self.embed, ctx.unpad(ids, prefix=prompt), ids)
        values = self.token_segments(batch, ctx, of_prompt=(1, 0, OF_PROMPT))
        self.set_attention_bias(ctx, Segments(self.gathered(ctx, values)))
        return x + self.segment(values[:, 2]), ctx

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """As in CPM-Live, whose factors 1 / sqrt(in_features) are part of the weights here."""
        c = self.config
        std, spec = c.initializer_range, super().init_spec()
        for name, p in self.named_parameters():
            if p.dim() == 2:
                spec[name] = ("normal", std if name.startswith("relative.") else std * p.shape[1] ** -0.5)
        return spec

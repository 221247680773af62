"""CPM-Ant (OpenBMB 2022), after transformers' CpmAntModel and OpenBMB/CPM-Live."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.cache import KVCache
from modelcenter.layers.heads import CausalLM
from modelcenter.layers.marks import Marks, SegmentBias
from modelcenter.layers.mlp import GatedMLP
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.base import Batch
from modelcenter.models.decoder import Decoder
from modelcenter.models.outputs import ModelOutput

PROMPT = 2  # which of the learnt prompts stands before every text
OF_PROMPT, OF_TEXT = 0, 2  # their segments


@dataclass(kw_only=True)
class CPMAntConfig(ModelConfig):
    """Fields of CPM-Ant; sizes count elements, dropout is a probability.

    The table of embeddings has vocab_size words and then prompt_types prompts of prompt_length tokens each.
    num_buckets, max_distance: of relative positions. The head has a matrix of its own, whatever tie_embeddings says.
    """

    model_type: ClassVar[str] = "cpmant"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    dropout: float = 0.0
    num_buckets: int = 512
    max_distance: int = 2048
    norm_eps: float = 1e-6
    initializer_range: float = 1.0
    prompt_types: int = 32
    prompt_length: int = 32
    segment_types: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.dropout < 1, "dropout", "a probability, 0 <= p < 1")
        self.require(
            self.prompt_types > PROMPT, "prompt_types", f"more than {PROMPT}, the prompt that texts begin with"
        )
        self.require(self.segment_types > OF_TEXT, "segment_types", f"more than {OF_TEXT}, the segment of a text")


class CPMAnt(Decoder):
    """CPM-Ant with the head of `task`. A learnt prompt stands before each sequence and is part of no output."""

    splits_into_stages = False
    config_class = CPMAntConfig
    tasks = ("base", "causal-lm")

    def __init__(self, config: CPMAntConfig, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        self.prefix_tokens = c.prompt_length
        self.embed = nn.Embedding(c.vocab_size + c.prompt_types * c.prompt_length, width)
        self.segment = nn.Embedding(c.segment_types, width)
        self.relative = SegmentBias(c.num_buckets, c.num_heads, c.max_distance, c.segment_types)
        self.layers = nn.ModuleList(
            PreNormBlock(
                SelfAttention(width, c.num_heads, c.dropout, head_dim=c.head_dim, bias=False),
                GatedMLP(width, c.intermediate_size, "gelu", dropout=c.dropout),
                lambda: RMSNorm(width, c.norm_eps),
                c.dropout,
            )
            for _ in range(c.num_layers)
        )
        self.final_norm = RMSNorm(width, c.norm_eps)
        self.head = CausalLM(width, c.vocab_size, tied=False) if task == "causal-lm" else None

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        c, ctx = self.config, self.pack(batch)
        ids, device = batch.get("input_ids"), ctx.cu_seqlens.device
        prompt = torch.arange(c.prompt_length, device=device) + c.vocab_size + PROMPT * c.prompt_length
        if ids is None:
            x = ctx.unpad(batch["inputs_embeds"], prefix=self.embed(prompt))
        else:
            x = self.embed(ctx.unpad(ids, prefix=prompt))
        usual = {"context": 1, "span": 0, "segment": OF_TEXT}
        given = [batch.get(name, torch.full(ctx.shape, value, device=device)) for name, value in usual.items()]
        if any(tuple(value.shape) != ctx.shape for value in given):
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in zip(usual, given, strict=True))
            raise ValueError(f"got {shapes} beside input of shape {ctx.shape}; they must agree")
        of_prompt = torch.tensor([1, 0, OF_PROMPT], device=device).expand(c.prompt_length, 3)
        marks = ctx.unpad(torch.stack([value.long() for value in given], -1), prefix=of_prompt)
        ctx.marks = Marks(marks if ctx.split is None else ctx.split.gather(marks))
        past = 0 if ctx.cache is None else len(ctx.cache)
        ctx.bias, ctx.others = self.relative(past + ctx.max_seqlen)
        return x + self.segment(marks[:, 2]), ctx

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"relative": "partial"}

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """As CPM-Live, whose factors of 1 / sqrt(inputs) are part of the weights here."""
        std, spec = self.config.initializer_range, super().init_spec()
        for name, p in self.named_parameters():
            if p.dim() == 2:
                spec[name] = ("normal", std if name.startswith("relative.") else std * p.shape[1] ** -0.5)
        return spec

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        length: Tensor | None = None,
        context: Tensor | None = None,
        span: Tensor | None = None,
        segment: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Run the model; arguments that are not named here are Decoder's.

        Args:
            attention_mask: (batch, seq), 1 at tokens and 0 at padding; or length: (batch,) tokens of each row, with
                padding after them.
            context: as input_ids, 1 at tokens that all see and that see only such, 0 at those that see what is before
                them too, as they must to learn to generate. None: 1 everywhere, as transformers has it.
            span: as input_ids, number of the part that a token belongs to and sees; the prompt is in 0. None: 0.
            segment: as input_ids, 0 to segment_types - 1, what a token is of; the prompt is of 0. None: 2.
            labels: as input_ids, shifted here (transformers' CpmAntForCausalLM does not shift).

        Raises:
            ValueError: inputs that do not fit together or the model, naming the field.
        """
        batch = {name: value for name, value in locals().items() if name != "self" and value is not None}
        if length is not None:
            batch["attention_mask"] = self._mask_of(batch.pop("length"), batch)
        if segment is not None and segment.device.type == "cpu" and segment.numel():
            low, high, most = int(segment.min()), int(segment.max()), self.config.segment_types - 1
            if low < 0 or high > most:
                raise ValueError(f"segment: got {high if high > most else low}, expected 0 to {most} (segment_types)")
        if logits_to_keep not in (0, 1):
            raise ValueError(f"logits_to_keep: got {logits_to_keep}, expected 0 (all tokens) or 1 (the last)")
        return self.run(batch)

    @staticmethod
    def _mask_of(length: Tensor, batch: Batch) -> Tensor:
        given = batch.get("input_ids", batch.get("inputs_embeds"))
        for other in ("attention_mask", "cu_seqlens"):
            if other in batch:
                raise ValueError(f"length: pass it or {other}, not both")
        if given is None or tuple(length.shape) != (given.shape[0],):
            raise ValueError(f"length: got shape {tuple(length.shape)}, expected one number for each row of input_ids")
        return (torch.arange(given.shape[1], device=length.device) < length[:, None]).long()

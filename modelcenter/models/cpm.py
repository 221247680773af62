"""The inputs, blocks and initial values that the CPM decoders share (CPM-1, CPM-3, CPM-Ant, CPM-Bee).

Their attention is only partly causal: tokens of the context attend to each other in both directions, and only the other
tokens are causal. Tokens of different spans do not attend to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import SoftTargets
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.cache import KVCache
from modelcenter.layers.heads import CausalLM
from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.layout import check_tensor
from modelcenter.layers.mask import Mask, shared_rectangles
from modelcenter.layers.mlp import GatedMLP
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.residual import pre_norm
from modelcenter.layers.segments import Segments
from modelcenter.models.decoder import Decoder
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.outputs import ModelOutput


@dataclass(kw_only=True)
class CPMConfig(ModelConfig):
    """Fields of every CPM; sizes count elements, dropout is a probability.

    num_buckets, max_distance: of the relative position bias.
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("dropout")
        self.require(self.num_buckets >= 4 and self.num_buckets % 2 == 0, "num_buckets", "an even number, at least 4")
        self.require(self.max_distance > self.num_buckets // 4, "max_distance", "more than num_buckets / 4")


def check_whole_numbers(name: str, value: Any) -> None:
    """Raise ValueError for an input that is not a tensor of integers (or bool, read as 0 and 1)."""
    check_tensor(name, value)
    if value.is_floating_point() or value.is_complex():
        raise ValueError(f"{name}: got {value.dtype}, expected whole numbers; convert by .long()")


def check_range(name: str, values: Tensor, low: int, high: int, of: str = "") -> None:
    """Raise ValueError for values outside low to high; `of`: the field that gives `high`. Values that are only on a GPU
    are not checked, because that would synchronise."""
    known = host_copy(values)
    if known.device.type != "cpu" or not known.numel():
        return
    least, most = int(known.min()), int(known.max())
    if least < low or most > high:
        worst = most if most > high else least
        raise ValueError(f"{name}: got {worst}, expected {low} to {high}{f' ({of})' if of else ''}")


class ScaledBlock(PreNormBlock):
    """A block whose matrices are stored without the factor 1 / sqrt(in_features) that forward applies.

    shrink: divisor of the sum of residual and branch.
    """

    def __init__(self, attn: SelfAttention, mlp: GatedMLP, norm: Any, dropout: float, shrink: float = 1.0):
        super().__init__(attn, mlp, norm, dropout)
        self.shrink = shrink
        self.of_inputs = attn.q.in_features**-0.5  # q, k, v, gate and up have the same input width
        self.of_attn, self.of_mlp = attn.out.in_features**-0.5, mlp.down.in_features**-0.5

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        x, normed = pre_norm(self.attn_norm, x)
        x = self.attn_dropout(self.attn(normed * self.of_inputs, ctx) * self.of_attn, ctx, ctx.narrow(x))
        x, normed = pre_norm(self.mlp_norm, x if self.shrink == 1.0 else x / self.shrink)
        x = self.mlp_dropout(self.mlp(normed * self.of_inputs, ctx) * self.of_mlp, ctx, x)
        return ctx.widen(x if self.shrink == 1.0 else x / self.shrink)


class CPM(Decoder):
    """Base of the CPM decoders. A subclass builds `embed`, `relative`, `layers`, `final_norm` and `head`, and
    implements `begin`."""

    tasks = ("base", "causal-lm")
    causal = False

    config: CPMConfig
    relative: nn.Module

    # {optional input of each token: its default}.
    input_defaults: ClassVar[Mapping[str, int]] = {"context": 0, "span": 0, "segment": 0}

    def make_layers(self, scaled: bool, shrink: float = 1.0, **options: Any) -> nn.ModuleList:
        """The blocks. scaled: build ScaledBlocks; options: of SelfAttention."""
        c = self.config
        width = c.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(width, c.norm_eps)

        def block() -> nn.Module:
            attn = SelfAttention(width, c.num_heads, c.dropout, head_dim=c.head_dim, bias=False, **options)
            mlp = GatedMLP(width, c.intermediate_size, "gelu", dropout=c.dropout)
            if scaled:
                return ScaledBlock(attn, mlp, norm, c.dropout, shrink)
            return PreNormBlock(attn, mlp, norm, c.dropout)

        return nn.ModuleList(block() for _ in range(c.num_layers))

    def lm_head(self, task: str, scaled: bool) -> nn.Module | None:
        """The head over the vocabulary, tied or not; scaled: with the factor 1 / sqrt(hidden_size)."""
        c = self.config
        if task != "causal-lm":
            return None
        return CausalLM(c.hidden_size, c.vocab_size, c.tie_embeddings, scale=c.hidden_size**-0.5 if scaled else 1.0)

    def token_segments(self, batch: Batch, ctx: Packed, of_prompt: Sequence[int] = ()) -> Tensor:
        """(T, len(input_defaults)) integers: the inputs with these names; of_prompt: their values in the model's own
        prompt.

        Raises:
            ValueError: one has not the shape of the input; the message gives all shapes.
        """
        device, defaults = ctx.cu_seqlens.device, self.input_defaults
        given = [batch.get(name, torch.full(ctx.shape, value, device=device)) for name, value in defaults.items()]
        if any(tuple(value.shape) != ctx.shape for value in given):
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in zip(defaults, given, strict=True))
            raise ValueError(f"got {shapes} beside input of shape {ctx.shape}; they must agree")
        # Filled on the device, because copying numbers from the host would synchronise.
        prompt = [torch.full((self.prefix_tokens,), value, device=device) for value in of_prompt]
        prefix = torch.stack(prompt, -1) if prompt else None
        return ctx.unpad(torch.stack([value.long() for value in given], -1), prefix=prefix)

    @staticmethod
    def gathered(ctx: Packed, x: Tensor) -> Tensor:
        """x (T, ...) for all tokens, gathered if several ranks share them."""
        return x if ctx.split is None else ctx.split.gather(x)

    def set_attention_bias(self, ctx: Packed, segments: Segments | None) -> None:
        """Set the attention mask, and the biases for distances and segments."""
        ctx.segments = segments
        bias = self.relative(ctx.longest)
        ctx.bias, ctx.segment_bias = bias if isinstance(bias, tuple) else (bias, None)
        # Without segments, layers are causal.
        mask = Mask(segments is None, bias=ctx.bias, segments=segments, segment_bias=ctx.segment_bias)
        ctx.rectangles = shared_rectangles(ctx, mask)

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"relative": "partial"}

    def stage_homes(self) -> dict[str, Sequence[int]]:
        return super().stage_homes() | {"relative": range(len(self.units))}

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
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_log_probs: bool = False,
        output_hidden_states: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> ModelOutput:
        """Run the model; arguments that are not named here are Decoder's.

        Args:
            attention_mask: (batch, seq), 1 at tokens and 0 at padding; or length: (batch,) tokens of each row, with
                padding after them.
            context: as input_ids, 1 at context tokens, to which all tokens attend and which attend only to each other;
                0 at tokens that also attend to earlier ones, as in generation. None: 0; CPM-Ant: 1, as in transformers.
            span: as input_ids, number of the part that a token belongs and attends to; a prompt is in 0. None: 0.
            segment: as input_ids, 0 to segment_types - 1, the type of a token; a prompt has 0. None: 0; CPM-Ant: 2.
                CPM-1 has none.
            labels: as input_ids; the model shifts them (transformers' CpmAntForCausalLM does not).

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, length=length, context=context, span=span,
            segment=segment, inputs_embeds=inputs_embeds, labels=labels, past_key_values=past_key_values, cache=cache,
            use_cache=use_cache, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, loss_counts=loss_counts,
            num_items_in_batch=num_items_in_batch, output_logits=output_logits, logits_to_keep=logits_to_keep,
            output_log_probs=output_log_probs, output_hidden_states=output_hidden_states,
            soft_targets=soft_targets,
        )  # fmt: skip
        return self.run_checked(batch)

    def run_checked(self, batch: dict[str, Any]) -> ModelOutput:
        """`run`, after checking the inputs of all CPM models."""
        self.check_inputs(batch)
        if "length" in batch:
            batch["attention_mask"] = self._mask_of(batch.pop("length"), batch)
        return super().run_checked(batch)

    def check_inputs(self, batch: Batch) -> None:
        """Raise ValueError for inputs whose dtype or values the model does not support."""
        for name in ("length", *self.input_defaults):
            if name in batch:
                check_whole_numbers(name, batch[name])
        if "context" in batch:
            check_range("context", batch["context"], 0, 1)
        if "segment" in batch:
            self.check_segments(batch)

    def check_segments(self, batch: Batch) -> None:
        if (kinds := getattr(self.config, "segment_types", None)) is None:
            raise ValueError(f"segment: {self.config.model_type} has no segments; leave it out")
        check_range("segment", batch["segment"], 0, kinds - 1, "segment_types")

    @staticmethod
    def _mask_of(length: Tensor, batch: Batch) -> Tensor:
        given = batch.get("input_ids", batch.get("inputs_embeds"))
        for other in ("attention_mask", "cu_seqlens"):
            if other in batch:
                raise ValueError(f"length: pass it or {other}, not both")
        if given is None or given.dim() < 2 or tuple(length.shape) != (given.shape[0],):
            raise ValueError(f"length: got shape {tuple(length.shape)}, expected one number for each row of input_ids")
        check_range("length", length, 0, given.shape[1], "tokens of a row")
        return (torch.arange(given.shape[1], device=length.device) < length[:, None]).long()

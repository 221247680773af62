"""GPT-2 (Radford et al. 2019), after transformers' GPT2Model and its heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.loss import SoftTargets
from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.cache import KVCache
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import CausalLM
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.base import Model
from modelcenter.models.cross_attention import INPUTS, CrossAttentionMixin
from modelcenter.models.decoder import Decoder
from modelcenter.models.double_heads import DoubleHeads, flatten_batch
from modelcenter.models.initial_values import scaled_residuals
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.outputs import ModelOutput

# transformers' default fields of the second head of "double-heads", a linear layer with one output.
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_proj_to_labels": True,
    "summary_activation": None,
}


@dataclass(kw_only=True)
class GPT2Config(ModelConfig):
    """Fields of GPT-2; sizes count elements, dropouts are probabilities.

    cross_attention: tokens also attend to an encoder's hidden states, which the caller gives.
    """

    model_type: ClassVar[str] = "gpt2"

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int | None = None  # 4 * hidden_size
    hidden_act: str = "gelu_new"
    max_positions: int = 1024
    norm_eps: float = 1e-5
    dropout: float = 0.1
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    choice_dropout: float = 0.1
    scale_attention: bool = True
    scale_attention_by_layer: bool = False
    cross_attention: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", f"a multiple of num_heads={self.num_heads}")
        self.require_one_of("hidden_act", ACTIVATIONS)
        self.require_probabilities("dropout", "embedding_dropout", "attention_dropout", "choice_dropout")

    def attention_scale(self, layer: int) -> float:
        """Factor of the scores of layer 0, 1, ..."""
        scale = (self.hidden_size // self.num_heads) ** -0.5 if self.scale_attention else 1.0
        return scale / (layer + 1) if self.scale_attention_by_layer else scale

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        if self.scale_attention_by_layer:
            raise ValueError(
                f"with scale_attn_by_inverse_layer_idx a layer of {self.model_type} depends on its number, which "
                "changes"
            )
        return super().fields_of_kept_layers(numbers, of_decoder)


class GPT2(CrossAttentionMixin, Decoder):
    """GPT-2 with the head of `task`. Parameter names in the body do not depend on the task.

    "double-heads" has a language model and a multiple-choice head: its inputs have a dimension of choices, and it
    returns two losses.
    """

    config_class = GPT2Config
    bounded = True
    tasks = (*Decoder.tasks, "double-heads")

    config: GPT2Config

    def __init__(self, config: GPT2Config, task: str = "base"):
        super().__init__(config, task)
        c, width = config, config.hidden_size
        self.embed = Embedding(c.vocab_size, width)
        self.position = Embedding(c.max_positions, width)
        self.embed_dropout = Dropout(c.embedding_dropout)
        self.layers = nn.ModuleList(
            PreNormBlock(
                SelfAttention(width, c.num_heads, c.attention_dropout, causal=True, scale=c.attention_scale(i)),
                MLP(width, c.intermediate_size or 4 * width, c.hidden_act),
                lambda: LayerNorm(width, c.norm_eps),
                c.dropout,
                CrossAttention(width, c.num_heads, c.attention_dropout, scale=c.attention_scale(i))
                if c.cross_attention
                else None,
            )
            for i in range(c.num_layers)
        )
        self.final_norm = LayerNorm(width, c.norm_eps)
        self.head = self.make_head(task, 0.1 if c.classifier_dropout is None else c.classifier_dropout)

    def make_head(self, task: str, *args: Any, **kwargs: Any) -> nn.Module | None:
        if task != "double-heads":
            return super().make_head(task, *args, **kwargs)
        self.config.require_extra("double-heads", SUMMARY)
        lm = super().make_head("causal-lm")
        assert isinstance(lm, CausalLM)
        return DoubleHeads(lm, self.config.hidden_size, self.config.choice_dropout)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch)
        x = self.input_states(batch, ctx, self)
        self.attend_to_encoder(batch, ctx)
        return x, ctx

    def input_states(self, batch: Batch, ctx: Packed, owner: Model) -> Tensor:
        """(T, hidden_size): the input of the first unit; owner: this model, or the model of which it is a side."""
        self.check_positions(batch, ctx, self.config.max_positions)
        positions = self.look_up(self.position, ctx.positions, ctx.positions, "position_ids", "max_positions")
        x = owner.embedded(batch, ctx, self.embed) + positions
        if (types := batch.get("token_type_ids")) is not None:  # ids of the vocabulary
            rows, own = ctx.unpad(types, name="token_type_ids"), ctx.layout.prefix_tokens
            type_states = self.look_up(self.embed, rows, types, "token_type_ids")
            x = x + (type_states if own is None else type_states.index_fill(0, own, 0.0))
        return self.embed_dropout(x, ctx)

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        if self.task != "double-heads":
            return super().end(x, ctx, batch)
        out = self.head(x, ctx, batch, self.counts(batch), self.embed.weight, self.wants_logits(batch))
        return ModelOutput((name, out[name]) for name in ("loss", "mc_loss", "logits", "mc_logits") if name in out)

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        if self.task == "double-heads":
            plan |= {f"head.lm.{name}": "vocab" for name, _ in self.head.lm.named_parameters()}
        return plan

    def empty_batch(self) -> dict[str, Any]:
        batch = super().empty_batch()
        if self.task == "double-heads":
            batch |= {"labels": batch["input_ids"], "mc_labels": batch["input_ids"][0]}
        return batch

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        mc_token_ids: Tensor | None = None,
        mc_labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        encoder_cu_seqlens: Tensor | None = None,
        encoder_max_seqlen: int | None = None,
        prompt_lengths: Tensor | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_log_probs: bool = False,
        output_hidden_states: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> ModelOutput:
        """Run the model; arguments that are not listed here are those of Decoder.forward.

        Args:
            input_ids: for task "double-heads" (batch, choices, seq), as all inputs of its shape; or packed (1, T), with
                the choices of an example as consecutive sequences.
            token_type_ids: as input_ids, tokens whose embeddings are added to those of the text.
            encoder_hidden_states: (batch, encoder seq, hidden_size), or packed (1, T, hidden_size) with
                encoder_cu_seqlens: what a model with cross_attention attends to; a cache keeps them. Without them
                tokens attend to their own text only. encoder_attention_mask: (batch, encoder seq), 1 at tokens.
            mc_token_ids: (batch, choices) the column of the token by which each choice is scored, or its offset in a
                packed sequence; None: the last token. mc_labels: (batch,) the right choice.

        Returns:
            For "double-heads": loss (of the language model), mc_loss, logits (batch, choices, seq, vocab_size) and
            mc_logits (batch, choices).

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, inputs_embeds=inputs_embeds, encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask, labels=labels, mc_token_ids=mc_token_ids,
            mc_labels=mc_labels, start_positions=start_positions, end_positions=end_positions,
            past_key_values=past_key_values, cache=cache, use_cache=use_cache, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, encoder_cu_seqlens=encoder_cu_seqlens, encoder_max_seqlen=encoder_max_seqlen,
            prompt_lengths=prompt_lengths, loss_counts=loss_counts, num_items_in_batch=num_items_in_batch,
            output_logits=output_logits, logits_to_keep=logits_to_keep,
            output_log_probs=output_log_probs, output_hidden_states=output_hidden_states,
            soft_targets=soft_targets,
        )  # fmt: skip
        if self.task != "double-heads":
            return self.run_checked(batch)
        if any(name in batch for name in INPUTS):
            raise ValueError(f"{INPUTS[0]}: not with double heads; load the model with task causal-lm")
        if use_cache or "past_key_values" in batch:
            raise ValueError("use_cache, past_key_values: not with double heads; load the model with task causal-lm")
        return self.run_checked(flatten_batch(batch))

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        return scaled_residuals(super().init_spec(), self.config.num_layers)

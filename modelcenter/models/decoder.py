"""The heads, inputs and outputs that decoder-only language models share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import IGNORE_INDEX, SoftTargets
from modelcenter.layers.cache import KVCache
from modelcenter.layers.heads import CausalLM, ExtractiveQA, SequenceClassifier, TokenClassifier
from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.layout import flat_positions
from modelcenter.layers.packing import Packed
from modelcenter.layers.sequences import Sequences
from modelcenter.models.base import Model
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.outputs import ModelOutput


class Decoder(Model):
    """Base of causal models. A subclass builds `embed`, `layers`, `final_norm` and `head`, and implements `begin`.

    Classification reads one token of each sequence, see `classified_tokens`.
    """

    tasks: ClassVar[tuple[str, ...]] = (
        "base",
        "embedding",
        "multi-vector",
        "causal-lm",
        "sequence-classification",
        "token-classification",
        "question-answering",
    )
    # Whether the head over the vocabulary has a bias (GPT-J).
    lm_bias: ClassVar[bool] = False
    # Whether no token attends to a later one.
    causal: ClassVar[bool] = True
    # In a causal model only the last token has seen the whole text.
    usual_pooling = "last"

    layers: nn.ModuleList
    final_norm: nn.Module

    def make_head(
        self, task: str, dropout: float = 0.0, logit_scale: float = 1.0, width: int | None = None
    ) -> nn.Module | None:
        """The head of `task`.

        Args:
            dropout: before a token classifier. width: of the hidden states that the head reads; None: hidden_size.
            logit_scale: factor of the hidden states that enter the vocabulary projection.
        """
        c: Any = self.config
        width = width or c.hidden_size
        match task:
            case "causal-lm":
                return CausalLM(width, c.vocab_size, c.tie_embeddings, self.lm_bias, logit_scale)
            case "sequence-classification":
                return SequenceClassifier(width, c.num_labels, 0.0, c.problem_type, bias=False)
            case "token-classification":
                return TokenClassifier(width, c.num_labels, dropout)
            case "question-answering":
                return ExtractiveQA(width)
            case "embedding":
                return self.make_embedding_head()
            case "multi-vector":
                return self.make_token_head()
        return None

    @property
    def units(self) -> nn.ModuleList:
        return self.layers

    def _pack_tokens(self, batch: Batch, prefix: str, source: Tensor, cache: KVCache | None) -> Packed:
        """Without a mask, cu_seqlens or a cache, a row is split into sequences wherever its positions do not increase
        by 1, as in transformers."""
        ctx = super()._pack_tokens(batch, prefix, source, cache)
        told = any(batch.get(name) is not None for name in ("attention_mask", "cu_seqlens", "encoder_hidden_states"))
        by_token = self.causal and self.task in ("base", "causal-lm", "token-classification")
        if (positions := batch.get("position_ids")) is None or told or cache is not None or self.prefix_tokens:
            return ctx
        return split_at_jumps(ctx, positions) if by_token else ctx

    def without_unneeded(self, ctx: Packed, batch: Batch) -> Packed:
        """`ctx` without the tokens after the last one of each sequence that predicts a label (the end of a
        conversation).

        Unchanged if ranks share the tokens, because they have agreed on a number, and on a GPU, because finding the
        tokens would synchronise.
        """
        shared = self.token_split is not None or self.pipeline is not None
        if shared or self.task != "causal-lm" or not self.causal or ctx.cu_seqlens.device.type != "cpu":
            return ctx
        logits = self.wants_logits(batch) and not batch.get("output_log_probs")
        if logits or batch.get("labels") is None or batch.get("output_hidden_states"):
            return ctx
        return drop_after_last(ctx, ctx.unpad(self.head.targets(batch), IGNORE_INDEX) != IGNORE_INDEX)

    def finish(self, x: Tensor) -> Tensor:
        return self.final_norm(x)

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        match self.task:
            case "causal-lm":
                return self.head.reads(ctx, batch, self.wants_logits(batch))
            case "sequence-classification":
                return self.classified_tokens(ctx, batch)
            case "embedding":
                return self.pooled_tokens(ctx, batch)
        return None

    def classified_tokens(self, ctx: Packed, batch: Batch) -> Tensor:
        """(n,) index of the token by which each sequence is classified: the last one that is not pad_token_id, as in
        transformers, even if pad_token_id is also a token of the text (as an end-of-text token that is used to pad)."""
        last, ids = ctx.last_tokens(), batch.get("input_ids")
        pad = self.config.special_tokens().get("pad_token_id")
        if ids is None or pad is None:
            return last
        found = ctx.last_of(ids != pad)
        return torch.where(found < 0, last, found)

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        if self.task == "base":
            return ModelOutput(last_hidden_state=ctx.repad(x))
        if self.task == "embedding":
            return ModelOutput(embeddings=self.embeddings(x, ctx, batch))
        if self.task == "multi-vector":
            return self.token_vectors(x, ctx)
        counts, head = self.counts(batch), self.head
        match self.task:
            case "causal-lm":
                out = head(x, ctx, batch, counts["loss"], self.embed.weight, self.wants_logits(batch))
            case "sequence-classification":
                out = head(ctx.select(x, self.classified_tokens(ctx, batch)), batch, counts, ctx)
            case _:
                out = head(x, ctx, batch, counts)
        return self.ordered(out)

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        if self.task == "causal-lm":
            own = ("bias", "weight")  # weight is None if it is tied to the embedding
            plan |= {f"head.{name}": "vocab" for name in own if getattr(self.head, name) is not None}
        return plan

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        prompt_lengths: Tensor | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_log_probs: bool = False,
        output_hidden_states: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> ModelOutput:
        """Run the model.

        Args:
            input_ids: (batch, seq), or packed (1, T) with cu_seqlens.
            attention_mask: (batch, seq), 1 at tokens and 0 at padding. position_ids: as input_ids.
            inputs_embeds: (batch, seq, hidden_size) in place of input_ids.
            labels: as input_ids for token tasks, (batch,) for classification; -100: none. A causal model predicts label
                t + 1 from token t; the model shifts the labels.
            start_positions, end_positions: (batch,).
            past_key_values: the cache that an earlier forward with use_cache=True returned. input_ids are then the new
                tokens, the same number in each row. cache: its name in transformers from 5.24 on.
            cu_seqlens: (sequences + 1,) int32 offsets of packed input. max_seqlen: tokens of the longest sequence;
                None: computed from cu_seqlens.
            prompt_lengths: (sequences,), for embeddings: how many tokens at the start of each are not pooled.
            loss_counts: {term: items} of the whole global batch, see Model.loss_counts. num_items_in_batch: the same
                from HF Trainer, for a loss with one term; if labels are lists, it counts every number.
            soft_targets: a teacher's predictions at the labels of a language model. They take a share of the loss, and
                the output also has label_loss and teacher_loss.
            output_logits: None: no vocabulary logits in training with labels.
            logits_to_keep: 1: logits of each sequence's last token only, (batch, 1, vocab_size). 0: of all tokens.
            output_log_probs: a causal model returns log_probs (sequences,), the log-probability of each sequence's
                labels, in place of loss and logits.
            output_hidden_states: also return hidden_states, before and after each layer, and last_hidden_state.

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
            labels=labels, start_positions=start_positions, end_positions=end_positions,
            past_key_values=past_key_values, cache=cache, use_cache=use_cache, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, prompt_lengths=prompt_lengths, loss_counts=loss_counts,
            num_items_in_batch=num_items_in_batch, output_logits=output_logits, logits_to_keep=logits_to_keep,
            output_log_probs=output_log_probs, output_hidden_states=output_hidden_states,
            soft_targets=soft_targets,
        )  # fmt: skip
        return self.run_checked(batch)


def split_at_jumps(ctx: Packed, position_ids: Tensor) -> Packed:
    """Split rows without padding into sequences wherever positions do not increase by 1, as in transformers
    (find_packed_sequence_indices). Synchronises with a GPU."""
    batch, seq = ctx.shape
    if not seq:
        return ctx
    places = flat_positions(host_copy(position_ids), ctx.shape)
    begins = torch.diff(places, prepend=places[:1]) != 1
    begins[::seq] = True
    starts = begins.nonzero().flatten().tolist()
    if len(starts) == batch:
        return ctx
    lengths = [b - a for a, b in zip(starts, [*starts[1:], batch * seq], strict=True)]
    return replace(ctx, sequences=Sequences.of_lengths(lengths, ctx.positions.device))


def drop_after_last(ctx: Packed, used: Tensor) -> Packed:
    """Cut each sequence after its last token that is `used` (T,); a sequence without such a token becomes empty.

    `max_seqlen`, on which rotary angles may depend, does not change.
    """
    tokens, starts, ends = used.nonzero().flatten(), ctx.cu_seqlens[:-1].long(), ctx.cu_seqlens[1:].long()
    if not tokens.numel():
        return ctx
    before = torch.searchsorted(tokens, ends)  # used tokens up to the end of each sequence
    last = torch.maximum(tokens[(before - 1).clamp(min=0)] + 1, starts)
    last = torch.where(before > 0, last, starts)
    seqlens = last - starts
    keep = torch.arange(used.numel()) < torch.repeat_interleave(last, ends - starts, output_size=used.numel())
    index = keep.nonzero().flatten()
    if index.numel() == used.numel():
        return ctx
    cu = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0)).to(ctx.cu_seqlens.dtype)
    indices = ctx.layout.indices
    return replace(
        ctx,
        sequences=Sequences(cu, ctx.max_seqlen, seqlens.tolist()),
        layout=replace(ctx.layout, indices=index if indices is None else indices.index_select(0, index)),
        positions=ctx.positions.index_select(0, index),
    )

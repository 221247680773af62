"""The two sides, inputs, heads and outputs that encoder-decoders share.

    x, memory = self.begin(batch)              # the encoder's tokens
    y, ctx = self.begin_decoder(batch)         # the decoder's
    x = each unit of self.encoder.layers
    ctx.attend_to(x, memory)
    y = each unit of self.decoder.layers
    return self.end(y, ctx, batch)

In generation the encoder runs in the first forward only; the cache keeps its keys for cross-attention layers. Pipeline
stages pass on the hidden states of both sides, so that the first stage looks up all embeddings: the table may be half
of the model, and a middle stage would need a copy of it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import SoftTargets
from modelcenter.layers.cache import KVCache, past_of
from modelcenter.layers.heads import (
    DenseClassifier,
    ExtractiveQA,
    Seq2SeqLM,
    TokenClassifier,
)
from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.packing import Packed
from modelcenter.models.decoder_inputs import DecoderInputs
from modelcenter.models.inputs import HEAD_INPUTS, Batch, given_inputs
from modelcenter.models.outputs import ModelOutput

CACHE_INPUTS = ("past_key_values", "use_cache")
DECODER_INPUTS = tuple(
    f"decoder_{x}" for x in ("input_ids", "inputs_embeds", "attention_mask", "cu_seqlens", "max_seqlen")
)
ENCODER_TASKS = ("token-classification", "text-encoding", "embedding")  # tasks without a decoder


class Side(nn.Module):
    """The encoder or the decoder: blocks, a final norm, its own embedding table if it has one, and the modules that a
    subclass adds."""

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, embed: nn.Embedding | None = None):
        super().__init__()
        if embed is not None:
            self.embed = embed
        self.layers = layers
        self.final_norm = final_norm


@dataclass
class _SideRun:
    """The state of one side in a forward.

    Attributes:
        ctx: its tokens; None: the task has no such side, or it is an encoder whose keys are cached.
        states: hidden states (T, hidden_size) on this rank; the next unit reads the last.
        runs: whether its units run; False for an encoder whose final states the caller gave.
        all_states: keep the states after every unit, not only the last.
    """

    ctx: Packed | None = None
    states: list[Tensor] = field(default_factory=list)
    runs: bool = True
    all_states: bool = False


def _encoder_states(given: Any) -> Tensor:
    return given if isinstance(given, Tensor) else given[0]


class EncoderDecoder(DecoderInputs):
    """Base of models with an encoder and a decoder. A subclass builds `embed`, `encoder`, `decoder` and `head`, and
    overrides what precedes (`before_units`) and follows (`after_units`) the units of a side.

    Token classification, text encoding and embedding have no decoder. For sequence classification and question
    answering the decoder reads the input shifted right by one; a sequence is classified by the decoder's state at its
    last end-of-sequence token.
    """

    is_encoder_decoder = True
    tasks: ClassVar[tuple[str, ...]] = (
        "base",
        "seq2seq-lm",
        "sequence-classification",
        "token-classification",
        "question-answering",
        "text-encoding",
    )

    head_inputs = {task: x if task in ENCODER_TASKS else (*x, *DECODER_INPUTS) for task, x in HEAD_INPUTS.items()}

    encoder: Side
    decoder: Side | None

    def make_head(self, task: str, dropout: float = 0.0, logit_scale: float = 1.0) -> nn.Module | None:
        """The head of `task`. dropout: before a classifier. logit_scale: factor of the hidden states that enter the
        vocabulary projection."""
        c: Any = self.config
        match task:
            case "seq2seq-lm":
                return Seq2SeqLM(c.hidden_size, c.vocab_size, c.tie_embeddings, scale=logit_scale)
            case "sequence-classification":
                return DenseClassifier(c.hidden_size, c.num_labels, dropout, c.problem_type)
            case "token-classification":
                return TokenClassifier(c.hidden_size, c.num_labels, dropout)
            case "question-answering":
                return ExtractiveQA(c.hidden_size)
            case "embedding":
                return self.make_embedding_head()
        return None

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    def units(self) -> nn.ModuleList:
        """The units of both sides, in order."""
        return nn.ModuleList([*self.encoder.layers, *(() if self.decoder is None else self.decoder.layers)])

    def set_attention_bias(self, ctx: Packed, side: Side) -> None:
        """Set the relative position bias that the units of a side share."""

    def set_positions(self, x: Tensor, ctx: Packed, side: Side) -> None:
        """Set the rotary angles of a side's tokens, whose hidden states are x."""

    def table_of(self, side: Side) -> nn.Embedding:
        """The embedding table of a side: its own, or the one that both share."""
        table: nn.Embedding = getattr(side, "embed", self.embed)
        return table

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        """Embeddings (T, hidden_size) -> the inputs of a side's first unit."""
        return x

    def after_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        """The output (T, hidden_size) of a side's last unit -> its final hidden states."""
        return side.final_norm(x)

    def returned_states(self, states: list[Tensor], ctx: Packed) -> tuple[Tensor, ...]:
        """The hidden states of a side, each (T, hidden_size) and the last of them final, in the form of the outputs."""
        return tuple(ctx.repad(state) for state in states)

    def bridge_states(self, states: Tensor) -> Tensor:
        """The encoder's final states (T, hidden_size) -> the states to which the decoder attends."""
        return states

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        """The encoder's embeddings, or its final states if the caller gives them."""
        ctx = self.pack_encoder(batch)
        if (given := batch.get("encoder_outputs")) is not None:
            return ctx.unpad(_encoder_states(given)), ctx
        return self.before_units(self.embedded(batch, ctx, self.table_of(self.encoder)), ctx, self.encoder), ctx

    def begin_decoder(self, batch: Batch) -> tuple[Tensor, Packed]:
        """The decoder's embeddings.

        Raises:
            ValueError: its inputs are neither given nor derivable, or they do not fit together.
        """
        assert self.decoder is not None
        batch = self.decoder_inputs(batch)
        ctx = self.pack(batch, "decoder_")
        table = self.table_of(self.decoder)
        return self.before_units(self.embedded(batch, ctx, table, "decoder_"), ctx, self.decoder), ctx

    def pack_encoder(self, batch: Batch) -> Packed:
        """The encoder's tokens, or those of the states that the caller gives."""
        batch = {name: value for name, value in batch.items() if name not in CACHE_INPUTS}
        if (given := batch.pop("encoder_outputs", None)) is not None:
            if self.tuned_prompt is not None:
                raise ValueError(
                    "encoder_outputs: the encoder's states do not hold those of the learnt prompt; pass input_ids"
                )
            batch = {**batch, "input_ids": None, "inputs_embeds": _encoder_states(given)}
        return self.pack(batch)

    def run(self, batch: Batch) -> ModelOutput:
        """Run the protocol (see the module's docstring); under pipeline parallelism, this rank's part of it."""
        stage, cache = self.pipeline, past_of(batch)
        if cache is not None:
            batch = {**batch, "past_key_values": cache}
        encoder, decoder = self._begin_sides(batch, cache)
        depth, behind = len(self.encoder.layers), 0 if self.decoder is None else len(self.decoder.layers)
        part = range(depth + behind) if stage is None else stage.part
        if stage is not None and not stage.first:
            of_encoder, of_decoder = self._shapes_of_sides(encoder, decoder, part.start)
            received = stage.receive(of_encoder + of_decoder)
            encoder.states, decoder.states = received[: len(of_encoder)], received[len(of_encoder) :]
        if part.start < depth:
            self._run_encoder(encoder, part)
        if part.stop > depth:
            self._run_decoder(decoder, encoder, range(max(0, part.start - depth), part.stop - depth))
        if cache is not None and (stage is None or stage.leaves):
            cache.end()
        if stage is not None and not stage.last:
            of_encoder, of_decoder = self._shapes_of_sides(encoder, decoder, part.stop)
            return stage.hand_over([*encoder.states, *decoder.states], of_encoder + of_decoder)
        if decoder.ctx is None:
            return self._encoder_output(batch, encoder)
        return self._decoder_output(batch, encoder, decoder, cache)

    def _begin_sides(self, batch: Batch, cache: KVCache | None) -> tuple[_SideRun, _SideRun]:
        """The tokens of the encoder and the decoder, and their first hidden states if this rank computes them."""
        all_states, first = bool(batch.get("output_hidden_states")), self.pipeline is None or self.pipeline.first
        runs = batch.get("encoder_outputs") is None
        encoder, decoder = _SideRun(runs=runs, all_states=runs and all_states), _SideRun(all_states=all_states)
        if cache is None or not cache.lengths:
            if first:
                x, encoder.ctx = self.begin(batch)
                encoder.states = [x]
            else:
                encoder.ctx = self.pack_encoder(batch)
        if self.decoder is not None:
            if first:
                x, decoder.ctx = self.begin_decoder(batch)
                decoder.states = [x]
            else:
                decoder.ctx = self.pack(self.decoder_inputs(batch), "decoder_")
        memory, ctx = encoder.ctx, decoder.ctx
        if memory is not None and ctx is not None and ctx.num_sequences != memory.num_sequences:
            raise ValueError(
                f"the encoder has {memory.num_sequences} sequences and the decoder {ctx.num_sequences}; "
                "input_ids and decoder_input_ids (or labels) must agree in rows; packed ones take cu_seqlens and "
                "decoder_cu_seqlens"
            )
        return encoder, decoder

    def _shapes_of_sides(
        self, encoder: _SideRun, decoder: _SideRun, units: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Shapes of the hidden states of each side that a stage sends to the next, after `units` units of both."""
        depth = len(self.encoder.layers)
        sides = (encoder, min(units, depth)), (decoder, max(0, units - depth))
        of_encoder, of_decoder = (
            [] if side.ctx is None else self._stage_shapes(side.ctx, done, side.all_states) for side, done in sides
        )
        return of_encoder, of_decoder

    def _run_encoder(self, side: _SideRun, part: range) -> None:
        """Run the encoder's units in `part`, and after the last unit the modules that follow."""
        if side.ctx is None or not side.runs:
            return
        self.set_attention_bias(side.ctx, self.encoder)
        self.set_positions(side.states[-1], side.ctx, self.encoder)
        units = [*self.encoder.layers][part.start : part.stop]
        side.states = self.run_units(units, side.states, side.ctx, side.all_states)
        if part.stop >= len(self.encoder.layers):
            side.states[-1] = self.after_units(side.states[-1], side.ctx, self.encoder)

    def _run_decoder(self, side: _SideRun, encoder: _SideRun, part: range) -> None:
        """Run the decoder's units in `part`, which attend to the final states of the encoder."""
        assert self.decoder is not None and side.ctx is not None
        if encoder.ctx is not None:
            seen, split = self.bridge_states(encoder.states[-1]), self.token_split
            side.ctx.attend_to(seen if split is None else split.to_units(seen), encoder.ctx)
        self.set_attention_bias(side.ctx, self.decoder)
        self.set_positions(side.states[-1], side.ctx, self.decoder)
        units = [*self.decoder.layers][part.start : part.stop]
        side.states = self.run_units(units, side.states, side.ctx, side.all_states)

    def _encoder_output(self, batch: Batch, side: _SideRun) -> ModelOutput:
        """The output of a task without a decoder."""
        assert side.ctx is not None
        out = self.end(side.states[-1], side.ctx, batch)
        if side.all_states:
            out["hidden_states"] = self.returned_states(side.states, side.ctx)
            out["last_hidden_state"] = side.ctx.repad(side.states[-1])
        return out

    def _decoder_output(self, batch: Batch, encoder: _SideRun, decoder: _SideRun, cache: KVCache | None) -> ModelOutput:
        """The outputs of a task with a decoder, under transformers' names and in its order: those of the head, and the
        requested hidden states of both sides."""
        memory, ctx = encoder.ctx, decoder.ctx
        assert self.decoder is not None and ctx is not None
        x = decoder.states[-1] = self.after_units(decoder.states[-1], ctx, self.decoder)
        out = self.end(x, ctx, batch)
        if cache is not None:
            out["past_key_values"] = cache
        if decoder.all_states:
            out["decoder_hidden_states"] = self.returned_states(decoder.states, ctx)
        if memory is not None and (decoder.all_states or not self.training):
            out["encoder_last_hidden_state"] = memory.repad(encoder.states[-1])
        if memory is not None and encoder.all_states:
            out["encoder_hidden_states"] = self.returned_states(encoder.states, memory)
        if decoder.all_states:
            out["last_hidden_state"] = ctx.repad(x)  # last, as in Model.run
        return out

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        if self.task in ("base", "text-encoding"):
            return ModelOutput(last_hidden_state=ctx.repad(x))
        if self.task == "embedding":
            return ModelOutput(embeddings=self.embeddings(x, ctx, batch))
        counts, head = self.counts(batch), self.head
        match self.task:
            case "seq2seq-lm":
                out = head(x, ctx, batch, counts["loss"], self.embed.weight, self.wants_logits(batch))
            case "sequence-classification":
                out = head(ctx.select(x, self.classified_tokens(ctx, batch)), batch, counts, ctx)
            case _:
                out = head(x, ctx, batch, counts)
        return self.ordered(out)

    def classified_tokens(self, ctx: Packed, batch: Batch) -> Tensor:
        """(n,) index, among all tokens, of the last end-of-sequence token of each sequence, by which it is classified.

        Raises:
            ValueError: a sequence has none.
        """
        c: Any = self.config
        if (ids := batch.get("input_ids")) is None:
            raise ValueError("input_ids: sequence classification looks for the last eos_token_id in them; pass them")
        if tuple(ids.shape) != ctx.shape:
            raise ValueError(f"decoder_input_ids: got shape {ctx.shape}, expected that of input_ids {tuple(ids.shape)}")
        known = host_copy(ids)  # reading it does not synchronise
        if ctx.layout.indices is not None or known.device != host_copy(ctx.cu_seqlens).device:
            known = ids
        ends = [c.eos_token_id] if isinstance(c.eos_token_id, int) else c.eos_token_id
        last = ctx.last_of(functools.reduce(torch.logical_or, [known == end for end in ends]))
        if bool((last < 0).any()):
            raise ValueError(
                f"input_ids: row {int((last < 0).nonzero()[0])} has no end-of-sequence token (eos_token_id is "
                f"{c.eos_token_id}), by which this model classifies a sequence; tokenizers of this family add it"
            )
        return to_device(last, ids.device)

    # -- the rest of the protocol -------------------------------------------------------------------------------------

    def stage_homes(self) -> dict[str, Sequence[int]]:
        """As Model.stage_homes, for two consecutive lists of units. All units of a side read its other modules, except
        those whose names begin with "final"."""
        depth, count = len(self.encoder.layers), len(self.units)
        homes: dict[str, Sequence[int]] = {"embed": [0, count - 1] if self.ties_head else [0], "head": [count - 1]}
        for name, side, units in (
            ("encoder", self.encoder, range(depth)),
            ("decoder", self.decoder, range(depth, count)),
        ):
            if side is None:
                continue
            for own, module in side.named_children():
                if module is not side.layers:
                    homes[f"{name}.{own}"] = units[-1:] if own.startswith("final") else units
        return homes if self.head is not None else {k: v for k, v in homes.items() if k != "head"}

    def tp_plan(self) -> dict[str, str]:
        plan = {"embed": "vocab"}
        for pattern, style in super().tp_plan().items():
            if pattern.startswith("layers."):
                for side in ("encoder",) if self.decoder is None else ("encoder", "decoder"):
                    plan[f"{side}.{pattern}"] = style
        if self.decoder is not None:
            plan |= {f"decoder.layers.*.cross.{name}": "colwise" for name in "qkv"}
            plan["decoder.layers.*.cross.out"] = "rowwise"
        if self.task == "seq2seq-lm":
            plan |= {f"head.{name}": "vocab" for name, _ in self.head.named_parameters()}
        return plan

    def empty_batch(self) -> dict[str, Any]:
        batch = super().empty_batch()
        none = batch["input_ids"]
        if self.task == "seq2seq-lm":
            batch |= {"decoder_cu_seqlens": batch["cu_seqlens"], "decoder_max_seqlen": 0}
        elif self.task == "base":
            batch |= {"decoder_input_ids": none, "decoder_cu_seqlens": batch["cu_seqlens"], "decoder_max_seqlen": 0}
        return batch

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        decoder_cu_seqlens: Tensor | None = None,
        decoder_max_seqlen: int | None = None,
        prompt_lengths: Tensor | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> ModelOutput:
        """Run the model.

        Args:
            input_ids: (batch, seq), or packed (1, T) with cu_seqlens. attention_mask: (batch, seq), 1 at tokens and 0
                at padding. inputs_embeds: (batch, seq, hidden_size) in place of input_ids.
            global_attention_mask: as input_ids, for an LED: 1 at tokens with global attention, else 0; None: see there.
            decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds: the same for the decoder; None: derived
                from the labels or, for classification and question answering, from the input.
            encoder_outputs: (batch, seq, hidden_size), or a sequence with them as its first item, used instead of
                running the encoder; attention_mask or cu_seqlens must still give the positions of its tokens.
            labels: (batch, decoder seq), or packed (1, T) with decoder_cu_seqlens: the prediction target of each
                decoder token; -100: none. As input_ids for token classification; (batch,) for classification.
            start_positions, end_positions: (batch,).
            past_key_values: the cache that an earlier forward with use_cache=True returned. Then only decoder_input_ids
                are needed, the same number of new ones in each row: the cache has the keys of the encoder.
            cu_seqlens, decoder_cu_seqlens: (sequences + 1,) int32 offsets of packed input. max_seqlen,
                decoder_max_seqlen: tokens of the longest sequence; None: computed from them. One side may be packed and
                the other padded.
            prompt_lengths: (sequences,), for embeddings: how many tokens at the start of each are not pooled.
            loss_counts: {term: items} of the whole global batch, see Model.loss_counts. num_items_in_batch: the same
                from HF Trainer, for a loss with one term; if labels are lists, it counts every number.
            soft_targets: a teacher's predictions at the labels of a language model. They take a share of the loss, and
                the output also has label_loss and teacher_loss.
            output_logits: None: no vocabulary logits in training with labels.
            logits_to_keep: 1: logits of each decoder sequence's last token only. 0: of all tokens.

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask, global_attention_mask=global_attention_mask,
            inputs_embeds=inputs_embeds, decoder_inputs_embeds=decoder_inputs_embeds, encoder_outputs=encoder_outputs,
            labels=labels,
            start_positions=start_positions, end_positions=end_positions, past_key_values=past_key_values, cache=cache,
            use_cache=use_cache, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, decoder_cu_seqlens=decoder_cu_seqlens,
            decoder_max_seqlen=decoder_max_seqlen, prompt_lengths=prompt_lengths, loss_counts=loss_counts,
            num_items_in_batch=num_items_in_batch, output_logits=output_logits, logits_to_keep=logits_to_keep,
            output_hidden_states=output_hidden_states,
            soft_targets=soft_targets,
        )  # fmt: skip
        return self.run_checked(batch)

"""Decoders that may attend to an encoder: with `cross_attention`, their units attend to hidden states that the caller
passes (transformers' add_cross_attention).
"""

from typing import Any

from torch import Tensor

from modelcenter.layers.packing import Packed
from modelcenter.models.base import Model
from modelcenter.models.inputs import Batch

STATES = "encoder_hidden_states"
INPUTS = (STATES, "encoder_attention_mask", "encoder_cu_seqlens", "encoder_max_seqlen")


class CrossAttentionMixin(Model):
    """Base of such models. `begin` calls `attend_to_encoder` last, which refuses INPUTS without `cross_attention`."""

    def with_position_ids(self, batch: Batch) -> Batch:
        """The batch, with position_ids added unless they are 0, 1, 2, ... in each sequence."""
        return batch

    def attend_to_encoder(self, batch: Batch, ctx: Packed) -> None:
        """Set up attention to the encoder's tokens, if the batch has them and the cache does not.

        Call it after everything that is computed before the units, because it may split the rows.

        Raises:
            ValueError: the model has no cross-attention, or the states do not fit it or the batch.
        """
        c: Any = self.config
        states = batch.get(STATES)
        if states is None:
            if given := [name for name in INPUTS if batch.get(name) is not None]:
                raise ValueError(f"{given[0]}: of which states? Pass {STATES}, too")
            return
        if not c.cross_attention:
            raise ValueError(
                f"{STATES}: this model has no attention to an encoder (add_cross_attention is false); leave them out"
                + (", or load it with add_cross_attention=True" if "cross_attention" in c.field_names() else "")
            )
        if states.dim() != 3 or states.shape[2] != c.hidden_size:
            raise ValueError(
                f"{STATES}: got shape {tuple(states.shape)}, expected (batch, seq, {c.hidden_size}) or packed "
                f"(1, T, {c.hidden_size}) with encoder_cu_seqlens"
            )
        split = self.token_split
        if states.requires_grad and (self.pipeline is not None or (split is not None and split.size > 1)):
            raise ValueError(
                f"{STATES}: they want a gradient, of which each rank would have a part; use pp_size=1 and cp_size=1, "
                "or detach them"
            )
        if ctx.cache is not None and ctx.cache.remembers:
            return
        own = {name: batch[name] for name in INPUTS[1:] if batch.get(name) is not None}
        memory = self.pack({"encoder_inputs_embeds": states, **own}, "encoder_")
        if memory.num_sequences != ctx.num_sequences:
            raise ValueError(
                f"{STATES}: {memory.num_sequences} sequences beside {ctx.num_sequences} of input_ids; they must agree "
                "in rows; packed ones take encoder_cu_seqlens and cu_seqlens"
            )
        x = memory.unpad(states)
        ctx.attend_to(x if split is None else split.to_units(x), memory)

    def tp_plan(self) -> dict[str, str]:
        plan, c = super().tp_plan(), self.config
        if getattr(c, "cross_attention", False):
            plan |= {f"layers.*.cross.{name}": "colwise" for name in "qkv"}
            plan["layers.*.cross.out"] = "rowwise"
        return plan

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """See modelcenter.generation.generate.generate; encoder states have one row per prompt."""
        given = {STATES: encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
        if given := {name: value for name, value in given.items() if value is not None}:
            kwargs["other_inputs"] = {**(kwargs.get("other_inputs") or {}), **given}
        return super().generate(input_ids, attention_mask, *args, **kwargs)

"""An encoder and a decoder that were pretrained separately, after transformers' EncoderDecoderModel (Rothe et al. 2019,
arXiv:1907.12461): the encoder is BERT or RoBERTa; the decoder is one of these or GPT-2, with new cross-attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.loss import SoftTargets
from modelcenter.config import ModelConfig
from modelcenter.layers.block import unused
from modelcenter.layers.cache import KVCache
from modelcenter.layers.heads import DenseSeq2SeqLM, Seq2SeqLM
from modelcenter.layers.linear import Linear
from modelcenter.layers.packing import Packed
from modelcenter.models.bert import Bert
from modelcenter.models.encoder import EncoderConfig
from modelcenter.models.encoder_decoder import CACHE_INPUTS, EncoderDecoder
from modelcenter.models.gpt2 import GPT2, GPT2Config
from modelcenter.models.inputs import Batch, given_inputs
from modelcenter.models.outputs import ModelOutput
from modelcenter.models.roberta import Camembert, Roberta, XLMRoberta
from modelcenter.models.two_configs import TwoConfigs

SIDES: dict[str, Any] = {kind.config_class.model_type: kind for kind in (Bert, Roberta, XLMRoberta, Camembert, GPT2)}
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")


@dataclass(kw_only=True)
class ComposedConfig(TwoConfigs):
    """The configs of both sides, and the special tokens of generated texts. tie_embeddings is the decoder's."""

    model_type: ClassVar[str] = "encoder-decoder"
    kinds: ClassVar[dict[str, type[ModelConfig]]] = {kind: model.config_class for kind, model in SIDES.items()}

    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one, other = self.encoder, self.decoder
        reads = isinstance(one, EncoderConfig) and not one.is_decoder
        self.require(reads, "encoder", f"one of {', '.join(self.kinds)} but gpt2, with is_decoder false")
        writes = isinstance(other, (EncoderConfig, GPT2Config)) and other.cross_attention
        self.require(writes, "decoder", "one with cross_attention (add_cross_attention), and is_decoder")
        self.tie_embeddings = other.tie_embeddings

    @property
    def first_position(self) -> int:
        return getattr(self.encoder, "first_position", 0)


class Composed(EncoderDecoder):
    """An encoder and a decoder of two families, with the decoder's vocabulary in the head.

    If their widths differ, `bridge` projects the encoder's states to the decoder's width.
    """

    config_class = ComposedConfig
    tasks = ("seq2seq-lm",)
    bounded = True

    config: ComposedConfig
    encoder: Any
    decoder: Any

    def __init__(self, config: ComposedConfig, task: str = "seq2seq-lm"):
        super().__init__(config, task)
        one, c = config.encoder, config.decoder
        self.encoder = SIDES[one.model_type](one, "base")
        self.decoder = SIDES[c.model_type](c, "causal-lm")  # with this task, the body has no pooler
        self.decoder.head, self.decoder.task = None, "base"
        differ = one.hidden_size != c.hidden_size
        self.bridge = Linear(one.hidden_size, c.hidden_size) if differ else None
        if isinstance(c, EncoderConfig):
            self.head = DenseSeq2SeqLM(c.hidden_size, c.vocab_size, c.head_act, c.norm_eps, c.tie_embeddings)
        else:
            self.head = Seq2SeqLM(c.hidden_size, c.vocab_size, c.tie_embeddings)

    @property
    def embed(self) -> nn.Embedding:  # type: ignore[override]
        """The decoder's embedding table, which a tied head uses."""
        return self.decoder.embed

    @property
    def position(self) -> nn.Embedding:
        """The decoder's position table, which limits the length of generated texts."""
        return self.decoder.position

    # -- the protocol -------------------------------------------------------------------------------------------------

    def after_units(self, x: Tensor, ctx: Packed, side: Any) -> Tensor:
        return side.finish(x)

    def bridge_states(self, states: Tensor) -> Tensor:
        return states if self.bridge is None else self.bridge(states)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        if batch.get("encoder_outputs") is not None:
            return super().begin(batch)
        x, ctx = self._begin_side(
            self.encoder, {name: value for name, value in batch.items() if name not in CACHE_INPUTS}, ""
        )
        return unused(x, self.encoder.pooler), ctx

    def begin_decoder(self, batch: Batch) -> tuple[Tensor, Packed]:
        return self._begin_side(self.decoder, self.decoder_inputs(batch), "decoder_")

    def _begin_side(self, side: Any, batch: Batch, prefix: str) -> tuple[Tensor, Packed]:
        """The inputs of the units of a side."""
        own = {name: batch[prefix + name] for name in _INPUTS if batch.get(prefix + name) is not None}
        cache = {name: batch[name] for name in CACHE_INPUTS if name in batch}
        placed = side.with_position_ids({**own, **cache})
        named = {prefix + name: value for name, value in own.items()}
        ctx = self.pack({**named, **cache, "position_ids": placed.get("position_ids")}, prefix)
        return side.input_states(own, ctx, self), ctx

    def stage_homes(self) -> dict[str, Sequence[int]]:
        if self.bridge is not None:
            raise ValueError(
                f"{type(self).__name__} cannot be split into stages: its sides have {self.config.hidden_size} and "
                f"{self.config.decoder.hidden_size} columns; use pp_size=1"
            )
        last = len(self.units) - 1
        homes: dict[str, Sequence[int]] = {"head": [last]}
        for name, side in (("encoder", self.encoder), ("decoder", self.decoder)):
            for own, module in side.named_children():
                if module is not side.layers:
                    homes[f"{name}.{own}"] = [last] if own.startswith("final") else [0]
        return homes | ({"decoder.embed": [0, last]} if self.ties_head else {})

    def tp_plan(self) -> dict[str, str]:
        sides = (("encoder", self.encoder), ("decoder", self.decoder))
        plan = {f"{side}.{name}": style for side, model in sides for name, style in model.tp_plan().items()}
        rows = [name for name in ("weight", "bias") if getattr(self.head, name) is not None]
        return plan | {f"head.{name}": "vocab" for name in rows}

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """As in the two families; the head as the decoder's."""
        spec, std = super().init_spec(), self.config.decoder.initializer_range
        for name, (kind, *_) in spec.items():
            if name.startswith("head.") and kind == "normal":
                spec[name] = (kind, std)
        for side, model in (("encoder", self.encoder), ("decoder", self.decoder)):
            spec |= {f"{side}.{name}": start for name, start in model.init_spec().items()}
        return spec

    def resize_token_embeddings(
        self, size: int | None = None, pad_to_multiple_of: int | None = None, *, seed: int = 0
    ) -> nn.Embedding:
        """As Model.resize_token_embeddings, for both sides, which must have the same vocabulary size."""
        table = super().resize_token_embeddings(size, pad_to_multiple_of, seed=seed)
        self.encoder.config, self.decoder.config = self.config.encoder, self.config.decoder
        return table

    def word_tables(self) -> dict[str, nn.Embedding]:
        return {"encoder.embed": self.encoder.embed, "decoder.embed": self.decoder.embed}

    def looked_up_tables(self) -> list[nn.Embedding]:
        return [self.encoder.embed] if self.ties_head else list(self.word_tables().values())

    def shift_right(self, ids: Tensor, mask: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        for name in ("pad_token_id", "decoder_start_token_id"):
            needed = getattr(self.config, name) is not None
            self.config.require(needed, name, "a token: the decoder's inputs are made of the labels with it")
        return super().shift_right(ids, mask, ends)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        decoder_cu_seqlens: Tensor | None = None,
        decoder_max_seqlen: int | None = None,
        loss_counts: Mapping[str, Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> ModelOutput:
        """Run the model; arguments that are not listed here are those of EncoderDecoder.forward.

        Args:
            token_type_ids: as input_ids. position_ids, decoder_position_ids: as input_ids and decoder_input_ids.
            encoder_outputs: (batch, seq, the encoder's hidden_size).

        Raises:
            ValueError: the inputs do not fit together or the model; the message names the field.
        """
        batch = given_inputs(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask, decoder_position_ids=decoder_position_ids,
            inputs_embeds=inputs_embeds, decoder_inputs_embeds=decoder_inputs_embeds, encoder_outputs=encoder_outputs,
            labels=labels, past_key_values=past_key_values, cache=cache, use_cache=use_cache, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, decoder_cu_seqlens=decoder_cu_seqlens, decoder_max_seqlen=decoder_max_seqlen,
            loss_counts=loss_counts, num_items_in_batch=num_items_in_batch, output_logits=output_logits,
            logits_to_keep=logits_to_keep, output_hidden_states=output_hidden_states,
            soft_targets=soft_targets,
        )  # fmt: skip
        return self.run_checked(batch)

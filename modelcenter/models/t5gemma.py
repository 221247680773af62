"""T5Gemma (arXiv:2504.06225), after transformers' T5GemmaModel and its heads: an encoder and a decoder of Gemma 2's
blocks, each with its own sizes and embeddings; the encoder is bidirectional, the decoder has cross-attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.block import SandwichNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import Seq2SeqLM, SequenceClassifier, TokenClassifier
from modelcenter.layers.mlp import GatedMLP
from modelcenter.layers.norm import UnitOffsetRMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import Rotary
from modelcenter.models.encoder_decoder import ENCODER_TASKS, EncoderDecoder, Side
from modelcenter.models.gemma import scaled_by_width
from modelcenter.models.gemma2 import Gemma2Config
from modelcenter.models.inputs import Batch
from modelcenter.models.outputs import ModelOutput
from modelcenter.models.two_configs import TwoConfigs


@dataclass(kw_only=True)
class T5GemmaSideConfig(Gemma2Config):
    """Fields of a side: Gemma 2's; dropouts and tie_embeddings are those of the whole model."""

    model_type: ClassVar[str] = "t5_gemma_module"

    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1


@dataclass(kw_only=True)
class T5GemmaConfig(TwoConfigs):
    """Fields of T5Gemma; dropouts are probabilities. Fields that are None have the values of the decoder's config, and
    generated texts begin with its bos_token_id.

    tie_embeddings: the vocabulary projection is the decoder's embedding table.
    """

    model_type: ClassVar[str] = "t5gemma"
    kinds: ClassVar[dict[str, type[ModelConfig]]] = {T5GemmaSideConfig.model_type: T5GemmaSideConfig}

    dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float = 0.0
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    initializer_range: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("dropout", "attention_dropout", "classifier_dropout")
        of_decoder = {name: name for name in ("pad_token_id", "eos_token_id", "initializer_range")}
        for name, theirs in {**of_decoder, "decoder_start_token_id": "bos_token_id"}.items():
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.decoder, theirs))
        for name in ("pad_token_id", "decoder_start_token_id"):
            needed = getattr(self, name) is not None
            self.require(needed, name, "a token: the decoder's inputs are made of the labels with it")
            self.require_token(name, self.vocab_size)


class T5GemmaSide(Side):
    """A side with its embeddings, its rotary angles, and dropout before and after it."""

    embed: nn.Embedding

    def __init__(self, embed: nn.Embedding, layers: nn.ModuleList, final_norm: nn.Module, rotary: Rotary, p: float):
        super().__init__(layers, final_norm, embed)
        self.rotary = rotary
        self.embed_dropout, self.final_dropout = Dropout(p), Dropout(p)


class T5Gemma(EncoderDecoder):
    """T5Gemma with the head of `task`; encoder tasks have no decoder. Names in the body do not depend on the task."""

    config_class = T5GemmaConfig
    tasks = ("base", "seq2seq-lm", "sequence-classification", "token-classification", "text-encoding", "embedding")
    reads_input_again = ("sequence-classification",)

    config: T5GemmaConfig
    encoder: T5GemmaSide
    decoder: T5GemmaSide | None

    def __init__(self, config: T5GemmaConfig, task: str = "base"):
        super().__init__(config, task)
        self.encoder = self._side(config.encoder, decodes=False)
        self.decoder = None if task in ENCODER_TASKS else self._side(config.decoder, decodes=True)
        self.head = self.make_head(task, config.classifier_dropout)

    def _side(self, c: T5GemmaSideConfig, decodes: bool) -> T5GemmaSide:
        whole, width = self.config, c.hidden_size
        assert c.head_dim is not None
        sizes: Any = {
            "num_kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "bias": c.attention_bias,
            "scale": c.query_pre_attn_scalar**-0.5,
            "cap": c.attention_cap,
        }

        def norm() -> nn.Module:
            return UnitOffsetRMSNorm(width, c.norm_eps)

        def attention(layer: int) -> nn.Module:
            # In both directions, tokens up to sliding_window away are visible; in one, that many including the token.
            window = c.sliding_window if decodes else c.sliding_window + 1
            near = window if c.slides(layer) else None
            return SelfAttention(width, c.num_heads, whole.attention_dropout, causal=decodes, window=near, **sizes)

        def cross() -> CrossAttention | None:
            given = whole.encoder.hidden_size
            if not decodes:
                return None
            return CrossAttention(width, c.num_heads, whole.attention_dropout, memory_size=given, **sizes)

        def mlp() -> nn.Module:
            return GatedMLP(width, c.intermediate_size, c.hidden_act, bias=False, dropout=whole.dropout)

        layers = nn.ModuleList(
            SandwichNormBlock(attention(i), mlp(), norm, whole.dropout, cross()) for i in range(c.num_layers)
        )
        rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling, c.max_positions)
        words = Embedding(c.vocab_size, width, padding_idx=c.pad_token_id)
        return T5GemmaSide(words, layers, norm(), rotary, whole.dropout)

    def make_head(self, task: str, dropout: float = 0.0, logit_scale: float = 1.0) -> nn.Module | None:
        c, own = self.config, self.config.decoder
        match task:
            case "seq2seq-lm":
                head = Seq2SeqLM(own.hidden_size, own.vocab_size, c.tie_embeddings, scale=logit_scale)
                head.cap = own.logit_cap
                return head
            case "sequence-classification":
                return SequenceClassifier(own.hidden_size, c.num_labels, dropout, c.problem_type)
            case "token-classification":
                return TokenClassifier(c.hidden_size, c.num_labels, dropout)
            case "embedding":
                return self.make_embedding_head()
        return None

    @property
    def embed(self) -> nn.Embedding:  # type: ignore[override]
        """The decoder's embedding table, which a tied head uses; without a decoder, the encoder's."""
        return (self.decoder or self.encoder).embed

    # -- the protocol -------------------------------------------------------------------------------------------------

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        """Also scales the caller's embeddings, as transformers does."""
        assert isinstance(side, T5GemmaSide)
        return side.embed_dropout(scaled_by_width(x), ctx)

    def after_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, T5GemmaSide)
        return side.final_dropout(side.final_norm(x), ctx)

    def set_positions(self, x: Tensor, ctx: Packed, side: Side) -> None:
        assert isinstance(side, T5GemmaSide)
        ctx.rotary = side.rotary(ctx.positions, x.dtype, ctx.longest)

    def classified_tokens(self, ctx: Packed, batch: Batch) -> Tensor:
        """The position after the last token that is not pad_token_id, at which the decoder has read that token because
        its input is shifted; or the last position, if there is none after it. transformers does the same in a row
        without padding; in a padded batch, its rows have one more position, except the longest."""
        last, ids = ctx.last_tokens(), batch.get("input_ids")
        if ids is None or tuple(ids.shape) != ctx.shape:
            return last
        found = ctx.last_of(ids != self.config.pad_token_id)
        return torch.where(found < 0, last, torch.minimum(found + 1, last))

    def _decoder_output(self, batch: Batch, *sides: Any) -> ModelOutput:
        """With a classifier's logits, only the decoder's states are returned, as in transformers."""
        out = super()._decoder_output(batch, *sides)
        if self.task != "sequence-classification":
            return out
        own = {name: value for name, value in out.items() if not name.startswith("encoder_")}
        return ModelOutput((name.removeprefix("decoder_"), value) for name, value in own.items())

    def _shapes_of_sides(self, encoder: Any, decoder: Any, units: int) -> tuple[list[Any], list[Any]]:
        of_encoder, of_decoder = super()._shapes_of_sides(encoder, decoder, units)
        return of_encoder, [(tokens, self.config.decoder.hidden_size) for tokens, _ in of_decoder]

    def stage_homes(self) -> dict[str, Sequence[int]]:
        homes = {name: units for name, units in super().stage_homes().items() if name != "embed"}
        homes |= {name: [0] for name in self.word_tables()}
        return homes | ({"decoder.embed": [0, len(self.units) - 1]} if self.ties_head else {})

    def tp_plan(self) -> dict[str, str]:
        plan = {name: style for name, style in super().tp_plan().items() if name != "embed"}
        return plan | dict.fromkeys(self.word_tables(), "vocab")

    def word_tables(self) -> dict[str, nn.Embedding]:
        sides = {"encoder": self.encoder, "decoder": self.decoder}
        return {f"{name}.embed": side.embed for name, side in sides.items() if side is not None}

    def looked_up_tables(self) -> list[nn.Embedding]:
        return [self.encoder.embed] if self.ties_head else list(self.word_tables().values())

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        """Norms start as 1 + 0; the std of a head falls with its number of rows."""
        spec = super().init_spec()
        for name, (kind, *std) in spec.items():
            if kind == "ones":
                spec[name] = ("zeros",)
            elif name == "head.weight":
                spec[name] = (kind, std[0] * self.head.weight.shape[0] ** -0.5)
        return spec

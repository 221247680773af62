"""The fields, blocks and scaled embeddings that BART and its descendants share.

The descendants differ in the places of norms and in what is added to the token embeddings: see bart.py, mbart.py,
marian.py, m2m_100.py, pegasus.py and led.py.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.block import PostNormBlock, PreNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import Seq2SeqLM
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder_decoder import EncoderDecoder, Side
from modelcenter.models.inputs import Batch

NORM_EPS = 1e-5  # not a config field


@dataclass(kw_only=True)
class BartStyleConfig(ModelConfig):
    """Fields of BART and its descendants; sizes count elements, dropouts are probabilities.

    Attributes:
        num_layers, num_heads, intermediate_size: of the encoder. num_decoder_layers, num_decoder_heads,
            decoder_intermediate_size: of the decoder; None: as in the encoder.
        max_positions: of each side. activation_dropout: inside the feed-forward networks.
        scale_embedding: multiply the token embeddings by sqrt(hidden_size).
    """

    is_encoder_decoder: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_decoder_layers: int | None = None
    num_heads: int
    num_decoder_heads: int | None = None
    intermediate_size: int
    decoder_intermediate_size: int | None = None
    hidden_act: str = "gelu"
    max_positions: int = 1024
    scale_embedding: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    pad_token_id: int = 1
    eos_token_id: int | list[int] = 2
    decoder_start_token_id: int = 2
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        for own, of_encoder in (
            ("num_decoder_layers", "num_layers"),
            ("num_decoder_heads", "num_heads"),
            ("decoder_intermediate_size", "intermediate_size"),
        ):
            if getattr(self, own) is None:
                setattr(self, own, getattr(self, of_encoder))
        for name in ("num_heads", "num_decoder_heads"):
            heads = getattr(self, name)
            self.require(self.hidden_size % heads == 0, "hidden_size", f"a multiple of {name}={heads}")
        self.require_one_of("hidden_act", ACTIVATIONS)
        self.require_probabilities("dropout", "attention_dropout", "activation_dropout")
        self.require_token("pad_token_id", self.vocab_size)


@dataclass(frozen=True)
class BlockSpec:
    """What a block is made of. layer: its number in its side, from 0. decodes: it is one of the decoder's."""

    layer: int
    num_heads: int
    intermediate_size: int
    decodes: bool


class BartStyleSide(Side):
    """A side with dropout between the embeddings and the blocks."""

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, dropout: float):
        super().__init__(layers, final_norm)
        self.embed_dropout = Dropout(dropout)


class BartStyle(EncoderDecoder):
    """Base of BART and its descendants. A subclass builds the sides and their blocks."""

    config: BartStyleConfig

    def __init__(self, config: BartStyleConfig, task: str = "base"):
        super().__init__(config, task)
        c = config
        assert c.num_decoder_layers and c.num_decoder_heads and c.decoder_intermediate_size
        self.embed = Embedding(c.vocab_size, c.hidden_size, padding_idx=c.pad_token_id)
        self.encoder = self.make_side(self._blocks(c.num_layers, c.num_heads, c.intermediate_size, False), False)
        self.decoder = self.make_side(
            self._blocks(c.num_decoder_layers, c.num_decoder_heads, c.decoder_intermediate_size, True), True
        )

    def _blocks(self, count: int, num_heads: int, intermediate_size: int, decodes: bool) -> nn.ModuleList:
        specs = (BlockSpec(layer, num_heads, intermediate_size, decodes) for layer in range(count))
        return nn.ModuleList(map(self.make_block, specs))

    @abstractmethod
    def make_side(self, layers: nn.ModuleList, decodes: bool) -> Side:
        """The encoder or the decoder with its blocks."""

    @abstractmethod
    def make_block(self, spec: BlockSpec) -> nn.Module:
        """A block of the encoder or the decoder."""

    def attention(self, spec: BlockSpec) -> SelfAttention:
        """The self-attention of a block."""
        c = self.config
        return SelfAttention(c.hidden_size, spec.num_heads, c.attention_dropout, causal=spec.decodes)

    def sublayers(self, spec: BlockSpec) -> tuple[SelfAttention, MLP, CrossAttention | None]:
        """The sublayers of a block."""
        c, width = self.config, self.config.hidden_size
        return (
            self.attention(spec),
            MLP(width, spec.intermediate_size, c.hidden_act, dropout=c.activation_dropout),
            CrossAttention(width, spec.num_heads, c.attention_dropout) if spec.decodes else None,
        )

    def post_norm_block(self, spec: BlockSpec) -> PostNormBlock:
        """A block with a norm after each sublayer."""
        c = self.config
        attn, mlp, cross = self.sublayers(spec)
        return PostNormBlock(attn, mlp, c.hidden_size, NORM_EPS, c.dropout, cross)

    def pre_norm_block(self, spec: BlockSpec) -> PreNormBlock:
        """A block with a norm before each sublayer."""
        c = self.config
        attn, mlp, cross = self.sublayers(spec)
        return PreNormBlock(attn, mlp, lambda: LayerNorm(c.hidden_size, NORM_EPS), c.dropout, cross)

    def biased_lm_head(self, logit_scale: float) -> Seq2SeqLM:
        """A language-modelling head with transformers' final_logits_bias, which is a buffer there and never trained."""
        c = self.config
        head = Seq2SeqLM(c.hidden_size, c.vocab_size, c.tie_embeddings, bias=True, scale=logit_scale)
        assert head.bias is not None
        head.bias.requires_grad_(False)
        self.constants = frozenset(("head.bias",))
        return head

    @property
    def embedding_scale(self) -> float:
        """Factor of the token embeddings."""
        return self.config.hidden_size**0.5 if self.config.scale_embedding else 1.0

    def embedded(self, batch: Batch, ctx: Packed, table: nn.Module, prefix: str = "") -> Tensor:
        x = super().embedded(batch, ctx, table, prefix)
        scaled = self.embedding_scale != 1.0 and batch.get(f"{prefix}input_ids") is not None
        return x * self.embedding_scale if scaled else x

    def stage_homes(self) -> dict[str, Sequence[int]]:
        """As EncoderDecoder.stage_homes; `begin` calls the positions and the embedding norm, on the first stage."""
        first = {f"{side}.{name}" for side in ("encoder", "decoder") for name in ("position", "embed_norm")}
        return {name: [0] if name in first else units for name, units in super().stage_homes().items()}

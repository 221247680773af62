"""BART (Lewis et al. 2019, arXiv:1910.13461), after transformers' BartModel and its heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.config import ModelConfig
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads import Seq2SeqLM
from modelcenter.layers.mlp import ACTIVATIONS, MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder_decoder import EncoderDecoder, Side
from modelcenter.models.inputs import Batch

OFFSET = 2  # rows of each position table before the first position
NORM_EPS = 1e-5  # which no config changes


@dataclass(kw_only=True)
class BartConfig(ModelConfig):
    """Fields of BART; sizes count elements, dropouts are probabilities.

    Attributes:
        num_layers, num_heads, intermediate_size: of the encoder. num_decoder_layers, num_decoder_heads,
            decoder_intermediate_size: of the decoder; None: as the encoder's.
        max_positions: of each side. activation_dropout: inside the feed-forward networks.
        scale_embedding: multiply the embeddings of words by sqrt(hidden_size).
        num_labels: 3 where nothing is said, as in transformers.
    """

    model_type: ClassVar[str] = "bart"
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
    classifier_dropout: float = 0.0
    num_labels: int = 3
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
        self.require_probabilities("dropout", "attention_dropout", "activation_dropout", "classifier_dropout")
        self.require_token("pad_token_id", self.vocab_size)


class BartSide(Side):
    """A side with a table of positions, and norm and dropout between the embeddings and the blocks."""

    def __init__(
        self, layers: nn.ModuleList, final_norm: nn.Module, position: nn.Embedding, hidden_size: int, dropout: float
    ):
        super().__init__(layers, final_norm)
        self.position = position
        self.embed_norm = LayerNorm(hidden_size, NORM_EPS)
        self.embed_dropout = Dropout(dropout)


class Bart(EncoderDecoder):
    """BART with the head of `task`. Body names do not depend on the task.

    A decoder that is given nothing reads the encoder's input, moved one place to the right, in every task.
    """

    config_class = BartConfig
    bounded = True
    tasks = ("base", "seq2seq-lm", "sequence-classification", "question-answering")
    reads_input_again = tasks

    config: BartConfig

    def __init__(self, config: BartConfig, task: str = "base"):
        super().__init__(config, task)
        c = config
        assert c.num_decoder_layers and c.num_decoder_heads and c.decoder_intermediate_size
        self.embed = Embedding(c.vocab_size, c.hidden_size, padding_idx=c.pad_token_id)
        of_encoder = c.num_layers, c.num_heads, c.intermediate_size
        of_decoder = c.num_decoder_layers, c.num_decoder_heads, c.decoder_intermediate_size
        self.encoder, self.decoder = (
            self.make_side(nn.ModuleList(self.make_block(heads, inner, decodes) for _ in range(depth)))
            for (depth, heads, inner), decodes in ((of_encoder, False), (of_decoder, True))
        )
        self.head = self.make_head(task, c.classifier_dropout)

    def make_side(self, layers: nn.ModuleList) -> Side:
        """The encoder or the decoder with its blocks."""
        c = self.config
        position = Embedding(c.max_positions + OFFSET, c.hidden_size)
        return BartSide(layers, nn.Identity(), position, c.hidden_size, c.dropout)

    def make_block(self, num_heads: int, intermediate_size: int, decodes: bool) -> nn.Module:
        """A block of the encoder, or of the decoder."""
        c, width = self.config, self.config.hidden_size
        return PostNormBlock(
            SelfAttention(width, num_heads, c.attention_dropout, causal=decodes),
            MLP(width, intermediate_size, c.hidden_act, dropout=c.activation_dropout),
            width,
            NORM_EPS,
            c.dropout,
            CrossAttention(width, num_heads, c.attention_dropout) if decodes else None,
        )

    def make_head(self, task: str, dropout: float = 0.0, logit_scale: float = 1.0) -> nn.Module | None:
        if task != "seq2seq-lm":
            return super().make_head(task, dropout, logit_scale)
        c = self.config
        head = Seq2SeqLM(c.hidden_size, c.vocab_size, c.tie_embeddings, bias=True, scale=logit_scale)
        assert head.bias is not None
        head.bias.requires_grad_(False)  # transformers' final_logits_bias, a buffer there
        self.constants = frozenset(("head.bias",))
        return head

    @property
    def embedding_scale(self) -> float:
        """Multiplies the embeddings of words."""
        return self.config.hidden_size**0.5 if self.config.scale_embedding else 1.0

    def embedded(self, batch: Batch, ctx: Packed, table: nn.Module, prefix: str = "") -> Tensor:
        x = super().embedded(batch, ctx, table, prefix)
        scaled = self.embedding_scale != 1.0 and batch.get(f"{prefix}input_ids") is not None
        return x * self.embedding_scale if scaled else x

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, BartSide)
        self.check_positions({}, ctx, self.config.max_positions, "decoder_" if side is self.decoder else "")
        at = ctx.positions
        x = x + self.look_up(side.position, at + OFFSET, at, "position_ids", "max_positions")
        return side.embed_dropout(side.embed_norm(x), ctx)

    def stage_homes(self) -> dict[str, Sequence[int]]:
        """As EncoderDecoder.stage_homes; positions and the norm of embeddings are called in `begin`, on the first."""
        first = {f"{side}.{name}" for side in ("encoder", "decoder") for name in ("position", "embed_norm")}
        return {name: [0] if name in first else units for name, units in super().stage_homes().items()}

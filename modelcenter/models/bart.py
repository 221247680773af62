"""BART (Lewis et al. 2019, arXiv:1910.13461), after transformers' BartModel and its heads."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.bart_style import NORM_EPS, BartStyle, BartStyleConfig, BartStyleSide, BlockSpec
from modelcenter.models.encoder_decoder import Side

OFFSET = 2  # rows of each position table before the first position, in BART and mBART


@dataclass(kw_only=True)
class BartConfig(BartStyleConfig):
    """Fields of BART; num_labels defaults to 3, as in transformers."""

    model_type: ClassVar[str] = "bart"

    classifier_dropout: float = 0.0
    num_labels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_probabilities("classifier_dropout")


class BartSide(BartStyleSide):
    """A side with a position table, and a norm between the embeddings and the blocks."""

    def __init__(
        self, layers: nn.ModuleList, final_norm: nn.Module, position: nn.Embedding, hidden_size: int, dropout: float
    ):
        super().__init__(layers, final_norm, dropout)
        self.position = position
        self.embed_norm = LayerNorm(hidden_size, NORM_EPS)


class Bart(BartStyle):
    """BART with the head of `task`. Parameter names in the body do not depend on the task.

    In every task, the default input of the decoder is the encoder's input shifted right by one.
    """

    config_class = BartConfig
    bounded = True
    tasks: ClassVar[tuple[str, ...]] = ("base", "seq2seq-lm", "sequence-classification", "question-answering")
    reads_input_again = tasks
    offset: ClassVar[int] = OFFSET

    config: BartConfig

    def __init__(self, config: BartConfig, task: str = "base"):
        super().__init__(config, task)
        self.head = self.make_head(task, config.classifier_dropout)

    def make_side(self, layers: nn.ModuleList, decodes: bool) -> Side:
        c = self.config
        position = Embedding(getattr(c, self.positions_field(decodes)) + self.offset, c.hidden_size)
        return BartSide(layers, nn.Identity(), position, c.hidden_size, c.dropout)

    def positions_field(self, decodes: bool) -> str:
        """The config field with the number of positions of a side."""
        return "max_positions"

    def make_block(self, spec: BlockSpec) -> nn.Module:
        return self.post_norm_block(spec)

    def make_head(self, task: str, dropout: float = 0.0, logit_scale: float = 1.0) -> nn.Module | None:
        if task == "seq2seq-lm":
            return self.biased_lm_head(logit_scale)
        return super().make_head(task, dropout, logit_scale)

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, BartSide)
        decodes, at = side is self.decoder, ctx.positions
        most = self.positions_field(decodes)
        self.check_positions({}, ctx, getattr(self.config, most), "decoder_" if decodes else "", most)
        x = x + self.look_up(side.position, at + self.offset, at, "position_ids", most)
        return side.embed_dropout(side.embed_norm(x), ctx)

"""PEGASUS (Zhang et al. 2020, arXiv:1912.08777), after transformers' PegasusModel and its head: Marian with pre-norm
blocks, a final norm, and sinusoids stored in tables.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.models.bart_style import NORM_EPS, BartStyleSide, BlockSpec
from modelcenter.models.encoder_decoder import Side
from modelcenter.models.marian import Marian, MarianConfig

TABLES = ("encoder.position.weight", "decoder.position.weight")


@dataclass(kw_only=True)
class PegasusConfig(MarianConfig):
    """Fields of PEGASUS, with transformers' defaults. Generated texts begin with the padding token."""

    model_type: ClassVar[str] = "pegasus"

    pad_token_id: int = 0
    eos_token_id: int | list[int] = 1
    decoder_start_token_id: int = 0


class PegasusSide(BartStyleSide):
    """A side with a position table that is not trained.

    The sinusoids are stored because files may hold other values: transformers 5 trains the table of a loaded model.
    """

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, position: nn.Embedding, dropout: float):
        super().__init__(layers, final_norm, dropout)
        self.position = position
        position.weight.requires_grad_(False)


class Pegasus(Marian):
    """PEGASUS with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = PegasusConfig

    config: PegasusConfig

    def __init__(self, config: PegasusConfig, task: str = "base"):
        super().__init__(config, task)
        self.constants |= {*TABLES}

    def make_side(self, layers: nn.ModuleList, decodes: bool) -> Side:
        c = self.config
        position = Embedding(c.max_positions, c.hidden_size)
        return PegasusSide(layers, LayerNorm(c.hidden_size, NORM_EPS), position, c.dropout)

    def make_block(self, spec: BlockSpec) -> nn.Module:
        return self.pre_norm_block(spec)

    def init_spec(self) -> dict[str, tuple[Any, ...]]:
        return super().init_spec() | dict.fromkeys(TABLES, ("sinusoids_in_halves",))

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, PegasusSide)
        self.check_positions({}, ctx, self.config.max_positions, "decoder_" if side is self.decoder else "")
        at = ctx.positions
        x = x + self.look_up(side.position, at, at, "position_ids", "max_positions")
        return side.embed_dropout(x, ctx)

"""M2M100 (Fan et al. 2020, arXiv:2010.11125) and NLLB's dense models (NLLB Team 2022, arXiv:2207.04672), after
transformers' M2M100Model and its head: pre-norm blocks, and sinusoidal positions that start after that of the padding.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.sinusoids import sinusoids
from modelcenter.models.bart_style import NORM_EPS, BartStyle, BartStyleConfig, BartStyleSide, BlockSpec
from modelcenter.models.encoder_decoder import Side
from modelcenter.models.inputs import Batch
from modelcenter.models.padding_positions import with_positions_after_padding

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class M2M100Config(BartStyleConfig):
    """Fields of M2M100, with transformers' defaults.

    Attributes:
        max_positions: the number of positions in training; longer sequences work, because there is no table.
        encoder_layerdrop, decoder_layerdrop: share of the layers that transformers skips in each training step. Here
            all layers run, and a warning says so.
    """

    model_type: ClassVar[str] = "m2m_100"

    hidden_act: str = "relu"
    scale_embedding: bool = True
    attention_dropout: float = 0.1
    encoder_layerdrop: float = 0.05
    decoder_layerdrop: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.hidden_size % 2 == 0 and self.hidden_size > 2
        self.require(even, "hidden_size", "an even number above 2: half of the channels are sines, half cosines")
        self.require_probabilities("encoder_layerdrop", "decoder_layerdrop")
        self.require(self.pad_token_id >= 0, "pad_token_id", "0 or more: positions count on from it")

    @property
    def first_position(self) -> int:
        """The position of a sequence's first token."""
        return self.pad_token_id + 1


class M2M100(BartStyle):
    """M2M100 or NLLB with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = M2M100Config
    tasks = ("base", "seq2seq-lm")
    reads_input_again = ()

    config: M2M100Config

    def __init__(self, config: M2M100Config, task: str = "base"):
        super().__init__(config, task)
        self.head = self.make_head(task)

    def make_side(self, layers: nn.ModuleList, decodes: bool) -> Side:
        return BartStyleSide(layers, LayerNorm(self.config.hidden_size, NORM_EPS), self.config.dropout)

    def make_block(self, spec: BlockSpec) -> nn.Module:
        return self.pre_norm_block(spec)

    def pack(self, batch: Batch, prefix: str = "") -> Packed:
        return super().pack(with_positions_after_padding(batch, self.config.pad_token_id, prefix), prefix)

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, BartStyleSide)
        at, half = ctx.positions, self.config.hidden_size // 2
        steps = torch.arange(half, device=x.device).float()
        waves = sinusoids(at, torch.exp(steps * -(math.log(10000) / (half - 1))))
        waves = waves.masked_fill((at == self.config.pad_token_id)[:, None], 0.0)
        return side.embed_dropout(x + waves.to(x.dtype), ctx)

    def train(self, mode: bool = True) -> Self:
        if mode:
            _warn_of_layerdrop(self.config.encoder_layerdrop, self.config.decoder_layerdrop)
        return super().train(mode)


@functools.cache
def _warn_of_layerdrop(encoder: float, decoder: float) -> None:
    """Warn that layerdrop is not applied, once for the same values."""
    if encoder or decoder:
        _log.warning(
            "encoder_layerdrop %g, decoder_layerdrop %g: the config asks for LayerDrop, which training here does not "
            "do: every layer takes part in each step. encoder_layerdrop=0, decoder_layerdrop=0 say so and end this",
            encoder,
            decoder,
        )

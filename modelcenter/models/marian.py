"""Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344), the architecture of OPUS-MT, after transformers' MarianModel
and its head: BART without a norm after the embeddings, and with sinusoidal instead of learned positions.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from modelcenter.layers.packing import Packed
from modelcenter.layers.sinusoids import sinusoids
from modelcenter.models.bart_style import BartStyle, BartStyleConfig, BartStyleSide, BlockSpec
from modelcenter.models.encoder_decoder import Side
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class MarianConfig(BartStyleConfig):
    """Fields of Marian, with transformers' defaults. Generated texts begin with the padding token, and both sides share
    a vocabulary."""

    model_type: ClassVar[str] = "marian"

    pad_token_id: int = 58100
    eos_token_id: int | list[int] = 0
    decoder_start_token_id: int = 58100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_size % 2 == 0, "hidden_size", "even: half of the channels are sines, half cosines")


class Marian(BartStyle):
    """Marian with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = MarianConfig
    bounded = True
    tasks = ("base", "seq2seq-lm")
    reads_input_again = ()

    config: MarianConfig

    def __init__(self, config: MarianConfig, task: str = "base"):
        super().__init__(config, task)
        self.head = self.make_head(task)

    def make_side(self, layers: nn.ModuleList, decodes: bool) -> Side:
        return BartStyleSide(layers, nn.Identity(), self.config.dropout)

    def make_block(self, spec: BlockSpec) -> nn.Module:
        return self.post_norm_block(spec)

    def make_head(self, task: str, dropout: float = 0.0, logit_scale: float = 1.0) -> nn.Module | None:
        return self.biased_lm_head(logit_scale) if task == "seq2seq-lm" else None

    def embedded(self, batch: Batch, ctx: Packed, table: nn.Module, prefix: str = "") -> Tensor:
        x = super().embedded(batch, ctx, table, prefix)
        given = prefix and batch.get("decoder_inputs_embeds") is not None
        return x * self.embedding_scale if given else x  # the decoder also scales the caller's embeddings

    def before_units(self, x: Tensor, ctx: Packed, side: Side) -> Tensor:
        assert isinstance(side, BartStyleSide)
        self.check_positions({}, ctx, self.config.max_positions, "decoder_" if side is self.decoder else "")
        half = self.config.hidden_size // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float64)
        waves = sinusoids(ctx.positions, (10000.0 ** (-steps / half)).float())
        return side.embed_dropout(x + waves.to(x.dtype), ctx)

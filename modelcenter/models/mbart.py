"""mBART (Liu et al. 2020, arXiv:2001.08210) and mBART-50 (Tang et al. 2020, arXiv:2008.00401), after transformers'
MBartModel and its heads: BART with pre-norm blocks and a final norm.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.loss import IGNORE_INDEX
from engine.ops import Embedding
from modelcenter.layers.norm import LayerNorm
from modelcenter.models.bart import OFFSET, Bart, BartConfig, BartSide
from modelcenter.models.bart_style import NORM_EPS, BlockSpec
from modelcenter.models.encoder_decoder import Side


@dataclass(kw_only=True)
class MBartConfig(BartConfig):
    """BART's fields.

    decoder_start_token_id: the first token of generated texts; None: the checkpoint is multilingual, and its texts
    begin with the token of a language (in training the decoder begins with the last token of the labels).
    """

    model_type: ClassVar[str] = "mbart"

    num_labels: int = 2
    decoder_start_token_id: int | None = None  # type: ignore[assignment]


class MBart(Bart):
    """mBART with the head of `task`. Parameter names in the body do not depend on the task."""

    config_class = MBartConfig

    config: MBartConfig

    def make_side(self, layers: nn.ModuleList, decodes: bool) -> Side:
        c = self.config
        position = Embedding(c.max_positions + OFFSET, c.hidden_size)
        return BartSide(layers, LayerNorm(c.hidden_size, NORM_EPS), position, c.hidden_size, c.dropout)

    def make_block(self, spec: BlockSpec) -> nn.Module:
        return self.pre_norm_block(spec)

    def start_tokens(self, ids: Tensor, mask: Tensor | None, ends: Tensor | None) -> Tensor:
        """The last token of each sequence that is neither padding nor -100: with mbart-large-cc25's tokenizer the
        language, with mBART-50's the end of text. Padding for a sequence without such a token."""
        pad = self.config.pad_token_id
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        real = (ids != IGNORE_INDEX) & (ids != pad)
        if mask is not None:
            real = real & (mask != 0)
        last = torch.where(real, place, -1).cummax(1).values  # up to each position
        if ends is None:
            at = last[:, -1:]
            return torch.where(at >= 0, ids.gather(1, at.clamp(min=0)), pad)
        sequence = torch.bucketize(place[0], ends[1:], right=True).clamp(max=max(ends.numel() - 2, 0))
        begin, end = ends[:-1].long()[sequence], ends[1:].long()[sequence]
        at = last[0, end - 1]
        return torch.where(at >= begin, ids[0, at.clamp(min=0)], pad)[None]

"""CPM-2 (Zhang et al. 2021, arXiv:2106.10715), after TsinghuaAI/CPM-2-Finetune: T5 v1.1 with tokens of its own.

The published network's gate has the tanh approximation of GELU ("gelu_new"); ModelCenter's CPM2 has the exact one
("gelu"), which differs by about 5e-4 in the logits.
"""

from dataclasses import dataclass
from typing import ClassVar

from modelcenter.models.t5 import T5, MT5Config


@dataclass(kw_only=True)
class CPM2Config(MT5Config):
    """Fields of CPM-2: as mT5. Its vocabulary has <s> at 1, where a decoder starts, <pad> at 5 and <eod> at 8."""

    model_type: ClassVar[str] = "cpm2"

    pad_token_id: int = 5
    eos_token_id: int | list[int] = 8
    decoder_start_token_id: int = 1


class CPM2(T5):
    """CPM-2 with the head of `task`."""

    config_class = CPM2Config
    fp16_scale = 1.0  # trained in float16

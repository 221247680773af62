"""CPM-2 (Zhang et al. 2021, arXiv:2106.10715), after TsinghuaAI/CPM-2-Finetune: T5 v1.1 with its own special tokens.

The gate of the published network uses the tanh approximation of GELU ("gelu_new"); that of ModelCenter's CPM2 uses
exact GELU ("gelu"), which changes the logits by about 5e-4.
"""

from dataclasses import dataclass
from typing import ClassVar

from modelcenter.models.t5 import T5, MT5Config


@dataclass(kw_only=True)
class CPM2Config(MT5Config):
    """Fields of CPM-2, as in mT5. Its vocabulary has <s> at 1, with which a decoder starts, <pad> at 5, <eod> at 8."""

    model_type: ClassVar[str] = "cpm2"

    pad_token_id: int = 5
    eos_token_id: int | list[int] = 8
    decoder_start_token_id: int = 1


class CPM2(T5):
    """CPM-2 with the head of `task`."""

    config_class = CPM2Config
    fp16_scale = 1.0  # trained in float16

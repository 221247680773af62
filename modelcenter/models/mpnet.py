"""MPNet (Song et al. 2020, arXiv:2004.09297), after transformers' MPNetModel and its heads: RoBERTa's body and heads
without token types, with a relative position bias as in T5, shared by all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from modelcenter.layers.mask import Mask, shared_rectangles
from modelcenter.layers.packing import Packed
from modelcenter.layers.relative import RelativeBias
from modelcenter.models.encoder import READING_TASKS
from modelcenter.models.inputs import Batch
from modelcenter.models.roberta import Roberta, RobertaStyleConfig

# Constants of transformers' code, not config fields.
PADDING = 1
NUM_BUCKETS = 32
MAX_DISTANCE = 128


@dataclass(kw_only=True)
class MPNetConfig(RobertaStyleConfig):
    """Fields of MPNet. Positions start after 1, the padding of its vocabulary, whatever pad_token_id is."""

    model_type: ClassVar[str] = "mpnet"

    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.vocab_size > PADDING, "vocab_size", f"more than {PADDING}, the number of the padding token")
        rows = f"more than {self.first_position}: the first rows of the position table hold no token"
        self.require(self.max_positions > self.first_position, "max_positions", rows)

    @property
    def padding_id(self) -> int:
        return PADDING


class MPNet(Roberta):
    """MPNet with the head of `task`. It takes no token_type_ids."""

    config_class = MPNetConfig
    tasks = READING_TASKS
    tells_types = False

    config: MPNetConfig

    def make_body(self) -> None:
        super().make_body()
        self.relative = RelativeBias(NUM_BUCKETS, self.config.num_heads, MAX_DISTANCE, bidirectional=True)

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        ctx.bias = self.relative(ctx.longest)
        ctx.rectangles = shared_rectangles(ctx, Mask(bias=ctx.bias))
        return x, ctx

    def stage_homes(self) -> dict[str, Sequence[int]]:
        return super().stage_homes() | {"relative": range(len(self.units))}

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {"relative": "partial"}

"""ERNIE (Sun et al. 2019, arXiv:1904.09223; ERNIE 2.0, arXiv:1907.12412; ERNIE 3.0's encoders), after transformers'
ErnieModel and its heads: BERT with an additional embedding of the task type.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.ops import Embedding
from modelcenter.layers.packing import Packed
from modelcenter.models.bert import Bert, BertConfig
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class ErnieConfig(BertConfig):
    """Fields of ERNIE: BERT's, and use_task_id: there is a table of `task_type_vocab_size` task types, as in ERNIE 2.0
    and 3.0."""

    model_type: ClassVar[str] = "ernie"

    use_task_id: bool = False
    task_type_vocab_size: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.task_type_vocab_size > 0 or not self.use_task_id
        self.require(rows, "task_type_vocab_size", "1 or more with use_task_id: texts are of type 0 unless they say so")


class Ernie(Bert):
    """ERNIE with the head of `task`. `task_type_ids` default to 0."""

    config_class = ErnieConfig

    config: ErnieConfig

    def make_body(self) -> None:
        c = self.config
        # Defined before the layers, so that a pipeline puts it on its first stage.
        self.task_type = Embedding(c.task_type_vocab_size, c.hidden_size) if c.use_task_id else None
        super().make_body()

    def type_states(self, batch: Batch, ctx: Packed) -> Tensor | None:
        x = super().type_states(batch, ctx)
        if self.task_type is None or x is None:
            return x
        given = batch.get("task_type_ids")
        types = torch.zeros_like(ctx.positions) if given is None else ctx.unpad(given, name="task_type_ids")
        return x + self.look_up(self.task_type, types, types, "task_type_ids", "task_type_vocab_size")

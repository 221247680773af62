"""Encoders that are pretrained by replaced token detection: ELECTRA and DeBERTa-v3."""

from typing import Any

from modelcenter.models.encoder import Encoder
from modelcenter.models.inputs import HEAD_INPUTS


class Discriminator(Encoder):
    """An Encoder with the task "pretraining", whose head is a layers.heads.ReplacedTokens.

    `labels` of pretraining: (batch, seq), 1 if the token was replaced, else 0; `logits` have the same shape.
    """

    pooled_tasks = ()
    head_inputs = {**HEAD_INPUTS, "pretraining": ("labels",)}

    @property
    def ties_head(self) -> bool:
        return super().ties_head and self.task != "pretraining"

    def empty_batch(self) -> dict[str, Any]:
        batch = super().empty_batch()
        return batch | {"labels": batch["input_ids"]} if self.task == "pretraining" else batch

"""Encoders that are pretrained by telling which tokens were replaced: ELECTRA and DeBERTa-v3."""

from typing import Any

from modelcenter.models.encoder import Encoder
from modelcenter.models.inputs import HEAD_INPUTS


class Discriminator(Encoder):
    """An Encoder with the task "pretraining", whose head is a layers.heads.ReplacedTokens.

    `labels` of pretraining: (batch, seq), 1: the token was replaced, 0: it was not; `logits` are of the same shape.
    """

    pooled_tasks = ()
    head_inputs = {**HEAD_INPUTS, "pretraining": ("labels",)}

    @property
    def ties_head(self) -> bool:
        return super().ties_head and self.task != "pretraining"

    def empty_batch(self) -> dict[str, Any]:
        batch = super().empty_batch()
        return batch | {"labels": batch["input_ids"]} if self.task == "pretraining" else batch

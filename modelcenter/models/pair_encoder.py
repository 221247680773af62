"""Encoders that are pretrained on pairs of texts: BERT and ALBERT."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder import Encoder
from modelcenter.models.inputs import Batch


class PairEncoder(Encoder):
    """An Encoder with the task "pretraining", whose head, a layers.heads.PairPretraining, reads the labelled tokens and
    the first token of each pair."""

    pooled_tasks: ClassVar[tuple[str, ...]] = (*Encoder.pooled_tasks, "pretraining")

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        if self.task != "pretraining":
            return super().reads(ctx, batch)
        labelled = self.head.lm.reads(ctx, batch, self.wants_logits(batch))
        if labelled is None:
            return None
        first, known = ctx.first_tokens(), host_copy(labelled)
        if known is not labelled:  # finding those that are also labelled would synchronise
            first = torch.tensor(ctx.sequences.starts()[:-1], dtype=torch.long)
        return to_device(torch.cat((first, known)).unique(), labelled.device)

    def run_head(
        self, x: Tensor, pooled: Tensor | None, ctx: Packed, batch: Batch, counts: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if self.task != "pretraining":
            return super().run_head(x, pooled, ctx, batch, counts)
        return self.head(x, pooled, ctx, batch, counts, self.embed.weight, self.wants_logits(batch))

    @property
    def lm_prefix(self) -> str | None:
        return "head.lm" if self.task == "pretraining" else super().lm_prefix

    def empty_batch(self) -> dict[str, Any]:
        batch = super().empty_batch()
        if self.task == "pretraining":
            none = batch["input_ids"]
            batch |= {"labels": none, self.head.label: none[0]}
        return batch

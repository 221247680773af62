"""BERT (Devlin et al. 2018, arXiv:1810.04805), after transformers' BertModel and its heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.loss import cross_entropy
from modelcenter.layers.heads import MaskedLM, SequenceClassifier, check_labels, count_labels
from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.linear import Linear
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder import BertStyleConfig, Encoder
from modelcenter.models.inputs import Batch


@dataclass(kw_only=True)
class BertConfig(BertStyleConfig):
    """Fields of BERT; sizes count elements, dropouts are probabilities."""

    model_type: ClassVar[str] = "bert"


class Pretraining(nn.Module):
    """Masked language model and next-sentence prediction; the loss is the sum of both means."""

    def __init__(self, lm: MaskedLM, hidden_size: int):
        super().__init__()
        self.lm = lm
        self.nsp = Linear(hidden_size, 2)

    def counts(self, batch: Batch) -> dict[str, int]:
        masked, following = self.lm.counts(batch)["loss"], count_labels(batch.get("next_sentence_label"))
        return {"masked_lm": masked, "next_sentence": following}

    def forward(
        self,
        x: Tensor,
        pooled: Tensor,
        ctx: Packed,
        batch: Batch,
        counts: Mapping[str, Any],
        table: Tensor,
        want_logits: bool | str,
    ) -> dict[str, Tensor]:
        out = self.lm(x, ctx, batch, counts["masked_lm"], table, want_logits)
        out["seq_relationship_logits"] = self.nsp(pooled)
        labels = batch.get("next_sentence_label")
        if labels is not None:
            check_labels(labels, 2, "next_sentence_label", sequences=pooled.shape[0])
            loss = cross_entropy(out["seq_relationship_logits"], labels.reshape(-1), counts["next_sentence"])
            out["loss"] = out["loss"] + loss if "loss" in out else loss
        return out


class Bert(Encoder):
    """BERT with the head of `task`, next-sentence pretraining among them.

    `labels` of next-sentence-prediction: 0: the second text follows the first, 1: it does not.
    """

    config_class = BertConfig
    tasks = (*Encoder.tasks, "pretraining", "next-sentence-prediction")
    pooled_tasks = (*Encoder.pooled_tasks, "pretraining", "next-sentence-prediction")

    def make_head(self, task: str) -> nn.Module | None:
        if task == "next-sentence-prediction":
            return SequenceClassifier(self.config.hidden_size, 2, 0.0, "single_label_classification")
        if task != "pretraining":
            return super().make_head(task)
        lm = super().make_head("masked-lm")
        assert isinstance(lm, MaskedLM)
        return Pretraining(lm, self.config.hidden_size)

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        if self.task == "next-sentence-prediction":
            return ctx.first_tokens()
        if self.task != "pretraining":
            return super().reads(ctx, batch)
        labelled = self.head.lm.reads(ctx, batch, self.wants_logits(batch))
        if labelled is None:
            return None
        first, known = ctx.first_tokens(), host_copy(labelled)
        if known is not labelled:  # a device would have to say how many of them are labelled too
            first = torch.tensor(ctx.sequences.starts()[:-1], dtype=torch.long)
        return to_device(torch.cat((first, known)).unique(), labelled.device)

    def run_head(
        self, x: Tensor, pooled: Tensor | None, ctx: Packed, batch: Batch, counts: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if self.task == "next-sentence-prediction":
            return self.head(pooled, batch, counts, ctx)
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
            batch |= {"labels": none, "next_sentence_label": none[0]}
        return batch

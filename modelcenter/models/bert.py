"""BERT (Devlin et al. 2018, arXiv:1810.04805), after transformers' BertModel and its heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from modelcenter.layers.heads import MaskedLM, NextSentence, SequenceClassifier
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder import BertStyleConfig, Encoder
from modelcenter.models.inputs import HEAD_INPUTS, Batch
from modelcenter.models.pair_encoder import PairEncoder


@dataclass(kw_only=True)
class BertConfig(BertStyleConfig):
    """Fields of BERT; sizes count elements, dropouts are probabilities."""

    model_type: ClassVar[str] = "bert"


class Bert(PairEncoder):
    """BERT with the head of `task`.

    `labels` of next-sentence-prediction: 0 if the second text follows the first, else 1.
    """

    config_class = BertConfig
    tasks = (*Encoder.tasks, "pretraining", "next-sentence-prediction")
    pooled_tasks = (*PairEncoder.pooled_tasks, "next-sentence-prediction")
    head_inputs = {**HEAD_INPUTS, "pretraining": ("labels", "logits_to_keep", "next_sentence_label")}

    def make_head(self, task: str) -> nn.Module | None:
        match task:
            case "next-sentence-prediction":
                return SequenceClassifier(self.config.hidden_size, 2, 0.0, "single_label_classification")
            case "pretraining":
                lm = super().make_head("masked-lm")
                assert isinstance(lm, MaskedLM)
                return NextSentence(lm, self.config.hidden_size)
        return super().make_head(task)

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        return ctx.first_tokens() if self.task == "next-sentence-prediction" else super().reads(ctx, batch)

    def run_head(
        self, x: Tensor, pooled: Tensor | None, ctx: Packed, batch: Batch, counts: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        if self.task == "next-sentence-prediction":
            return self.head(pooled, batch, counts, ctx)
        return super().run_head(x, pooled, ctx, batch, counts)

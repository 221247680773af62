"""Metrics of language models: loss and perplexity of the labelled tokens, and accuracy of the most probable ones."""

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.layers.heads import next_labels
from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.reduce import sums

log = logging.getLogger("modelcenter")

_ROWS = 2048  # rows of logits processed at once


def perplexity(loss: float | None) -> float | None:
    """exp of a mean loss per token; None if there is no loss and, with a warning, if the result overflows."""
    if loss is None:
        return None
    try:
        value = math.exp(loss)
    except OverflowError:
        value = math.inf
    if math.isfinite(value):
        return value
    log.warning("perplexity: exp(%.4g) is not a finite number; the loss is too large, or not a number", loss)
    return None


class LanguageModel:
    """loss (mean over labelled tokens), perplexity (its exp) and accuracy (share whose label was the most probable).

    Args:
        causal: labels are the input's tokens, and token t predicts label t + 1 of its sequence. False: labels are at
            the tokens that predict them (masked and encoder-decoder models).
    """

    main = "perplexity"

    def __init__(self, causal: bool = True):
        self.causal = causal
        self.tokens = [0, 0]  # labelled, right
        self.total = torch.zeros((), dtype=torch.float64)

    def update(
        self, logits: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> None:
        """logits (batch, seq, vocabulary), targets (batch, seq) with -100 for none; packed: (1, T, ...), (1, T) and the
        boundaries. attention_mask: as given to the model."""
        if self.causal:
            targets = next_labels({"labels": targets, "cu_seqlens": cu_seqlens, "attention_mask": attention_mask})
        labels = targets.reshape(-1)
        places = (labels != IGNORE_INDEX).nonzero().flatten()
        flat = logits.reshape(-1, logits.shape[-1])
        for part in places.split(_ROWS):
            rows, truth = flat[part].float(), labels[part]
            self.total += F.cross_entropy(rows, truth, reduction="none").double().sum().cpu()
            self.tokens[1] += int((rows.argmax(-1) == truth).sum())
        self.tokens[0] += len(places)

    def result(self) -> dict[str, float | None]:
        tokens, right = sums(self.tokens)
        (total,) = sums([self.total.item()], torch.float64)
        loss = ratio(total, tokens) if tokens else None
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": ratio(right, tokens)}

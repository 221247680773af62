"""Replaced token detection: how well a discriminator tells replaced tokens, and how well its generator guesses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.lm import LanguageModel
from modelcenter.training.metrics.reduce import sums


class ReplacedTokens:
    """Of the discriminator, over all tokens: discriminator_loss, accuracy, precision and recall (replaced tokens are
    those to be found), and replaced, the share of tokens that were. Of the generator, over the masked tokens:
    generator_loss, generator_perplexity and generator_accuracy (of the likeliest token, not of the drawn one)."""

    main = "loss"

    def __init__(self) -> None:
        self.generator = LanguageModel(causal=False)
        self.tokens = [0, 0, 0, 0, 0]  # all, right, said to be replaced, replaced, found
        self.total = torch.zeros((), dtype=torch.float64)

    def update(self, logits: Tensor, replaced: Tensor, guesses: Tensor, targets: Tensor) -> None:
        """logits (batch, seq) of a token's having been replaced; replaced: 1 or 0 of each, -100 where there is none.
        guesses (n, vocabulary) of the generator for n masked tokens, targets (n,)."""
        judged = replaced != IGNORE_INDEX
        scores, truth = logits[judged].float(), replaced[judged]
        said, is_replaced = scores > 0, truth == 1
        self.total += F.binary_cross_entropy_with_logits(scores.double(), truth.double(), reduction="sum").cpu()
        found = said & is_replaced
        counts = [len(truth), *torch.stack([(said == is_replaced), said, is_replaced, found]).sum(1).tolist()]
        self.tokens = [a + b for a, b in zip(self.tokens, counts, strict=True)]
        self.generator.update(guesses, targets)

    def result(self) -> dict[str, float | None]:
        tokens, right, said, replaced, found = sums(self.tokens)
        (total,) = sums([self.total.item()], torch.float64)
        return {
            "discriminator_loss": total / tokens if tokens else None,
            "accuracy": ratio(right, tokens),
            "precision": ratio(found, said),
            "recall": ratio(found, replaced),
            "replaced": ratio(replaced, tokens),
            **{f"generator_{name}": value for name, value in self.generator.result().items()},
        }

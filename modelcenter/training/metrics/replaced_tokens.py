"""Metrics of replaced token detection: those of the discriminator, and those of its generator."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.training.metrics.base import ratio
from modelcenter.training.metrics.lm import LanguageModel
from modelcenter.training.metrics.reduce import sums


class ReplacedTokens:
    """Of the discriminator, over all tokens: discriminator_loss, accuracy, precision and recall (replaced tokens are
    the positives), and replaced, the share of replaced tokens. Of the generator, over the masked tokens:
    generator_loss, generator_perplexity and generator_accuracy (of the likeliest token, not of the sampled one)."""

    main = "loss"

    def __init__(self) -> None:
        self.generator = LanguageModel(causal=False)
        self.tokens = [0, 0, 0, 0, 0]  # all, right, predicted as replaced, replaced, both
        self.total = torch.zeros((), dtype=torch.float64)

    def update(self, logits: Tensor, replaced: Tensor, guesses: Tensor, targets: Tensor) -> None:
        """logits (batch, seq): that a token was replaced; replaced: 1 or 0 for each, -100 for none. guesses (n,
        vocabulary): the generator's logits for n masked tokens, targets (n,)."""
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

"""The cross-entropy: for labelled positions only, in chunks of vocabulary logits, summed and divided by a given count.

The count is that of the whole global batch, so gradients do not depend on how the batch is cut into microbatches and
ranks. `logits` takes logits; `head` computes them from hidden states and a weight, a chunk of positions at a time
(`chunks`), for a vocabulary that tensor parallelism may split (`vocabulary`). A teacher's predictions may take a share
of the loss (`distillation`), and `sampling` draws from the same logits. `term_weights` pools them over the tokens of a
sequence.
"""

from engine.loss.distillation import SoftTargets
from engine.loss.head import linear_cross_entropy, linear_distillation, linear_log_probs, vocabulary_logits
from engine.loss.logits import IGNORE_INDEX, FusedCrossEntropy, at_least_one, cross_entropy
from engine.loss.sampling import DRAW_BITS, sample_classes
from engine.loss.term_weights import linear_term_weights
from engine.loss.vocabulary import ExtendedVocabulary

__all__ = [
    "DRAW_BITS", "IGNORE_INDEX", "ExtendedVocabulary", "FusedCrossEntropy", "SoftTargets", "at_least_one",
    "cross_entropy", "linear_cross_entropy", "linear_distillation", "linear_log_probs", "linear_term_weights",
    "sample_classes", "vocabulary_logits",
]  # fmt: skip

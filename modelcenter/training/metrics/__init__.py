"""Streaming metrics: they are updated batch by batch, and their results are exact over all rows of all ranks.

Each has `update` for the batches of this rank, `result` for all ranks together, and `main`, the metric by which runs
are compared. Fractions are between 0 and 1; BLEU and chrF are on sacrebleu's scale, 0 to 100.
"""

from modelcenter.training.metrics.base import SMALLER_IS_BETTER, LossOnly, Metrics, Score
from modelcenter.training.metrics.classification import Accuracy, MultiLabel, Regression, SingleLabel
from modelcenter.training.metrics.generation import Generation, rouge
from modelcenter.training.metrics.lm import LanguageModel, perplexity
from modelcenter.training.metrics.preference import Preference
from modelcenter.training.metrics.qa import ExtractiveAnswers
from modelcenter.training.metrics.ranking import PairLabels, Ranking
from modelcenter.training.metrics.reduce import gather_lists, greatest, is_counted, sum_over_ranks, sums
from modelcenter.training.metrics.replaced_tokens import ReplacedTokens
from modelcenter.training.metrics.retrieval import Likeness, Retrieval
from modelcenter.training.metrics.tagging import TokenLabels, entities

__all__ = [
    "SMALLER_IS_BETTER",
    "Accuracy",
    "ExtractiveAnswers",
    "Generation",
    "LanguageModel",
    "Likeness",
    "LossOnly",
    "Metrics",
    "MultiLabel",
    "PairLabels",
    "Preference",
    "Ranking",
    "Regression",
    "ReplacedTokens",
    "Retrieval",
    "Score",
    "SingleLabel",
    "TokenLabels",
    "entities",
    "gather_lists",
    "greatest",
    "is_counted",
    "perplexity",
    "rouge",
    "sum_over_ranks",
    "sums",
]

"""Task heads over the hidden states of a packed batch.

A head has `forward(x, ctx, batch, counts, ...)` -> dict of outputs, with `loss` if the batch has labels, and
`counts(batch)` -> {term: supervised items}, from labels only. Each term of a loss is a sum divided by counts[term].
"""

from modelcenter.layers.heads.classification import (
    DenseClassifier,
    DenseMultipleChoice,
    LateClassifier,
    MultipleChoice,
    ReplacedTokens,
    ReplacedTokensInContext,
    SequenceClassifier,
    TokenClassifier,
    TransformedClassifier,
)
from modelcenter.layers.heads.embedding import DENSE_ACTIVATIONS, DenseLayers
from modelcenter.layers.heads.labels import check_labels, count_labels, next_labels, token_labels
from modelcenter.layers.heads.pairs import NextSentence, PairPretraining, SentenceOrder
from modelcenter.layers.heads.question_answering import ExtractiveQA
from modelcenter.layers.heads.transform import HeadTransform
from modelcenter.layers.heads.vocabulary import (
    CausalLM,
    DenseCausalLM,
    DenseSeq2SeqLM,
    LinearMaskedLM,
    MaskedLM,
    Seq2SeqLM,
    VocabularyHead,
)

__all__ = [
    "CausalLM", "DENSE_ACTIVATIONS", "DenseCausalLM", "DenseClassifier", "DenseLayers", "DenseMultipleChoice",
    "DenseSeq2SeqLM", "ExtractiveQA", "HeadTransform", "LateClassifier", "LinearMaskedLM", "MaskedLM", "MultipleChoice",
    "NextSentence", "PairPretraining", "ReplacedTokens", "ReplacedTokensInContext", "SentenceOrder", "Seq2SeqLM",
    "SequenceClassifier", "TokenClassifier", "TransformedClassifier", "VocabularyHead", "check_labels", "count_labels",
    "next_labels", "token_labels",
]  # fmt: skip

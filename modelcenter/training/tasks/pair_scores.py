"""The scores of a reranker for pairs of texts."""

import torch
from torch import Tensor

from modelcenter.hub.files.cross_encoder_files import activation_of
from modelcenter.models.base import Model
from modelcenter.training.evaluation import logits_of
from modelcenter.training.tasks.examples import Batches, TokenExamples, rank_batches


def outputs_of(model: Model, examples: TokenExamples, batch_size: int) -> Tensor:
    """(texts,) fp32 on the host: the model's outputs before the activation for all sequences of the examples, on every
    rank. Collective."""
    texts = TokenExamples(examples.table, examples.tokens)
    parts = rank_batches(texts, batch_size)
    return logits_of(model, Batches(texts, parts), [torch.from_numpy(part) for part in parts], len(texts), 1).flatten()


def activated(model: Model, outputs: Tensor) -> Tensor:
    """Apply the model's activation to its outputs; the default is the sigmoid, as in sentence-transformers.

    Raises:
        ValueError: the model's activation is not supported.
    """
    return outputs if activation_of(model.config.extra) == "identity" else outputs.sigmoid()


def check_one_label(model: Model) -> None:
    """Raise ValueError for a classifier with several classes."""
    if model.config.num_labels != 1:
        raise ValueError(
            f"{model.base_name}: got a classifier with {model.config.num_labels} labels, expected a reranker, which "
            "has one; `modelcenter finetune reranking` trains it"
        )


def shown(score: float) -> float:
    """A score rounded to the digits of fp32."""
    return float(f"{score:.7g}")

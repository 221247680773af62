"""A contender: sparse embeddings with sentence-transformers' trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.st_sparse_embedding SETTINGS, as st_embedding. The trainer adds the
warm-up of the regularisation by itself. A step that is cut into microbatches has the loss that was made for it.
"""

import json
import sys
from typing import Any

from scripts.bench.lib.finetuning.st_trainer import train
from scripts.bench.lib.finetuning.tasks.base import LONGEST
from scripts.bench.lib.finetuning.tasks.sparse_embedding import DOCUMENT_WEIGHT, QUERY_WEIGHT


def main(settings: dict[str, Any]) -> dict[str, Any]:
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import (
        CachedSpladeLoss,
        SparseMultipleNegativesRankingLoss,
        SpladeLoss,
    )

    def loss(model: Any, cut: dict[str, Any], across: bool) -> Any:
        ranking = SparseMultipleNegativesRankingLoss(model, gather_across_devices=across)
        weights = {"document_regularizer_weight": DOCUMENT_WEIGHT, "query_regularizer_weight": QUERY_WEIGHT}
        kind: Any = CachedSpladeLoss if cut else SpladeLoss
        return kind(model, ranking, **weights, **cut)

    return train(settings, (SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments), loss, LONGEST)


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

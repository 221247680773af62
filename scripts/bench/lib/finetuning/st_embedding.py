"""A contender: embeddings with sentence-transformers' trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.st_embedding SETTINGS, with SETTINGS as JSON, by the Python of the
environment "sentence-transformers". Prints what hf_trainer prints. The setting `kind` is "default", or "grouped"
(batches of rows of similar length, by a sampler, because there is no flag). A step in microbatches uses the loss made
for that, which runs them once for embeddings and again for gradients.
"""

import json
import sys
from typing import Any

from scripts.bench.lib.finetuning.st_trainer import train
from scripts.bench.lib.finetuning.tasks.base import LONGEST
from scripts.bench.lib.finetuning.tasks.embedding import SCALE


def main(settings: dict[str, Any]) -> dict[str, Any]:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

    def loss(model: Any, cut: dict[str, Any], across: bool) -> Any:
        kind: Any = CachedMultipleNegativesRankingLoss if cut else MultipleNegativesRankingLoss
        return kind(model, scale=SCALE, gather_across_devices=across, **cut)

    kinds = SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    return train(settings, kinds, loss, LONGEST)


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

"""A contender: late interaction with sentence-transformers' trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.st_multi_vector SETTINGS, as st_embedding, which says what these are.
"""

import json
import sys
from typing import Any

from scripts.bench.lib.finetuning.st_trainer import train


def main(settings: dict[str, Any]) -> dict[str, Any]:
    from sentence_transformers import (
        MultiVectorEncoder,
        MultiVectorEncoderTrainer,
        MultiVectorEncoderTrainingArguments,
    )
    from sentence_transformers.multi_vector_encoder.losses import (
        CachedMultiVectorMultipleNegativesRankingLoss,
        MultiVectorMultipleNegativesRankingLoss,
    )

    def loss(model: Any, cut: dict[str, Any], across: bool) -> Any:
        kind: Any = CachedMultiVectorMultipleNegativesRankingLoss if cut else MultiVectorMultipleNegativesRankingLoss
        return kind(model, gather_across_devices=across, **cut)

    kinds = MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
    return train(settings, kinds, loss)


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

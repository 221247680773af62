"""A contender: sparse embeddings with sentence-transformers' trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.st_sparse_embedding SETTINGS, as st_embedding. The trainer adds the
warm-up of the regularisation by itself. A step that is cut into microbatches has the loss that was made for it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.hf_trainer import arguments, counting, trained
from scripts.bench.lib.finetuning.st_embedding import ByLength
from scripts.bench.lib.finetuning.tasks import TASKS
from scripts.bench.lib.finetuning.tasks.base import LONGEST
from scripts.bench.lib.finetuning.tasks.sparse_embedding import DOCUMENT_WEIGHT, QUERY_WEIGHT


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import transformers
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import (
        CachedSpladeLoss,
        SparseMultipleNegativesRankingLoss,
        SpladeLoss,
    )

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    task, folder = TASKS[settings["task"]], Path(settings["folder"])
    rows, batch_size, microbatch = task.read_back(folder / "train"), settings["batch_size"], settings["microbatch"]
    model = SparseEncoder(str(folder / "start"), device="cpu")  # with the maximum over tokens, its default
    model.max_seq_length = LONGEST
    given = arguments(settings) | {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 1}
    if settings["kind"] == "grouped":
        encoded = task.encode(model.tokenizer, rows)
        given["batch_sampler"] = ByLength([sum(map(len, row["texts"])) for row in encoded])
    args = SparseEncoderTrainingArguments(**given)
    ranking = SparseMultipleNegativesRankingLoss(model, gather_across_devices=args.world_size > 1)
    options = {"document_regularizer_weight": DOCUMENT_WEIGHT, "query_regularizer_weight": QUERY_WEIGHT}
    if microbatch < batch_size:
        loss: Any = CachedSpladeLoss(model, ranking, mini_batch_size=microbatch, **options)
    else:
        loss = SpladeLoss(model, ranking, **options)
    data = datasets.Dataset.from_list(rows)
    return trained(counting(SparseEncoderTrainer, task)(model, args=args, train_dataset=data, loss=loss))


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

"""A contender: late interaction with sentence-transformers' trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.st_multi_vector SETTINGS, as st_embedding, which says what these are.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.hf_trainer import arguments, counting, trained
from scripts.bench.lib.finetuning.st_embedding import ByLength
from scripts.bench.lib.finetuning.tasks import TASKS


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import transformers
    from sentence_transformers import (
        MultiVectorEncoder,
        MultiVectorEncoderTrainer,
        MultiVectorEncoderTrainingArguments,
    )
    from sentence_transformers.multi_vector_encoder.losses import (
        CachedMultiVectorMultipleNegativesRankingLoss,
        MultiVectorMultipleNegativesRankingLoss,
    )

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    task, folder = TASKS[settings["task"]], Path(settings["folder"])
    rows, batch_size, microbatch = task.read_back(folder / "train"), settings["batch_size"], settings["microbatch"]
    model = MultiVectorEncoder(str(folder / "start"), device="cpu")
    given = arguments(settings) | {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 1}
    if settings["kind"] == "grouped":
        encoded = task.encode(model.tokenizer, rows)
        given["batch_sampler"] = ByLength([sum(map(len, row["texts"])) for row in encoded])
    args = MultiVectorEncoderTrainingArguments(**given)
    options = {"gather_across_devices": args.world_size > 1}
    if microbatch < batch_size:
        loss: Any = CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=microbatch, **options)
    else:
        loss = MultiVectorMultipleNegativesRankingLoss(model, **options)
    data = datasets.Dataset.from_list(rows)
    return trained(counting(MultiVectorEncoderTrainer, task)(model, args=args, train_dataset=data, loss=loss))


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

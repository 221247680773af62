"""A contender: embeddings with sentence-transformers' trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.st_embedding SETTINGS, with SETTINGS as JSON, by the Python of the
environment "sentence-transformers". Prints what hf_trainer prints. The setting `kind` is "default", or "grouped"
(batches of rows of similar length, by a sampler, because there is no flag). A step in microbatches uses the loss made
for that, which runs them once for embeddings and again for gradients.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.hf_trainer import arguments, counting, trained
from scripts.bench.lib.finetuning.tasks import TASKS
from scripts.bench.lib.finetuning.tasks.base import LONGEST
from scripts.bench.lib.finetuning.tasks.embedding import SCALE


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import transformers
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    task, folder = TASKS[settings["task"]], Path(settings["folder"])
    rows, batch_size, microbatch = task.read_back(folder / "train"), settings["batch_size"], settings["microbatch"]
    model = SentenceTransformer(str(folder / "start"), device="cpu")  # with mean pooling, its default
    model.max_seq_length = LONGEST
    given = arguments(settings) | {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 1}
    if settings["kind"] == "grouped":
        encoded = task.encode(model.tokenizer, rows)
        given["batch_sampler"] = ByLength([sum(map(len, row["texts"])) for row in encoded])
    args = SentenceTransformerTrainingArguments(**given)
    options = {"scale": SCALE, "gather_across_devices": args.world_size > 1}
    if microbatch < batch_size:
        loss: Any = CachedMultipleNegativesRankingLoss(model, mini_batch_size=microbatch, **options)
    else:
        loss = MultipleNegativesRankingLoss(model, **options)
    data = datasets.Dataset.from_list(rows)
    return trained(counting(SentenceTransformerTrainer, task)(model, args=args, train_dataset=data, loss=loss))


@dataclass
class ByLength:
    """Makes batches of rows of similar length, grouped as by Trainer. sentence-transformers pickles it.

    Attributes:
        lengths: of the rows, in tokens.
    """

    lengths: list[int]

    def __call__(self, dataset: Any, batch_size: int, drop_last: bool, generator: Any = None, **options: Any) -> Any:
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from transformers.trainer_pt_utils import LengthGroupedSampler

        rows = LengthGroupedSampler(batch_size, lengths=self.lengths, generator=generator)
        return DefaultBatchSampler(rows, batch_size, drop_last, generator=generator, **options)


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

"""A contender: preference training with TRL's DPOTrainer.

Usage: python -m scripts.bench.lib.finetuning.trl_dpo SETTINGS, with SETTINGS as JSON, by the Python of the environment
"trl". Prints what hf_trainer prints. The setting `kind` is "default" (the reference model runs in every step) or
"precomputed" (its log-probabilities for all rows are computed before the first step, as in this project).
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.hf_trainer import arguments, counting, trained
from scripts.bench.lib.finetuning.tasks import TASKS
from scripts.bench.lib.finetuning.tasks.dpo import BETA


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import transformers
    from trl import DPOConfig, DPOTrainer

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    task, folder = TASKS[settings["task"]], Path(settings["folder"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    rows = task.read_back(folder / "train")
    model = task.load(folder / "start", rows)
    args = DPOConfig(
        **arguments(settings),
        beta=BETA,
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        precompute_ref_log_probs=settings["kind"] == "precomputed",
    )
    data = datasets.Dataset.from_list(rows)
    return trained(counting(DPOTrainer, task)(model, args=args, train_dataset=data, processing_class=tokenizer))


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

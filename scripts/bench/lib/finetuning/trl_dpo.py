"""A contender: preferences with TRL's DPOTrainer, in one process.

Usage: python -m scripts.bench.lib.finetuning.trl_dpo SETTINGS, with SETTINGS as JSON, by the Python of the environment
"trl". Prints what hf_trainer prints. The setting `kind` is "default" (the reference model beside the trained one, in
every step) or "precomputed" (its log-probabilities for all rows before the first step, as in this project).
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.hf_trainer import arguments
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
    seen = 0

    class Counting(DPOTrainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += task.tokens(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    args = DPOConfig(
        **arguments(settings),
        beta=BETA,
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        precompute_ref_log_probs=settings["kind"] == "precomputed",
    )
    began = time.perf_counter()
    trainer = Counting(model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    prepared = time.perf_counter() - began
    seconds = trainer.train().metrics["train_runtime"]
    trainer.save_model(settings["output_dir"])
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"tokens": seen, "seconds": seconds, "prepared_seconds": prepared, "losses": losses}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

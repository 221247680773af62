"""A contender: fine-tuning with Hugging Face's Trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.finetuning.hf_trainer SETTINGS, with SETTINGS as JSON. Prints JSON: the real tokens
that were trained on, seconds and losses. The setting `kind` is "default"; "grouped" (batches of rows of similar
length); "packed" (the rows of a batch end to end, which Trainer supports for decoders only); "compiled" ("grouped"
with torch.compile); or "bf16" ("grouped" with autocast to bf16).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks import TASKS, Task


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import torch
    import transformers
    from transformers import Trainer, TrainingArguments

    torch.set_float32_matmul_precision(settings["matmul_precision"])
    transformers.utils.logging.set_verbosity_error()
    task, folder, kind = TASKS[settings["task"]], Path(settings["folder"]), settings["kind"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    rows = task.read_back(folder / "train")
    data: Any = task.encode(tokenizer, rows)
    grouped = kind in ("grouped", "compiled", "bf16")
    if grouped and isinstance(data[0]["input_ids"][0], list):  # Trainer would read the number of choices as a length
        lengths = [max(map(len, row["input_ids"])) for row in data]
        data = datasets.Dataset.from_list(data).add_column("length", lengths)
    model = task.load(folder / "start", rows)
    args = TrainingArguments(
        **arguments(settings),
        torch_compile=kind == "compiled",
        bf16=kind == "bf16",
        **({"train_sampling_strategy": "group_by_length"} if grouped else {}),
    )
    collator = task.collator(kind, tokenizer, model)
    trainer = counting(Trainer, task)(
        model, args, train_dataset=data, data_collator=collator, processing_class=tokenizer
    )
    return trained(trainer)


def counting(trainer: Any, task: Task) -> Any:
    """A class of trainers that count the tokens they train on, in `seen`."""

    class Counting(trainer):
        seen = 0

        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self.seen += task.tokens(inputs)
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting


def trained(trainer: Any) -> dict[str, Any]:
    """Train and export; returns the result to print on rank 0."""
    import torch
    import torch.distributed as dist

    seconds = trainer.train().metrics["train_runtime"]
    trainer.save_model(trainer.args.output_dir)
    seen = torch.tensor(trainer.seen)
    if dist.is_initialized():
        dist.all_reduce(seen)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"tokens": int(seen), "seconds": seconds, "losses": losses} if trainer.is_world_process_zero() else {}


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The TrainingArguments of all peers."""
    return {
        "output_dir": settings["output_dir"],
        "per_device_train_batch_size": settings["microbatch"],
        "gradient_accumulation_steps": settings["batch_size"] // settings["microbatch"],
        "max_steps": settings["steps"],
        "learning_rate": settings["lr"],
        "warmup_steps": 0.1,
        "weight_decay": 0.01,
        "optim": "adamw_torch_fused",
        "seed": settings["seed"],
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

"""A contender: fine-tuning with Hugging Face's Trainer, in one process or under torchrun.

Usage: python -m scripts.bench.lib.hf_trainer SETTINGS, with SETTINGS as JSON. Prints JSON: the real tokens that were
trained on, seconds and losses. The setting `kind` is "default"; "grouped" (batches of rows of similar length); "packed"
(the rows of a batch end to end, which Trainer supports for decoders only); or "compiled" ("grouped" with
torch.compile).
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib import finetuning_data, workloads


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import transformers
    from transformers import Trainer, TrainingArguments

    transformers.utils.logging.set_verbosity_error()
    task, folder, kind = settings["task"], Path(settings["folder"]), settings["kind"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    data = finetuning_data.encode(task, tokenizer, finetuning_data.read_back(task, folder / "train"))
    model, collator = model_and_collator(task, kind, folder / "start", tokenizer)
    seen = 0

    class Counting(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += int(inputs["attention_mask"].sum()) if kind != "packed" else inputs["input_ids"].numel()
            if task == "seq2seq":
                seen += int((inputs["labels"] != -100).sum())
            return super().training_step(model, inputs, *args, **kwargs)

    args = TrainingArguments(
        settings["output_dir"],
        per_device_train_batch_size=settings["batch_size"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        warmup_steps=0.1,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        seed=settings["seed"],
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        torch_compile=kind == "compiled",
        **({"train_sampling_strategy": "group_by_length"} if kind in ("grouped", "compiled") else {}),
    )
    trainer = Counting(model, args, train_dataset=data, data_collator=collator, processing_class=tokenizer)
    seconds = trainer.train().metrics["train_runtime"]
    trainer.save_model(settings["output_dir"])
    if dist.is_initialized():
        total = torch.tensor(seen)
        dist.all_reduce(total)
        seen = int(total)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"tokens": seen, "seconds": seconds, "losses": losses} if trainer.is_world_process_zero() else {}


def model_and_collator(task: str, kind: str, start: Path, tokenizer: Any) -> tuple[Any, Any]:
    import transformers as hf

    model_task = finetuning_data.TASKS[task]
    labels = {"num_labels": 2} if task == "classification" else {}
    model = workloads.auto_class(model_task).from_pretrained(start, **labels)
    if task == "classification":
        return model, hf.DataCollatorWithPadding(tokenizer)
    if task == "mlm":
        return model, hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=finetuning_data.MASKED)
    if kind == "packed":
        return model, hf.DataCollatorWithFlattening()
    return model, hf.DataCollatorForSeq2Seq(tokenizer, model=model)


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

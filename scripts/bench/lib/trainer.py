"""A contender: fine-tuning with Hugging Face's Trainer, in a process of its own or under torchrun.

Usage: python -m scripts.bench.lib.trainer SETTINGS, which is JSON. Prints tokens, seconds and losses as JSON; real
tokens are counted as they are trained on. `kind`: "default" as Trainer comes; "grouped" with batches of rows of like
length; "packed" with the rows of a batch end to end, which Trainer can for decoders only; "compiled" as "grouped", by
torch.compile.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib import sets


def main(settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import transformers
    from transformers import Trainer, TrainingArguments

    transformers.utils.logging.set_verbosity_error()
    task, folder, kind = settings["task"], Path(settings["folder"]), settings["kind"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    data = sets.encode(task, tokenizer, sets.read_back(task, folder / "train"))
    model, collator = parts(task, kind, folder / "start", tokenizer)
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


def parts(task: str, kind: str, start: Path, tokenizer: Any) -> tuple[Any, Any]:
    """Model and collator."""
    import transformers as hf

    if task == "classification":
        model = hf.AutoModelForSequenceClassification.from_pretrained(start, num_labels=2)
        return model, hf.DataCollatorWithPadding(tokenizer)
    if task == "mlm":
        model = hf.AutoModelForMaskedLM.from_pretrained(start)
        return model, hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=sets.MASKED)
    auto = hf.AutoModelForCausalLM if task == "lm" else hf.AutoModelForSeq2SeqLM
    model = auto.from_pretrained(start)
    if kind == "packed":
        return model, hf.DataCollatorWithFlattening()
    return model, hf.DataCollatorForSeq2Seq(tokenizer, model=model)


if __name__ == "__main__":
    if found := main(json.loads(sys.argv[1])):
        print(json.dumps(found))

"""Evaluates exported models with transformers, on held-out rows, in the same order for every contender.

Usage: python -m scripts.bench.lib.evaluate_export SETTINGS, with SETTINGS as JSON. Prints the mean loss over labelled
tokens or rows (masked LM: over tokens drawn from a fixed seed) and, for classification, the accuracy.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib import finetuning_data

ROWS = 32


def main(settings: dict[str, Any]) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    import transformers

    from scripts.bench.lib.hf_trainer import model_and_collator

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    task, folder = settings["task"], Path(settings["folder"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    model, collator = model_and_collator(task, "default", Path(settings["model"]), tokenizer)
    rows = finetuning_data.encode(task, tokenizer, finetuning_data.read_back(task, folder / "dev"))
    total, count, right = 0.0, 0, 0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), ROWS):
            batch = collator(rows[start : start + ROWS])
            logits, labels = model(**batch).logits.float(), batch["labels"]
            if task == "lm":
                logits, labels = logits[:, :-1], labels[:, 1:]
            logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
            total += F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()
            count += int((labels != -100).sum())
            right += int((logits.argmax(-1) == labels).sum())
    return {"loss": total / count, "accuracy": right / count}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

"""Evaluates exported models with transformers, on held-out rows, in the same order for every contender.

Usage: python -m scripts.bench.lib.finetuning.evaluate_export SETTINGS, with SETTINGS as JSON. Prints the mean loss over
labelled tokens or rows (masked LM: over tokens drawn with a fixed seed), and the number of correct ones.
"""

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks import TASKS

ROWS = 32


def main(settings: dict[str, Any]) -> dict[str, float]:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    task, folder = TASKS[settings["task"]], Path(settings["folder"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start")
    known = task.read_back(folder / "train")
    model = task.load(Path(settings["model"]), known).eval()
    collate = task.collator("default", tokenizer, model)
    rows = task.encode(tokenizer, task.read_back(folder / "dev"), known)
    total, count, right = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(rows), ROWS):
            loss, items, hits = task.judge(model, collate(rows[start : start + ROWS]), folder / "start")
            total, count, right = total + loss, count + items, right + hits
    return {"loss": total / count, "accuracy": right / count}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

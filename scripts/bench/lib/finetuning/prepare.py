"""Writes the data of a fine-tuning benchmark, a tokenizer, and the initial weights of every contender.

Usage: python -m scripts.bench.lib.finetuning.prepare FOLDER SETTINGS, with SETTINGS as JSON. It runs in a separate
process because the benchmark's own memory would count as that of the children it starts.

With a folder of data sets, the texts are real: sst2 (train.tsv, dev.tsv: label, tab, sentence), tinyshakespeare
(input.txt) and e2e (train.csv, dev.csv with mr and ref). Without it, they are the samples in scripts/samples.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.lib import shuffled, workloads
from scripts.bench.lib.finetuning.tasks import TASKS
from scripts.bench.lib.finetuning.tasks.base import MULTILINGUAL


def prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write train and dev data, and `start`: a tokenizer and a model with random weights drawn from the seed."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    task, data = TASKS[settings["task"]], settings["data"]
    rows = shuffled(task.read(data, "train"))[: settings["rows"] if task.one_epoch else None]
    task.write(rows, folder / "train")
    task.write(task.read(data, "dev")[: settings["dev_rows"]], folder / "dev")
    tokenizer = task.tokenizer([" ".join(task.texts(row)) for row in rows])
    torch.manual_seed(settings["seed"])
    words = {"published": task.words, "multilingual": MULTILINGUAL, "data": len(tokenizer)}
    config = task.configuration(settings["hidden"], settings["layers"], words[settings["vocabulary"]])
    config.update(task.head(rows))
    model = workloads.auto_class(task.model_task).from_config(config)
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    task.complete(folder / "start", settings["hidden"])
    sizes = list(itertools.chain.from_iterable(map(task.sizes, task.encode(tokenizer, rows))))
    tokens = sum(row.tokens + row.target for row in sizes)
    return {
        "parameters": model.num_parameters(),
        "rows": len(rows),
        "tokens_per_row": round(tokens / len(rows), 1),
        "gflop_per_token": task.arithmetic(config, sizes) / tokens / 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(prepare(Path(sys.argv[1]), json.loads(sys.argv[2]))))

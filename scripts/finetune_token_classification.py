#!/usr/bin/env python
"""Train a model to tag words: named entities, parts of speech, word segments.

The data are CoNLL files, json, jsonl or parquet files with a list of words and a list of tags in each row, a folder of
them (train, dev and test), or a data set of the Hugging Face Hub. Precision, recall and F1 are computed over whole
entities. --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune token-classification --model google-bert/bert-base-cased --output_dir runs/ner \\
      --train_data train.conll --eval_data dev.conll

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune token-classification [flags]
scripts/finetune_token_classification.py takes the same flags.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: the folder with the packages is one of those around it
    sys.path[0] = str(next(f for f in Path(__file__).resolve().parents if (f / "modelcenter").is_dir()))

from modelcenter import cli
from modelcenter.training.script import run_task


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the task from a command line. Raises ValueError for wrong flags, files or data."""
    # Flags, data, ranks, model, loop: step by step in modelcenter/training/script.py.
    run_task("token-classification", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "token-classification", *sys.argv[1:]])

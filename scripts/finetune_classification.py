#!/usr/bin/env python
"""Train a model to classify texts, or pairs of texts.

The label is one class, several classes or a number (regression). The data are json, jsonl, csv, tsv or parquet files, a
folder of them (train, dev and test), or a data set of the Hugging Face Hub. The columns of texts and labels are
detected; --text_column, --text_pair_column and --label_column name them. --dry_run shows the plan, runs one step and
writes nothing.

Example:
  modelcenter finetune classification --model google-bert/bert-base-uncased --output_dir runs/reviews \\
      --train_data train.csv --eval_data dev.csv --epochs 3

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune classification [flags]
scripts/finetune_classification.py takes the same flags.
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
    run_task("classification", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "classification", *sys.argv[1:]])

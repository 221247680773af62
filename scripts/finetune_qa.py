#!/usr/bin/env python
"""Train a model to answer questions with a span of a given text (extractive question answering).

The data are json files in the format of SQuAD, rows with question, context and answers, or a data set of the Hugging
Face Hub. Long texts are read in overlapping windows. Questions may have no answer. --dry_run shows the plan, runs one
step and writes nothing.

Example:
  modelcenter finetune qa --model google-bert/bert-base-uncased --output_dir runs/squad \\
      --train_data rajpurkar/squad --max_length 384 --doc_stride 128

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune qa [flags]
scripts/finetune_qa.py takes the same flags.
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
    run_task("qa", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "qa", *sys.argv[1:]])

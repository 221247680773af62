#!/usr/bin/env python
"""Fine-tune a model for extractive question answering: the answer is a span of a given text.

    python scripts/finetune_qa.py --model bert-base-uncased --train_data rajpurkar/squad --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_qa.py --config scripts/recipes/squad_v2.yaml --output_dir out

The data are files in the format of SQuAD and CMRC 2018 (json), rows of question, context and answers (json, jsonl,
parquet; a folder may hold train and dev files) or a Hub data set. Long contexts are read in overlapping windows.
Questions may have no answer. --dry_run shows the plan and runs one step.
The same as: modelcenter finetune qa
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

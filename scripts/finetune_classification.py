#!/usr/bin/env python
"""Fine-tune a model to classify texts: one label, several labels or a score; single texts or pairs.

    python scripts/finetune_classification.py --model bert-base-uncased --train_data data/sst2 --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_classification.py --config scripts/recipes/sst2.yaml --output_dir out

The data are files (json, jsonl, csv, tsv, parquet; a folder may hold train, dev and test files) or a Hub data set. Text
and label columns are found by name and content, or set by flags. --dry_run shows the plan and runs one step.
The same as: modelcenter finetune classification
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

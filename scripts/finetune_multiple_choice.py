#!/usr/bin/env python
"""Fine-tune an encoder to choose the right one of a few texts (SWAG, COPA, RACE, C3, ...).

    python scripts/finetune_multiple_choice.py --model bert-base-uncased --train_data allenai/swag --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_multiple_choice.py --config scripts/recipes/race.yaml --output_dir out

The data are files (json, jsonl, csv, tsv, parquet; a folder may hold train, dev and test files) or a Hub data set. The
columns of context, question, choices and label are found by their usual names, or set by flags; rows may have
different numbers of choices. --dry_run shows the plan and runs one step.
The same as: modelcenter finetune multiple-choice
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
    run_task("multiple-choice", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "multiple-choice", *sys.argv[1:]])

#!/usr/bin/env python
"""Train a model to choose the correct one of several texts.

Each row has a context, a question or both, its choices, and the correct choice. Rows may have different numbers of
choices. The data are files or a data set of the Hugging Face Hub. The columns of SWAG, COPA, RACE, C3, ARC and others
are detected; flags name those of other data. --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune multiple-choice --model google-bert/bert-base-uncased --output_dir runs/swag \\
      --train_data allenai/swag --data_config regular

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune multiple-choice [flags]
scripts/finetune_multiple_choice.py takes the same flags.
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

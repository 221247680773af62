#!/usr/bin/env python
"""Train a language model on pairs of a preferred and a rejected answer (DPO or IPO).

Each row has a prompt, a chosen answer and a rejected answer, as texts or as chat messages. The columns are detected by
their names or given by flags. The model is compared with a reference model: itself before training, or --reference.
--dry_run shows which tokens are trained on, runs one step and writes nothing.

Example:
  modelcenter finetune dpo --model runs/chat/model --output_dir runs/dpo --train_data pairs.jsonl --lr 1e-6

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune dpo [flags]
scripts/finetune_dpo.py takes the same flags.
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
    run_task("dpo", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "dpo", *sys.argv[1:]])

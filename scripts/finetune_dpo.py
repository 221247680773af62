#!/usr/bin/env python
"""Train a language model on preferences between two answers to each question (DPO, IPO).

    python scripts/finetune_dpo.py --model runs/chat/model --train_data pairs.jsonl --output_dir runs/dpo --lr 1e-6
    torchrun --nproc_per_node 8 scripts/finetune_dpo.py --config scripts/recipes/dpo.yaml --output_dir runs/dpo

Rows have a prompt, the chosen answer and the rejected one, as texts or as messages; columns are found by name, or set
by flags. Both answers are compared with a reference model, which is the initial model unless --reference names another.
--dry_run shows what is trained on and runs one step. The same as: modelcenter finetune dpo
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

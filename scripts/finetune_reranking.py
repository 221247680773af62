#!/usr/bin/env python
"""Train a reranker, also called cross-encoder: it reads a query and a text together, and scores the text.

Each row has a query and a text with a label, or a list of texts with a list of labels; or a query, a text that answers
it and texts that do not, which `modelcenter mine` finds. The texts of a row are compared with each other and are always
in one microbatch; gradients do not depend on how a step is split. The model is saved as a CrossEncoder of
sentence-transformers. --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune reranking --model google-bert/bert-base-uncased --output_dir runs/nq-reranker \\
      --train_data nq.jsonl --eval_fraction 0.02 --batch_size 8

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune reranking [flags]
scripts/finetune_reranking.py takes the same flags.
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
    run_task("reranking", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "reranking", *sys.argv[1:]])

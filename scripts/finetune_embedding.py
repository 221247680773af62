#!/usr/bin/env python
"""Train a model to make embeddings: vectors that are more similar for texts that belong together.

Each row has a text and one that belongs to it, such as a question and its answer, and perhaps texts that do not; or two
texts and a score of their similarity. Each text is compared with all others of a step, on all ranks and in all
microbatches, so gradients do not depend on how the step is split. The model is saved in the format of
sentence-transformers. --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune embedding --model google-bert/bert-base-uncased --output_dir runs/nq \\
      --train_data sentence-transformers/natural-questions --eval_fraction 0.02 --global_batch_size 256

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune embedding [flags]
scripts/finetune_embedding.py takes the same flags.
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
    run_task("embedding", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "embedding", *sys.argv[1:]])

#!/usr/bin/env python
"""Train a late-interaction model (ColBERT): one vector per token, and a score of a query and a document that is the
sum, over the query's vectors, of the greatest similarity to one of the document's.

Each row has a query and a document that answers it, and perhaps documents that do not; or a list of documents and a
list of a teacher's scores. Documents are told apart from all others of a step, on all ranks and in all microbatches,
and gradients do not depend on how the step is cut. The model is saved as a MultiVectorEncoder of sentence-transformers.
--dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune multi-vector --model google-bert/bert-base-uncased --output_dir runs/nq-colbert \\
      --train_data sentence-transformers/natural-questions --eval_fraction 0.02 --global_batch_size 64

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune multi-vector [flags]
scripts/finetune_multi_vector.py takes the same flags.
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
    run_task("multi-vector", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "multi-vector", *sys.argv[1:]])

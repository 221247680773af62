#!/usr/bin/env python
"""Train a model to make sparse embeddings (SPLADE): for each text a weight of each token of the vocabulary. Few of them
are above 0, so that an inverted index finds texts by them.

The model is an encoder with its masked-language-model head. Rows are those of `finetune embedding`: a text and one that
belongs to it, and perhaps texts that do not; or two texts and a score. Texts are told apart from all others of a step,
on all ranks and in all microbatches, and the regularisation counts all of them together. The model is saved as
sentence-transformers has its SparseEncoder. --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune sparse-embedding --model distilbert/distilbert-base-uncased --output_dir runs/splade \\
      --train_data sentence-transformers/natural-questions --eval_fraction 0.02 --global_batch_size 128

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune sparse-embedding [flags]
scripts/finetune_sparse_embedding.py takes the same flags.
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
    run_task("sparse-embedding", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "sparse-embedding", *sys.argv[1:]])

#!/usr/bin/env python
"""Fine-tune a model to tag words: named entities, parts of speech, segments.

    python scripts/finetune_token_classification.py --model bert-base-cased --train_data data/conll2003 --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_token_classification.py --config scripts/recipes/conll2003.yaml \\
        --output_dir out

The data are files (conll, or json, jsonl and parquet with a list of words and one of tags in each row; a folder may
hold train, dev and test files) or a Hub data set. Metrics are those of whole entities. --dry_run shows the plan and
runs one step.
The same as: modelcenter finetune token-classification
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
    run_task("token-classification", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "token-classification", *sys.argv[1:]])

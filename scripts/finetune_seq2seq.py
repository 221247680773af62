#!/usr/bin/env python
"""Fine-tune an encoder-decoder to generate text from text: summaries, translations, descriptions of data.

    python scripts/finetune_seq2seq.py --model google-t5/t5-small --prefix "summarize: " --train_data data/news \\
        --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_seq2seq.py --config scripts/recipes/xsum.yaml --output_dir out

The data are files (json, jsonl, csv, tsv, parquet; a folder may hold train, dev and test files) or a Hub data set.
Source and target columns are found by their usual names, or set by flags; a column of translations needs --source_lang
and --target_lang. Evaluations generate texts and score them by --metrics. --dry_run shows the plan and runs one step.
The same as: modelcenter finetune seq2seq
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
    run_task("seq2seq", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "seq2seq", *sys.argv[1:]])

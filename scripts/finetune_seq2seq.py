#!/usr/bin/env python
"""Train an encoder-decoder such as T5 to generate a text from a text: summaries, translations, descriptions of data.

The data are json, jsonl, csv, tsv or parquet files, a folder of them (train, dev and test), or a data set of the
Hugging Face Hub. Source and target columns are detected by their names, or given by --source_column and
--target_column; a column of translations needs --source_lang and --target_lang. Evaluations generate texts and score
them (--metrics). --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter finetune seq2seq --model google-t5/t5-small --output_dir runs/summaries \\
      --train_data train.jsonl --eval_data dev.jsonl --prefix "summarize: " --metrics rouge

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune seq2seq [flags]
scripts/finetune_seq2seq.py takes the same flags.
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

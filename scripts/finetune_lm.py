#!/usr/bin/env python
"""Train a language model on chats, on instructions with answers, or on plain text.

Chats are rows of messages; instructions are rows with a prompt and an answer, as in Alpaca. The columns are detected by
their names or given by flags. Rows are formatted with the tokenizer's chat template if it has one. Only answers are
trained on; for plain text, all tokens. --dry_run shows which tokens are trained on, runs one step and writes nothing.

Example:
  modelcenter finetune lm --model openai-community/gpt2 --output_dir runs/chat --train_data chats.jsonl --epochs 3

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter finetune lm [flags]
scripts/finetune_lm.py takes the same flags.
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
    run_task("lm", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["finetune", "lm", *sys.argv[1:]])

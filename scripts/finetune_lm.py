#!/usr/bin/env python
"""Fine-tune a language model on instructions, chats or plain text.

    python scripts/finetune_lm.py --model openai-community/gpt2 --train_data data/e2e --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_lm.py --config scripts/recipes/alpaca.yaml --output_dir out

Rows are chats (messages, ShareGPT's conversations), instructions with answers (prompt and response, Alpaca's
instruction, input and output, ...), or text; columns are found by name, or set by flags. Chats and instructions are
written by the tokenizer's chat template if it has one, and only the answers are trained on. --dry_run shows what is
trained on and runs one step. The same as: modelcenter finetune lm
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

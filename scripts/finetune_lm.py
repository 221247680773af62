#!/usr/bin/env python
"""Fine-tune a language model on instructions, chats or plain text.

    python scripts/finetune_lm.py --model openai-community/gpt2 --train_data data/e2e --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_lm.py --config scripts/recipes/alpaca.yaml --output_dir out

Rows are chats (messages, ShareGPT's conversations), instructions with answers (prompt and response, Alpaca's
instruction, input and output, ...), or text; columns are found by name, or given. Chats and instructions are written
by the tokenizer's chat template where it has one, and answers alone are trained on. --dry_run shows what is trained on
and runs one step. The same as: modelcenter finetune lm
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run from a checkout: the packages lie beside this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from modelcenter.training.errors import user_errors
from modelcenter.training.script import run_task


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the task from a command line. Raises ValueError for wrong flags, files or data."""
    # Flags, data, ranks, model, loop: step by step in modelcenter/training/script.py.
    run_task("lm", argv, prog, __doc__)


if __name__ == "__main__":
    with user_errors():
        main()

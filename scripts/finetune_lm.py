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

from modelcenter.training.config import LMConfig
from modelcenter.training.errors import user_errors


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the task from a command line. Raises ValueError for wrong flags, files or data."""
    cfg = LMConfig.from_args(sys.argv[1:] if argv is None else argv, prog, __doc__)
    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))

    # Imported here, so that --help and mistakes in the flags take no time.
    from modelcenter.training.loop import train
    from modelcenter.training.plan import dry_run
    from modelcenter.training.setup import build_model, load_tokenizer, prepare, start
    from modelcenter.training.tasks.lm import LanguageModelling

    prepare(cfg)  # the output folder can be written and holds no finished run
    task = LanguageModelling(cfg)  # reads the data, finds its columns and turns
    start(cfg)  # the ranks meet
    tokenizer = load_tokenizer(cfg)
    model = build_model(cfg, task, tokenizer)
    train_set, eval_set = task.tokenize(tokenizer, cfg.max_length)  # what is an answer, and so trained on
    (dry_run if cfg.dry_run else train)(cfg, task, model, tokenizer, train_set, eval_set)


if __name__ == "__main__":
    with user_errors():
        main()

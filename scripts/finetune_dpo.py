#!/usr/bin/env python
"""Train a language model on preferences: of two answers to each question, which is better (DPO, IPO).

    python scripts/finetune_dpo.py --model runs/chat/model --train_data pairs.jsonl --output_dir runs/dpo --lr 1e-6
    torchrun --nproc_per_node 8 scripts/finetune_dpo.py --config scripts/recipes/dpo.yaml --output_dir runs/dpo

Rows have a prompt, the chosen answer and the rejected one, as texts or as messages; columns are found by name, or
given. Both are compared with a reference model, which is the model as it is at the start unless --reference names
another. --dry_run shows what is trained on and runs one step. The same as: modelcenter finetune dpo
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run from a checkout: the packages lie beside this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from modelcenter.training.config import DPOConfig
from modelcenter.training.errors import user_errors


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the task from a command line. Raises ValueError for wrong flags, files or data."""
    cfg = DPOConfig.from_args(sys.argv[1:] if argv is None else argv, prog, __doc__)
    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))

    # Imported here, so that --help and mistakes in the flags take no time.
    from modelcenter.training.loop import train
    from modelcenter.training.plan import dry_run
    from modelcenter.training.setup import build_model, load_tokenizer, prepare, start
    from modelcenter.training.tasks.dpo import DPO

    prepare(cfg)  # the output folder can be written and holds no finished run
    task = DPO(cfg)  # reads the data, finds its columns and pairs
    start(cfg)  # the ranks meet
    tokenizer = load_tokenizer(cfg)
    model = build_model(cfg, task, tokenizer)
    train_set, eval_set = task.tokenize(tokenizer, cfg.max_length)  # what is an answer, and so compared
    task.set_reference(model, train_set, eval_set)  # how probable the answers are before the first step
    (dry_run if cfg.dry_run else train)(cfg, task, model, tokenizer, train_set, eval_set)


if __name__ == "__main__":
    with user_errors():
        main()

#!/usr/bin/env python
"""Fine-tune a model to classify texts: one label, several labels or a score; single texts or pairs.

    python scripts/finetune_classification.py --model bert-base-uncased --train_data data/sst2 --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_classification.py --config scripts/recipes/sst2.yaml --output_dir out

The data are files (json, jsonl, csv, tsv, parquet; a folder may hold train, dev and test files) or a Hub data set. Text
and label columns are found by name and content, or given. --dry_run shows the plan and runs one step.
The same as: modelcenter finetune classification
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run from a checkout: the packages lie beside this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from modelcenter.training.config import ClassificationConfig
from modelcenter.training.errors import user_errors


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the task from a command line. Raises ValueError for wrong flags, files or data."""
    cfg = ClassificationConfig.from_args(sys.argv[1:] if argv is None else argv, prog, __doc__)
    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))

    # Imported here, so that --help and mistakes in the flags take no time.
    from modelcenter.training.loop import train
    from modelcenter.training.plan import dry_run
    from modelcenter.training.setup import build_model, load_tokenizer, prepare, start
    from modelcenter.training.tasks.classification import Classification

    prepare(cfg)  # the output folder can be written and holds no finished run
    task = Classification(cfg)  # reads the data, finds its columns and labels
    start(cfg)  # the ranks meet
    tokenizer = load_tokenizer(cfg)
    model = build_model(cfg, task, tokenizer)
    train_set, eval_set = task.tokenize(tokenizer, cfg.max_length)
    (dry_run if cfg.dry_run else train)(cfg, task, model, tokenizer, train_set, eval_set)


if __name__ == "__main__":
    with user_errors():
        main()

#!/usr/bin/env python
"""Fine-tune a model to tag words: named entities, parts of speech, segments.

    python scripts/finetune_token_classification.py --model bert-base-cased --train_data data/conll2003 --output_dir out
    torchrun --nproc_per_node 8 scripts/finetune_token_classification.py --config scripts/recipes/conll2003.yaml \\
        --output_dir out

The data are files (conll, or json, jsonl and parquet with a list of words and one of tags in each row; a folder may
hold train, dev and test files) or a Hub data set. Judged by whole entities. --dry_run shows the plan and runs one step.
The same as: modelcenter finetune token-classification
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run from a checkout: the packages lie beside this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from modelcenter.training.config import TokenClassificationConfig
from modelcenter.training.errors import user_errors


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the task from a command line. Raises ValueError for wrong flags, files or data."""
    cfg = TokenClassificationConfig.from_args(sys.argv[1:] if argv is None else argv, prog, __doc__)
    cfg.require("model", "train_data", *(() if cfg.dry_run else ("output_dir",)))

    # Imported here, so that --help and mistakes in the flags take no time.
    from modelcenter.training.loop import train
    from modelcenter.training.plan import dry_run
    from modelcenter.training.setup import build_model, load_tokenizer, prepare, start
    from modelcenter.training.tasks.token_classification import TokenClassification

    prepare(cfg)  # the output folder can be written and holds no finished run
    task = TokenClassification(cfg)  # reads the data, finds its columns and tags
    start(cfg)  # the ranks meet
    tokenizer = load_tokenizer(cfg)
    model = build_model(cfg, task, tokenizer)
    train_set, eval_set = task.tokenize(tokenizer, cfg.max_length)
    (dry_run if cfg.dry_run else train)(cfg, task, model, tokenizer, train_set, eval_set)


if __name__ == "__main__":
    with user_errors():
        main()

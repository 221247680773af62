#!/usr/bin/env python
"""Pretrain an encoder-decoder by span corruption, T5's objective, from random or pretrained weights.

    python scripts/pretrain_span_corruption.py --model google-t5/t5-small --train_data corpus.txt --output_dir out
    torchrun --nproc_per_node 8 scripts/pretrain_span_corruption.py --config scripts/recipes/t5.yaml --output_dir out

Works with T5, mT5 and umT5. Spans of the text are replaced by sentinels, and the decoder predicts the spans.
The data are text (txt, jsonl, json, csv, tsv, parquet, a Hub data set), token files from `modelcenter preprocess`, or
Megatron's .bin and .idx. PATH@WEIGHT mixes several; --streaming reads text that is too large to tokenise beforehand.
--from_scratch starts from random weights of a preset or config.json. --dry_run shows the plan and runs one step.
The same as: modelcenter pretrain span-corruption
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
    run_task("span-corruption", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["pretrain", "span-corruption", *sys.argv[1:]])

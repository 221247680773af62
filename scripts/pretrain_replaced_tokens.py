#!/usr/bin/env python
"""Pretrain ELECTRA or DeBERTa-v3: a discriminator learns to detect the tokens of a text that a generator has replaced.

--model is the discriminator, --generator a masked language model with the same vocabulary; both are trained together.
--from_scratch starts both from random weights of presets or config.json files; without --generator it is made from the
discriminator's configuration, with --generator_size. --share_embeddings sets how the two share their embeddings. The
data are text (txt, jsonl, json, csv, tsv, parquet, a data set of the Hugging Face Hub), folders written by `modelcenter
preprocess`, or Megatron's .bin and .idx. PATH@WEIGHT mixes several. --streaming reads text that is too large to be
tokenised first. --dry_run shows the plan, runs one step and writes nothing.

Example:
  modelcenter pretrain replaced-tokens --model google/electra-small-discriminator \\
      --generator google/electra-small-generator --output_dir runs/rtd --train_data corpus.txt

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter pretrain replaced-tokens [flags]
scripts/pretrain_replaced_tokens.py takes the same flags.
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
    run_task("replaced-tokens", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["pretrain", "replaced-tokens", *sys.argv[1:]])

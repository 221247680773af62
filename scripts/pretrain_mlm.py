#!/usr/bin/env python
"""Train BERT, RoBERTa, XLM-R, CamemBERT, data2vec-text, DistilBERT, ALBERT, ERNIE, DeBERTa, MPNet, Longformer,
ModernBERT, NomicBERT, GTE, EuroBERT, ESM or an ELECTRA generator to predict masked tokens.

--whole_word masks whole words. --next_sentence also trains BERT or ERNIE to predict whether two texts follow each
other, --sentence_order trains ALBERT to predict whether they are in their original order. The data are text (txt,
jsonl, json, csv, tsv, parquet, a data set of the Hugging Face Hub), folders written by `modelcenter preprocess`, or
Megatron's .bin and .idx. PATH@WEIGHT mixes several. --streaming reads text that is too large to be tokenised first.
--from_scratch starts from random weights of a preset or a config.json. --dry_run shows the plan, runs one step and
writes nothing.

Example:
  modelcenter pretrain mlm --model google-bert/bert-base-uncased --output_dir runs/mlm --train_data corpus.txt

On several processes or GPUs: torchrun --nproc_per_node 8 -m modelcenter pretrain mlm [flags]
scripts/pretrain_mlm.py takes the same flags.
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
    run_task("mlm", argv, prog, __doc__)


if __name__ == "__main__":
    cli.main(["pretrain", "mlm", *sys.argv[1:]])

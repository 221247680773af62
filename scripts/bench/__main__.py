"""Run all benchmarks, one after the other, and print their tables at the end. `make bench` calls this.

    python -m scripts.bench --data path/to/data          # all; JSON in scripts/bench/results
    python -m scripts.bench --only finetune_lm data --quick
    python -m scripts.bench --list                       # names, minutes, commands

Some peers are installed from PyPI into separate environments (--no-peers leaves those out). Benchmarks that fail are
listed at the end, and the exit status is then 1.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import ROOT, tables


class Bench(NamedTuple):
    """A benchmark: its script, its approximate minutes on 2 cores, and flags in addition to the common ones."""

    script: str
    minutes: float
    flags: tuple[str, ...] = ()
    data: bool = False  # it reads --data
    peers: tuple[str, ...] = ()  # flags that need an environment from PyPI


# By the name of the record and its JSON file. Benchmarks that fine-tune run one task each, to keep them short.
BENCHES: dict[str, Bench] = {
    "finetune_classification": Bench("finetune", 4, ("--tasks", "classification"), data=True),
    "finetune_mlm": Bench("finetune", 4, ("--tasks", "mlm", "--steps", "30"), data=True),
    "finetune_lm": Bench("finetune", 12, ("--tasks", "lm", "--hidden", "256"), data=True),
    # GPT-2 in its full size, and small models with only the vocabulary of E2E.
    "finetune_gpt2": Bench(
        "finetune", 12, ("--tasks", "lm", "--hidden", "768", "--layers", "12", "--steps", "12", "--rounds", "1"), True
    ),
    "finetune_lm_few_words": Bench("finetune", 4, ("--tasks", "lm", "--hidden", "256", "--vocabulary", "data"), True),
    "finetune_seq2seq": Bench("finetune", 18, ("--tasks", "seq2seq", "--hidden", "256"), data=True),
    "finetune_seq2seq_few_words": Bench(
        "finetune", 4, ("--tasks", "seq2seq", "--hidden", "256", "--vocabulary", "data"), True
    ),
    "finetune_token_classification": Bench("finetune", 7, ("--tasks", "token_classification"), data=True),
    "finetune_qa": Bench("finetune", 6, tuple("--tasks qa --steps 12 --rounds 2".split()), data=True),
    "finetune_multiple_choice": Bench(
        "finetune", 6, tuple("--tasks multiple_choice --steps 8 --rounds 2".split()), data=True
    ),
    "finetune_dpo": Bench(
        "finetune", 15, tuple("--tasks dpo --hidden 256 --batch_size 16 --steps 12 --rounds 2".split()), data=True
    ),
    "finetune_embedding": Bench("finetune", 7, tuple("--tasks embedding --steps 24".split()), data=True),
    "finetune_sparse_embedding": Bench("finetune", 9, tuple("--tasks sparse_embedding --steps 12".split()), data=True),
    "finetune_multi_vector": Bench("finetune", 7, tuple("--tasks multi_vector --steps 24".split()), data=True),
    # Global batches in microbatches, with a loss over all their rows together.
    "finetune_embedding_microbatches": Bench(
        "finetune",
        9,
        tuple("--tasks embedding --batch_size 256 --microbatch 32 --steps 6 --rounds 2".split()),
        data=True,
    ),
    # A vocabulary of 100 languages, and texts in one of them.
    "finetune_multilingual": Bench(
        "finetune",
        8,
        tuple("--tasks classification --vocabulary multilingual --hidden 768 --steps 30 --rounds 2".split()),
        data=True,
    ),
    # In the sizes of BERT-base and GPT-2, with products of numbers rounded to bf16.
    "finetune_bf16_products": Bench(
        "finetune",
        8,
        (
            "--matmul_precision",
            "medium",
            *"--tasks classification --hidden 768 --layers 12 --steps 30 --rounds 2".split(),
        ),
        data=True,
    ),
    "finetune_gpt2_bf16_products": Bench(
        "finetune",
        12,
        ("--matmul_precision", "medium", *"--tasks lm --hidden 768 --layers 12 --steps 12 --rounds 1".split()),
        data=True,
    ),
    "finetune_2_ranks": Bench("finetune", 4, ("--ranks", "2", "--tasks", "classification", "--rounds", "2"), data=True),
    # From random weights, sentiment takes some epochs to learn; fewer steps would compare guesses.
    "quality_classification": Bench(
        "quality", 5, ("--tasks", "classification", "--steps", "600", "--lr", "5e-4"), data=True
    ),
    "quality_mlm": Bench("quality", 3, ("--tasks", "mlm"), data=True),
    "quality_lm": Bench("quality", 3, ("--tasks", "lm"), data=True),
    "quality_seq2seq": Bench("quality", 3, ("--tasks", "seq2seq"), data=True),
    "training_step": Bench("training_step", 16),
    "families": Bench("families", 18),
    "decoder_step": Bench("decoder_step", 3, peers=("--compile",)),
    "mixture_step": Bench("mixture_step", 5),
    "lora": Bench("lora", 1),
    "sharded_step": Bench("sharded_step", 3, peers=("--peers",)),
    "optimizer": Bench("optimizer", 2, peers=("--peers",)),
    "dropout": Bench("dropout", 1),
    "attention": Bench("attention", 1),
    "load_export": Bench("load_export", 2),
    "convert": Bench("convert", 6, ("--gigabytes", "4")),
    "checkpoint": Bench("checkpoint", 10),
    "generation": Bench("generation", 4),
    "startup": Bench("startup", 2),
    "data": Bench("data", 4, data=True),
    "clients": Bench("clients", 4),
}
NEED_PEERS = (
    "decoder_step",
    "finetune_dpo",
    "finetune_embedding",
    "finetune_embedding_microbatches",
    "finetune_sparse_embedding",
    "finetune_multi_vector",
    "clients",
)


def command(name: str, args: argparse.Namespace) -> list[str]:
    bench = BENCHES[name]
    words = [str(ROOT / "scripts" / "bench" / f"{bench.script}.py"), *bench.flags]
    words += [] if args.no_peers else bench.peers
    words += ["--data", args.data] if args.data and bench.data else []
    words += ["--quick"] if args.quick else []
    words += ["--rounds", str(args.rounds)] if args.rounds else []
    return [sys.executable, *words, "--threads", str(args.threads), "--output", f"{args.output_dir}/{name}.json"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=BENCHES, help="benchmarks to run (default: all)")
    p.add_argument("--data", help="folder with sst2, e2e and tinyshakespeare (default: the samples in scripts/samples)")
    p.add_argument("--output_dir", default="scripts/bench/results", help="(default: scripts/bench/results)")
    p.add_argument("--rounds", type=int, help="turns of each contender (default: each benchmark's)")
    p.add_argument("--threads", type=int, default=2, help="CPU threads of each process (default: 2)")
    p.add_argument("--quick", action="store_true", help="the smallest runs that show that the benchmarks work")
    p.add_argument("--no-peers", action="store_true", help="leave out peers that are installed from PyPI")
    p.add_argument("--list", action="store_true", help="print the benchmarks, their minutes and commands, and stop")
    args = p.parse_args()
    chosen = [name for name in args.only or BENCHES if not (args.no_peers and name in NEED_PEERS)]
    if args.list:
        for name in chosen:
            words = command(name, args)
            print(f"{name:<25} {BENCHES[name].minutes:>4} min  python {Path(words[1]).relative_to(ROOT)} "
                  + " ".join(words[2:]))  # fmt: skip
        return
    failed, began = [], time.monotonic()
    for name in chosen:
        print(f"== {name}", file=sys.stderr, flush=True)
        # Its tables are printed at the end, with those of the others.
        if subprocess.run(command(name, args), cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            failed.append(name)
    for name in chosen:
        path = ROOT / args.output_dir / f"{name}.json"
        if name not in failed:
            print(tables.text(json.loads(path.read_text())))
    print(f"\n{len(chosen) - len(failed)} of {len(chosen)} in {(time.monotonic() - began) / 60:.0f} minutes")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

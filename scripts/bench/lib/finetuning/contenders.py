"""The contenders, from the start of a process to an exported model: this project's script, and the peers' scripts."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT, child, environments
from scripts.bench.lib.finetuning.tasks import TASKS
from scripts.bench.lib.finetuning.tasks.base import MULTILINGUAL, VOCABULARIES

HERE = "scripts.bench.lib.finetuning"


def add_flags(p: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the flags of the benchmarks that fine-tune."""
    p.add_argument("--data", help="folder with sst2, e2e and tinyshakespeare (default: the samples in scripts/samples)")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="(default: all)")
    rates = ", ".join(f"{name} {task.lr:g}" for name, task in TASKS.items())
    p.add_argument("--lr", type=float, help=f"learning rate (default: {rates})")
    sizes = sorted({task.words for task in TASKS.values()})
    p.add_argument("--vocabulary", choices=VOCABULARIES, default=defaults.pop("vocabulary", "published"),
                   help=f"as large as that of the published checkpoint ({', '.join(f'{size:,}' for size in sizes)} for "
                   f"BERT, T5 and GPT-2), or as XLM-R's, of 100 languages ({MULTILINGUAL:,}), or only the "
                   "words of the data (default: %(default)s)"
    )  # fmt: skip
    p.add_argument("--matmul_precision", choices=("highest", "medium"), default="highest",
                   help="medium: fp32 matrices may be rounded to bf16 when they are multiplied, and peers also run "
                   "with autocast to bf16 (default: %(default)s)"
    )  # fmt: skip
    p.add_argument("--microbatch", type=int, help="rows of a step that are run at a time (default: all)")
    for name, value, what in (
        ("steps", 60, "optimizer steps"),
        ("batch_size", 32, "rows per step"),
        ("layers", 4, "layers of the model (for a T5: of each half)"),
        ("hidden", 384, "width of the model"),
        ("dev_rows", 500, "held-out rows to evaluate on"),
    ):
        value = defaults.get(name, value)
        p.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: {value})")


def prepare(folder: Path, task: str, args: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """Write data and initial weights into a folder; returns facts about the data."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(args, name) for name in ("data", "hidden", "layers", "vocabulary", "dev_rows")}
    settings |= {"task": task, "seed": seed, "rows": args.steps * args.batch_size}
    return child(["-m", f"{HERE}.prepare", str(folder), json.dumps(settings)], args.threads)


def peers_of(task: str, args: argparse.Namespace) -> dict[str, str]:
    """{name of a peer in the tables: the `kind` that its script takes}."""
    peers = dict(TASKS[task].peers)
    if getattr(args, "compiled", False) and "grouped" in peers.values():
        peers["trainer, compiled"] = "compiled"
    if args.matmul_precision == "medium" and "grouped" in peers.values():
        peers["trainer, grouped by length, bf16"] = "bf16"
    return peers


def microbatch(args: argparse.Namespace) -> int:
    """The number of rows that all ranks together run at a time."""
    return args.microbatch or args.batch_size


def launched(
    words: list[str], ranks: int, threads: int, env: Mapping[str, str] | None = None, python: str = sys.executable
) -> dict[str, Any]:
    """Run in one process, or under torchrun on ranks that share the threads."""
    if ranks == 1:
        return child(words, threads, python, env=env)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return child([*torchrun, *words], max(1, threads // ranks), python, env=env)


def our_flags(
    folder: Path, task: str, args: argparse.Namespace, ranks: int = 1, seed: int = 0, zero: int = 3
) -> list[str]:
    """The flags of this project's script."""
    about = TASKS[task]
    flags = {
        "model": folder / "start",
        "train_data": folder / f"train{about.suffix}",
        **about.flags,
        "output_dir": folder / "ours",
        "batch_size": microbatch(args) // ranks,
        "gradient_accumulation_steps": args.batch_size // microbatch(args),
        "max_steps": args.steps,
        "lr": args.lr or about.lr,
        "warmup": 0.1,
        "weight_decay": 0.01,
        "log_every": 1,
        "eval_every": "never",
        "save_every": "never",
        "precision": "fp32",
        "matmul_precision": args.matmul_precision,
        "trackers": "no",
        "seed": seed,
        "zero": zero,
    }
    return [str(x) for name, value in flags.items() for x in (f"--{name}", value)]


def ours(
    folder: Path, task: str, args: argparse.Namespace, ranks: int = 1, seed: int = 0, zero: int = 3
) -> Callable[[int], dict]:
    def run(turn: int) -> dict[str, Any]:
        out, cache = folder / "ours", folder / "cache"
        for old in (out, cache):
            shutil.rmtree(old, ignore_errors=True)
        words = [str(ROOT / "scripts" / TASKS[task].script), *our_flags(folder, task, args, ranks, seed, zero)]
        # An empty cache, because every contender tokenises the rows itself.
        took = launched(words, ranks, args.threads, {"MODELCENTER_CACHE": str(cache)})
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "loss" in row]
        last = rows[-1]
        return numbers(took, last["tokens"], last["seconds"], [row["loss"] for row in rows], out / "model")

    return run


def peer(
    folder: Path, task: str, kind: str, args: argparse.Namespace, ranks: int = 1, seed: int = 0
) -> Callable[[int], dict]:
    about = TASKS[task]

    def run(turn: int) -> dict[str, Any]:
        out = folder / kind
        shutil.rmtree(out, ignore_errors=True)
        settings = {
            "task": task, "folder": str(folder), "kind": kind, "output_dir": str(out), "steps": args.steps,
            "batch_size": args.batch_size // ranks, "microbatch": microbatch(args) // ranks,
            "lr": args.lr or about.lr, "seed": seed, "matmul_precision": args.matmul_precision,
        }  # fmt: skip
        python = sys.executable if about.environment is None else environments.python_of(about.environment)
        took = launched(["-m", f"{HERE}.{about.peer}", json.dumps(settings)], ranks, args.threads, python=python)
        return numbers(took, took["tokens"], took["seconds"], took["losses"], out)

    return run


def numbers(took: dict[str, Any], tokens: int, seconds: float, losses: list[float], model: Path) -> dict[str, Any]:
    """tokens: real tokens trained on. seconds: of training only. process_seconds: from start to exported model."""
    return {
        "tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds,
        "process_seconds": took["process_seconds"], "peak_mb": took["peak_mb"], "losses": losses, "model": str(model),
    }  # fmt: skip


def evaluate_export(folder: Path, task: str, model: str, threads: int) -> dict[str, float]:
    """The task's evaluation of an exported model in transformers, on held-out rows."""
    settings = {"task": task, "folder": str(folder), "model": model}
    found = child(["-m", f"{HERE}.evaluate_export", json.dumps(settings)], threads)
    return {key: found[key] for key in TASKS[task].judged_by}


def fifths(losses: list[float]) -> list[float]:
    """The means of five parts of a curve, to compare curves at a glance."""
    cuts = [len(losses) * i // 5 for i in range(6)]
    return [round(sum(losses[a:b]) / max(1, b - a), 4) for a, b in zip(cuts, cuts[1:], strict=False)]

"""The fine-tuning contenders, from the start of a process to an exported model: this project's script, and Trainer."""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT, child, finetuning_data

TASKS = ("classification", "mlm", "lm", "seq2seq")
SCRIPTS = {"mlm": "pretrain_mlm.py"}
LR = {"classification": 1e-4, "mlm": 5e-4, "lm": 1e-3, "seq2seq": 1e-3}
OURS: dict[str, dict[str, Any]] = {
    "classification": {"train_data": "train.tsv", "max_length": finetuning_data.MAX_LENGTH},
    "mlm": {
        "train_data": "train.txt",
        "max_length": finetuning_data.MAX_LENGTH,
        "mask_fraction": finetuning_data.MASKED,
    },
    "lm": {"train_data": "train.csv", "prompt_column": "source", "response_column": "target", "template": "none"},
    "seq2seq": {"train_data": "train.csv", "source_column": "source", "target_column": "target"},
}
# Variants of Trainer: the name in the tables, and the `kind` of hf_trainer.py.
KINDS = {
    "trainer": "default",
    "trainer, grouped by length": "grouped",
    "trainer, packed": "packed",
    "trainer, compiled": "compiled",
}


def add_flags(p: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the flags of the benchmarks that fine-tune."""
    p.add_argument("--data", help="folder with sst2, e2e and tinyshakespeare (default: the samples in scripts/samples)")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="(default: all)")
    rates = ", ".join(f"{task} {rate:g}" for task, rate in LR.items())
    p.add_argument("--lr", type=float, help=f"learning rate (default: {rates})")
    sizes = ", ".join(f"{task} {size:,}" for task, size in finetuning_data.PUBLISHED.items())
    p.add_argument("--vocabulary", choices=finetuning_data.VOCABULARIES,
                   default=defaults.pop("vocabulary", "published"),
                   help=f"as large as that of the published checkpoint ({sizes}), or as XLM-R's, of 100 languages "
                   f"({finetuning_data.MULTILINGUAL:,}), or only the words of the data (default: %(default)s)"
    )  # fmt: skip
    for name, value, what in (
        ("steps", 60, "optimizer steps"),
        ("batch_size", 32, "rows per step"),
        ("layers", 4, "layers of the model (of a T5: of each half)"),
        ("hidden", 384, "width of the model"),
        ("dev_rows", 500, "held-out rows to evaluate on"),
    ):
        value = defaults.get(name, value)
        p.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: {value})")


def prepare(folder: Path, task: str, args: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """Write data and initial weights into a folder; returns facts about the data."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(args, name) for name in ("data", "hidden", "layers", "vocabulary", "dev_rows")}
    settings |= {"task": task, "seed": seed}
    return child(["-m", "scripts.bench.lib.finetuning_data", str(folder), json.dumps(settings)], args.threads)


def peers_of(task: str, compiled: bool = False) -> list[str]:
    left_out = {kind for kind, there in (("packed", task == "lm"), ("compiled", compiled)) if not there}
    return [name for name, kind in KINDS.items() if kind not in left_out]


def launched(words: list[str], ranks: int, threads: int, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run in one process, or on ranks under torchrun that share the threads."""
    if ranks == 1:
        return child(words, threads, env=env)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return child([*torchrun, *words], max(1, threads // ranks), env=env)


def ours(
    folder: Path, task: str, args: argparse.Namespace, ranks: int = 1, seed: int = 0, zero: int = 3
) -> Callable[[int], dict]:
    def run(turn: int) -> dict[str, Any]:
        out, cache = folder / "ours", folder / "cache"
        for old in (out, cache):
            shutil.rmtree(old, ignore_errors=True)
        flags = {
            "model": folder / "start",
            **OURS[task],
            "train_data": folder / OURS[task]["train_data"],
            "output_dir": out,
            "batch_size": args.batch_size // ranks,
            "max_steps": args.steps,
            "lr": args.lr or LR[task],
            "warmup": 0.1,
            "weight_decay": 0.01,
            "log_every": 1,
            "eval_every": "never",
            "save_every": "never",
            "precision": "fp32",
            "trackers": "no",
            "seed": seed,
            "zero": zero,
        }
        script = str(ROOT / "scripts" / SCRIPTS.get(task, f"finetune_{task}.py"))
        words = [script, *(str(x) for name, value in flags.items() for x in (f"--{name}", value))]
        # An empty cache, because every contender tokenises the rows itself.
        took = launched(words, ranks, args.threads, {"MODELCENTER_CACHE": str(cache)})
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "loss" in row]
        last = rows[-1]
        return numbers(took, last["tokens"], last["seconds"], [row["loss"] for row in rows], out / "model")

    return run


def trainer(
    folder: Path, task: str, name: str, args: argparse.Namespace, ranks: int = 1, seed: int = 0
) -> Callable[[int], dict]:
    def run(turn: int) -> dict[str, Any]:
        out = folder / KINDS[name]
        shutil.rmtree(out, ignore_errors=True)
        settings = {
            "task": task, "folder": str(folder), "kind": KINDS[name], "output_dir": str(out), "steps": args.steps,
            "batch_size": args.batch_size // ranks, "lr": args.lr or LR[task], "seed": seed,
        }  # fmt: skip
        took = launched(["-m", "scripts.bench.lib.hf_trainer", json.dumps(settings)], ranks, args.threads)
        return numbers(took, took["tokens"], took["seconds"], took["losses"], out)

    return run


def numbers(took: dict[str, Any], tokens: int, seconds: float, losses: list[float], model: Path) -> dict[str, Any]:
    """tokens: real ones trained on; seconds: of training only; process_seconds: from start to exported model."""
    return {
        "tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds,
        "process_seconds": took["process_seconds"], "peak_mb": took["peak_mb"], "losses": losses, "model": str(model),
    }  # fmt: skip


def evaluate_export(folder: Path, task: str, model: str, threads: int) -> dict[str, float]:
    """Loss (and accuracy) of an exported model in transformers, on held-out rows."""
    settings = {"task": task, "folder": str(folder), "model": model}
    found = child(["-m", "scripts.bench.lib.evaluate_export", json.dumps(settings)], threads)
    return {key: found[key] for key in (("loss", "accuracy") if task == "classification" else ("loss",))}


def fifths(losses: list[float]) -> list[float]:
    """Means of five parts of a curve, to compare curves at a glance."""
    cuts = [len(losses) * i // 5 for i in range(6)]
    return [round(sum(losses[a:b]) / max(1, b - a), 4) for a, b in zip(cuts, cuts[1:], strict=False)]

"""What every benchmark shares: turns, statistics, and a JSON that says what was measured where.

Contenders run in processes of their own and take turns, so that none inherits another's allocator or threads and all
see the same noise. Report medians and ratios, not single times.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """Flags that every benchmark has."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", help="JSON file (default: print only)")
    p.add_argument("--rounds", type=int, default=defaults.get("rounds", 3), help="turns of each contender")
    p.add_argument("--threads", type=int, default=2, help="CPU threads of each process")
    return p


def commit() -> str:
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return (head.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")


def hardware() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), name
        )
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def take_turns(contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """Run each contender once per round, in an order that rotates."""
    names, results = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name].append(contenders[name](turn))
            print(f"round {turn + 1}, {name}: {summary(results[name][-1])}", file=sys.stderr, flush=True)
    return results


def summary(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v:,.4g}" for k, v in value.items() if isinstance(v, int | float))
    return f"{value}"


def child(code_or_script: Sequence[str], threads: int, **env: str) -> dict[str, Any]:
    """Run a Python process; the last line it prints is JSON, which is returned with its peak resident memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), **env}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *code_or_script], capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(code_or_script)[:200]} failed:\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if lines else {}
    return {**result, "process_seconds": round(time.perf_counter() - began, 3)}


def median(results: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(r[key] for r in results)


def finish(args: argparse.Namespace, what: str, numbers: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Print the numbers, and write them where --output says."""
    record = {
        "benchmark": what,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions(),
        "settings": dict(settings),
        "numbers": dict(numbers),
    }
    print(json.dumps(numbers, indent=2))
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps(record, indent=2) + "\n")


WORDS = "the a of and to in is it that film movie story plot acting cast was good bad great dull slow warm".split()


def synthetic_rows(count: int, seed: int = 0) -> list[tuple[int, str]]:
    """(label, sentence) rows whose lengths are spread like those of real sentences: log-normal, mean about 20 words."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        n = min(60, max(2, round(rng.lognormvariate(2.85, 0.55))))
        label = rng.randrange(2)
        words = [rng.choice(WORDS) for _ in range(n)]
        words[rng.randrange(n)] = "excellent" if label else "awful"
        rows.append((label, " ".join(words)))
    return rows


def train_wordpiece(texts: Sequence[str], folder: Path, vocab_size: int = 8000) -> None:
    """A BERT tokenizer learned from the texts, saved as transformers saves one."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=vocab_size, min_frequency=2, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    trained.save(str(folder / "raw.json"))
    BertTokenizerFast(tokenizer_file=str(folder / "raw.json"), model_max_length=512).save_pretrained(folder)
    (folder / "raw.json").unlink()

"""Imports and start-up: how long a user waits before anything happens.

The benchmark measures imports in separate processes (minus an empty process), commands that answer without PyTorch, and
the demo from its start to its first training step on 2 sharded ranks, which includes training a tokenizer and creating
a model.

    python scripts/bench/startup.py --output result.json
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import ROOT, against, child, finish, fraction, medians, parse, parser, take_turns

IMPORTS = {
    "nothing": "",
    "modelcenter": "import modelcenter",
    "engine": "import engine",
    "modelcenter, a model class": "import modelcenter as mc; mc.AutoModelForSequenceClassification",
    "torch": "import torch",
    "transformers, a model class": "from transformers import BertForSequenceClassification",
}
COMMANDS = {"--help": ["--help"], "list": ["list"], "info": ["info", "bert-base-uncased"]}
FIRST_STEP = 20.0  # seconds allowed from the demo's start


def main() -> None:
    args = parse(parser(__doc__, rounds=5))
    contenders: dict[str, Any] = {
        f"import {name}": lambda _, code=code: child(["-c", code], args.threads) for name, code in IMPORTS.items()
    }
    contenders |= {
        f"modelcenter {name}": lambda _, words=words: child(["-m", "modelcenter", *words], args.threads)
        for name, words in COMMANDS.items()
    }
    results = take_turns(contenders, args)
    seconds, memory = medians(results, "process_seconds"), medians(results, "peak_mb")
    first, whole = demo()

    def imports(name: str) -> float:
        """The seconds in addition to starting Python; at least 1 ms, so that ratios are defined."""
        return max(seconds[f"import {name}"] - seconds["import nothing"], 0.001)

    rows = [
        against("import modelcenter", "import torch", imports("modelcenter"), imports("torch"), "s"),
        against("import engine", "import torch", imports("engine"), imports("torch"), "s"),
        against("import a model class", "transformers", imports("modelcenter, a model class"),
                imports("transformers, a model class"), "s"),
        *(fraction(f"modelcenter {name}", seconds[f"modelcenter {name}"], "one second", most=1.0)
          for name in COMMANDS),
        fraction("demo, start to first step", first / FIRST_STEP, "20 seconds", most=1.0),
    ]  # fmt: skip
    numbers = {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "peak_mb": {name: round(value) for name, value in memory.items()},
        "demo": {"first_step_seconds": round(first, 1), "whole_seconds": round(whole, 1)},
    }
    finish(args, "startup", numbers, rows)


def demo() -> tuple[float, float]:
    """The seconds until the demo logs its first training step, and until it ends."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "demo"
        metrics, first = out / "run" / "metrics.jsonl", float("inf")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        words = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--output_dir", str(out)]
        with (Path(name) / "log").open("w+") as log:
            with subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT) as process:
                while process.poll() is None:
                    if first == float("inf") and metrics.exists() and logged(metrics):
                        first = time.perf_counter() - began
                    time.sleep(0.02)
            if process.returncode or first == float("inf"):
                log.seek(0)
                raise RuntimeError(f"the demo ended with {process.returncode}:\n{log.read()[-3000:]}")
        return first, time.perf_counter() - began


def logged(metrics: Path) -> bool:
    """Whether there is a complete row of a training step; the loop also logs the first step."""
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    return any("loss" in json.loads(line) for line in lines if line.endswith("\n"))


if __name__ == "__main__":
    main()

"""Quality of trained models, compared with Hugging Face's Trainer: same weights, same number of steps.

Each task is trained from several seeds (of the initial weights, the order of rows and dropout), and transformers
evaluates every export on the same held-out rows. Mean and standard deviation are reported. "Equal within noise" means
that the two means are at most two standard errors of their difference apart.

    python scripts/bench/quality.py --data path/to/data --output result.json
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.lib import against, finish, parse, parser, take_turns
from scripts.bench.lib.finetuning import contenders
from scripts.bench.lib.finetuning.tasks import TASKS


def main() -> None:
    p = parser(__doc__, rounds=1)
    contenders.add_flags(p, vocabulary="data", steps=100, hidden=128, layers=2, dev_rows=800)
    p.add_argument("--seeds", type=int, default=3, help="(default: 3)")
    args = parse(p, steps=5, hidden=64, dev_rows=64, seeds=2)
    numbers: dict[str, Any] = {}
    rows = []
    for task in args.tasks:
        numbers[task] = measure(task, args)
        what = f"{task}, {TASKS[task].data_name if args.data else 'samples'}: "
        for metric, found in numbers[task].items():
            unit = "points" if metric == "accuracy" else "loss"
            peer = first_peer(task)
            name = what + metric + (", equal within noise" if found["equal_within_noise"] else ", apart")
            rows.append(against(name, peer, found["modelcenter"]["mean"], found[peer]["mean"], unit))
    finish(args, "quality", numbers, rows)


def first_peer(task: str) -> str:
    """The peer with its defaults."""
    return next(iter(TASKS[task].peers))


def measure(task: str, args: Any) -> dict[str, Any]:
    peer = first_peer(task)
    found: dict[str, list[dict[str, float]]] = {"modelcenter": [], peer: []}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            contenders.prepare(folder, task, args, seed)
            both = {
                "modelcenter": contenders.ours(folder, task, args, seed=seed),
                peer: contenders.peer(folder, task, TASKS[task].peers[peer], args, seed=seed),
            }
            for who, runs in take_turns(both, args, rounds=1).items():
                found[who].append(contenders.evaluate_export(folder, task, runs[-1]["model"], args.threads))
    return {metric: compare(found, metric) for metric in found["modelcenter"][0]}


def compare(found: dict[str, list[dict[str, float]]], metric: str) -> dict[str, Any]:
    """The mean and spread of each, and whether the means are within two standard errors of their difference."""
    values = {name: [run[metric] for run in runs] for name, runs in found.items()}
    spread = {name: statistics.stdev(x) if len(x) > 1 else 0.0 for name, x in values.items()}
    mean = {name: statistics.mean(x) for name, x in values.items()}
    error = sum(spread[name] ** 2 / len(x) for name, x in values.items()) ** 0.5
    return {
        **{n: {"mean": round(mean[n], 4), "spread": round(spread[n], 4), "all": values[n]} for n in values},
        "equal_within_noise": max(mean.values()) - min(mean.values()) <= 2 * error,
    }


if __name__ == "__main__":
    main()

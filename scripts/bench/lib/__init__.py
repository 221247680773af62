"""Shared by all benchmarks: flags, child processes, turns, and the JSON record of a run.

Contenders take turns, so that all see the same noise. Most run in separate processes, so that none inherits another's
allocator or threads. The machine's own limits are measured in turn with them. Results are medians and ratios, never
single times.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import machine

ROOT = Path(__file__).resolve().parents[3]


def parser(doc: str, rounds: int = 3) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", help="JSON file (default: print only)")
    p.add_argument("--rounds", type=int, default=rounds, help=f"turns of each contender (default: {rounds})")
    p.add_argument("--threads", type=int, default=2, help="CPU threads of each process (default: 2)")
    p.add_argument(
        "--quick", action="store_true", help="the smallest run that shows that it works; its numbers mean nothing"
    )
    return p


def parse(p: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the flags. With --quick, flags that have their default take the values in `quick`, and one round is run."""
    args = p.parse_args()
    if args.quick:
        for name, value in {"rounds": 1, **quick}.items():
            if getattr(args, name) == p.get_default(name):
                setattr(args, name, value)
    return args


def take_turns(
    contenders: Mapping[str, Callable[[int], Any]], args: argparse.Namespace, rounds: int | None = None
) -> dict[str, list[Any]]:
    """Run each contender once per round, in a rotating order, and measure the machine's limits in each round.

    args: the flags of `parser`. rounds: in place of the flag's.
    """
    names = list(contenders)
    results: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(args.rounds if rounds is None else rounds):
        machine.measure(child, args)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name].append(contenders[name](turn))
            print(f"round {turn + 1}, {name}: {summary(results[name][-1])}", file=sys.stderr, flush=True)
    return results


def summary(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v:,.4g}" for k, v in value.items() if isinstance(v, int | float))
    return f"{value}"


def python_path() -> str:
    """PYTHONPATH of a child process: this project, then the caller's entries, which may have packages."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a Python child process."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": python_path()}


def child(
    code_or_script: Sequence[str],
    threads: int,
    python: str = sys.executable,
    timeout: float = 900,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a Python process; returns the last JSON line that it prints, with its resource usage.

    It adds `process_seconds` (from start to end), `cpu_seconds`, and `peak_mb`, the peak memory of the process or of
    one of its children.

    Raises:
        RuntimeError: the process fails or exceeds `timeout` seconds.
    """
    path = {} if python == sys.executable else {"PYTHONPATH": str(ROOT)}
    environment = {**child_environment(threads), **path, **(env or {})}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        process = subprocess.Popen([python, *code_or_script], stdout=out, stderr=err, env=environment, cwd=ROOT)
        watch = threading.Timer(timeout, process.kill)
        watch.start()
        _, status, used = os.wait4(process.pid, 0)  # of this process alone, unlike getrusage's RUSAGE_CHILDREN
        seconds = time.perf_counter() - began
        watch.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            ended = f"ended with {process.returncode}" if seconds < timeout else f"was killed after {timeout:.0f} s"
            raise RuntimeError(f"{' '.join(code_or_script)[:200]} {ended}:\n{err.read()[-4000:]}")
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if lines else {}
    took = {"process_seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}
    return {**{name: round(value, 3) for name, value in took.items()}, **result}


def median(results: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(r[key] for r in results)


def medians(results: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> dict[str, float]:
    return {name: median(found, key) for name, found in results.items()}


def against(
    what: str, peer: str, ours: float, theirs: float, unit: str, target: float | None = None, why: str = ""
) -> dict[str, Any]:
    """A row that compares this project's number with a peer's.

    `ratio` is how many times better this project is: higher for a rate ("tokens/s", "GB/s") or "points", lower for
    anything else. `target` is the ratio to reach; `why` explains a peer's lead.
    """
    ratio = ours / theirs if unit.endswith("/s") or unit == "points" else theirs / ours
    return {
        "what": what, "peer": peer, "ours": float(f"{ours:.4g}"), "theirs": float(f"{theirs:.4g}"), "unit": unit,
        "ratio": round(ratio, 3), "target": target, "why": why,
    }  # fmt: skip


def fraction(
    what: str, value: float, limit: str, target: float | None = None, most: float | None = None
) -> dict[str, Any]:
    """A row with the share of a limit that was reached (1: all of it).

    `target` is the share to reach, `most` the largest allowed share.
    """
    return {"what": what, "limit": limit, "fraction": round(value, 3), "target": target, "most": most}


def finish(args: argparse.Namespace, what: str, numbers: Mapping[str, Any], *rest: Any, **named: Any) -> None:
    """Print the tables, and write the record to --output. The arguments are those of `keep`."""
    from scripts.bench.lib import tables

    print(tables.text(keep(args, what, numbers, *rest, **named)))
    if not args.output:
        print(json.dumps(numbers, indent=2))


def keep(
    args: argparse.Namespace,
    what: str,
    numbers: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    packages: Mapping[str, str] | None = None,
    limits: Mapping[str, float] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Write the record of the results so far to --output, and return it, so that a killed benchmark leaves it behind.

    Args:
        what: name of the benchmark.
        numbers: everything that was measured.
        rows: of the tables, made by `against` and `fraction`.
        notes: sentences below the tables.
        packages: versions of packages in peers' environments.
        limits: a GPU's, in place of the CPU's, which take seconds to measure.
        settings: recorded in place of the flags of the same names.
    """
    if limits is None and not machine.SEEN:
        machine.measure(child, args)
    hidden = {"output", "child", "work"}
    flags = {name: value for name, value in vars(args).items() if name not in hidden and value is not None}
    if flags.get("data"):  # the path itself is private
        flags["data"] = Path(flags["data"]).name
    record = {
        "benchmark": what,
        "commit": machine.commit(ROOT),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine.hardware(),
        "limits": dict(limits or machine.limits()),
        "versions": {**machine.versions(), **(packages or {})},
        "settings": {**flags, **settings},
        "rows": list(rows),
        "notes": list(notes),
        "numbers": dict(numbers),
    }
    if args.output:
        path = Path(args.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.part")  # the earlier record stays until this one is complete
        unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)
    return record


def shuffled(rows: Sequence[Any], seed: int = 0) -> list[Any]:
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows

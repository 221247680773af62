"""`make gpu-check`: build and test the operators, test the models and run the benchmarks on a GPU.

Each step is a process with its own time limit, and there is one limit for all steps. A step that hangs or crashes does
not affect the others, and its results are on disk at once. DIR has `log.txt` with the output of every step, a JSON file
for each benchmark, and `summary.txt`, which is printed again at the end. The steps that others depend on come first.

    python -m scripts.bench.lib.gpu_check --output DIR [--minutes 8] [--only build operators ...]
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.lib import ROOT, python_path, tables

LEAST = 15  # seconds: with less time left, a step is not started
LOG, SUMMARY = "log.txt", "summary.txt"
MARK = "GPU_CHECK_STEP"  # environment variable of all processes that a step starts
PYTEST = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu and not network"]


class Step(NamedTuple):
    """A process, its time limit, and how its log is summarised."""

    words: Sequence[str]
    seconds: int
    summarise: Callable[[str, Path | None], list[str]]
    record: bool = False  # it writes a benchmark's JSON
    under: Sequence[str] = ()  # a program that runs it, such as a memory checker; without it the step is left out
    environment: Mapping[str, str] = {}  # in addition to that for all steps


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", required=True, help="folder of the results")
    p.add_argument("--minutes", type=float, default=8, help="time limit for all steps together (default: 8)")
    p.add_argument("--device", default="cuda", help="cpu only shows that the steps run: no build, and no tests to pass")
    p.add_argument("--quick", action="store_true", help="run the benchmarks only to show that they work")
    names = list(steps("cuda", False))
    p.add_argument("--only", nargs="+", choices=names, default=names, help="run only these steps")
    args = p.parse_args()
    out = Path(args.output).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        p.error(f"--output: {out} cannot be created: {error.strerror}; give another folder (make gpu-check OUT=DIR)")
    # So that results of an earlier run are not mistaken for this one's.
    for name in (LOG, SUMMARY, *(f"{name}.json" for name in args.only)):
        (out / name).unlink(missing_ok=True)
    ends, summary, failed = time.monotonic() + 60 * args.minutes, [], False
    for name, step in steps(args.device, args.quick).items():
        if name not in args.only:
            continue
        left = ends - time.monotonic()
        if left < LEAST:
            lines, good = [f"{name}: not run, the {args.minutes:g} minutes are over"], False
        else:
            lines, good = run(name, step, out, min(step.seconds, left))
        failed |= not good
        summary += lines
        print("\n".join(lines), flush=True)
        (out / SUMMARY).write_text("\n".join(summary) + "\n", encoding="utf-8")
    print("\n=== summary ===\n" + "\n".join(summary))
    return int(failed)


def steps(device: str, quick: bool) -> dict[str, Step]:
    """In order of dependence: the build and its tests first, then the shortest benchmark."""
    more = ["--device", device, *(["--quick"] if quick else [])]

    def bench(seconds: int, script: str, *words: str) -> Step:
        return Step([f"scripts/bench/{script}.py", *words, *more], seconds, rows_of, True)

    def training(seconds: int, *cases: str) -> Step:
        return bench(seconds, "gpu_training", "--rounds", "4", "--cases", *cases)

    small = [*PYTEST, "tests/engine/test_ops_gpu.py", "-k", "(lists_longer and 513) or skip_norm or 8_bit"]
    # PyTorch allocates small tensors within large blocks, and memcheck only knows blocks: with one block per tensor, it
    # detects accesses beyond one.
    blocks = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    checker = ["compute-sanitizer", "--error-exitcode", "9"]
    return {
        "environment": Step(["-m", "torch.utils.collect_env"], 60, environment),
        "build": Step(["-m", "scripts.bench.lib.gpu_build", "--device", device], 180, last_lines),
        "operators": Step([*PYTEST, "tests/engine/test_ops_gpu.py"], 120, outcomes),
        "models": Step([*PYTEST, "tests/test_gpu.py"], 150, outcomes),
        "optimizer": bench(90, "gpu_optimizer"),
        "bert-large": training(120, "bert-large"),
        "gpt-1.3b": training(120, "gpt-1.3b"),
        "gpt-1.3b-12": training(60, "gpt-1.3b, 12 rows", "gpt-1.3b, 12 rows, no dropout"),
        "bert-large-full": training(60, "bert-large, full rows, no dropout", "bert-large, 256 rows"),
        "bert-large-11gb": training(60, "bert-large, 11 GB", "bert-large, 4 short rows"),
        "llama-1.3b": training(120, "llama-1.3b"),
        "gpt-1.3b-ragged": training(90, "gpt-1.3b, ragged"),
        "t5-large": training(120, "t5-large", "t5-large, 4 short rows"),
        # A failing CUDA call is not a defect if its caller handles it, as PyTorch does.
        "memcheck": Step(small, 90, outcomes, under=[*checker, "--report-api-errors", "no"], environment=blocks),
        "racecheck": Step(small, 90, outcomes, under=[*checker, "--tool", "racecheck"]),
    }


def run(name: str, step: Step, out: Path, seconds: float) -> tuple[list[str], bool]:
    """(lines of the summary, whether the step succeeded). Its output is appended to the log as it arrives."""
    if step.under and shutil.which(step.under[0]) is None:
        return [f"{name}: left out, {step.under[0]} is not installed"], True
    record = out / f"{name}.json" if step.record else None
    words = [*step.under, sys.executable, *step.words, *(["--output", str(record)] if record else [])]
    environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment["COLUMNS"] = "250"  # pytest truncates reasons to the width of the terminal
    environment |= {**library_folder(), **step.environment, MARK: f"{os.getpid()}.{name}"}
    began = time.monotonic()
    with (out / LOG).open("ab") as file:
        file.write(f"\n===== {name}\n".encode())
        file.flush()
        start = file.tell()
        # A separate session: an interrupt reaches only this process, and everything that the step started can be
        # killed.
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code, ended = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            code, ended = None, f" KILLED after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            end_all(f"{MARK}={environment[MARK]}")
    if code:
        ended = f" ENDED WITH {code}"
    with (out / LOG).open("rb") as file:
        file.seek(start)
        output = file.read().decode(errors="replace")
    lines = step.summarise(output, record if record is not None and record.is_file() else None)
    if ended and step.summarise is not outcomes:
        lines += last_lines(output, None, 6)
    head = f"{name}:{ended} {time.monotonic() - began:.0f} s"
    return [head, *(f"  {line[:200]}" for line in lines)], not ended


def library_folder() -> dict[str, str]:
    """The environment variable by which tests find the operators of a read-only checkout: they are built in the user's
    cache folder, but tests have their own cache folder."""
    if os.access(ROOT, os.W_OK):
        return {}
    from engine.ops import build

    return {"MODELCENTER_LIBRARY_DIR": str(build.folders()[-1])}


def end_all(marked: str) -> None:
    """Kill the processes with this in their environment: torchrun's workers have separate sessions, so they would
    outlive the step and keep using the GPU."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            if marked.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def environment(output: str, record: Path | None) -> list[str]:
    wanted = ("PyTorch version", "CUDA used to build", "Nvidia driver version", "GPU 0", "GPU models", "Python version")
    return [line.strip() for line in output.splitlines() if line.strip().startswith(wanted)]


def last_lines(output: str, record: Path | None, most: int = 4) -> list[str]:
    return [line for line in output.splitlines() if line.strip()][-most:]


def outcomes(output: str, record: Path | None, most: int = 12) -> list[str]:
    """The number of passed tests, and the first failed ones with their reasons; also for a killed run."""
    # After these headings, names of tests have no outcome.
    progress = re.split(r"^=+ (?:ERRORS|FAILURES|warnings summary) =+$", output, maxsplit=1, flags=re.M)[0]
    # The output of a test that hung is only its name.
    begun = re.findall(r"^(tests/\S+::.*?)(?: (PASSED|FAILED|ERROR|SKIPPED).*)?$", progress, re.M)
    count = {kind: sum(found == kind for _, found in begun) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    lines = [", ".join(f"{n} {kind.lower()}" for kind, n in count.items() if n) or "no test ran"]
    lines += [f"did not end: {name}" for name, kind in begun[-1:] if not kind]
    bad = re.findall(r"^(?:FAILED|ERROR) tests/.*$", output, re.M)  # with the reason, if the run finished
    bad = bad or [f"{kind} {name}" for name, kind in begun if kind in ("FAILED", "ERROR")]
    return [*lines, *bad[:most], *([f"and {len(bad) - most} more"] if len(bad) > most else [])]


def rows_of(output: str, record: Path | None) -> list[str]:
    """A line for each row of a benchmark's tables, and its notes."""
    if record is None:
        return []
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    lines = []
    for head, rows in tables.cells(found):
        for cells in rows:
            lines.append("; ".join(f"{name} {cell}" for name, cell in zip(head, cells, strict=True) if cell)[5:])
    return [*lines, *found["notes"]]


if __name__ == "__main__":
    sys.exit(main())

"""The machine: its description, and its highest rates of matrix products and memory copies."""

import argparse
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

SEEN: list[dict[str, float]] = []  # limits measured in this run, one entry per round


def measure(child: Callable[..., dict[str, Any]], args: argparse.Namespace) -> dict[str, float]:
    """The GFLOP/s of fp32 matrix products and of those that may round to bf16, and the GB/s of a copy, counting bytes
    read and written. args: the flags `threads` and `quick` of a benchmark."""
    found = child(["-m", "scripts.bench.lib.rates", *(["--seconds", "0"] if args.quick else [])], args.threads)
    SEEN.append({key: found[key] for key in ("gemm_gflops", "rounded_gemm_gflops", "copy_gb_per_s")})
    return SEEN[-1]


def limits() -> dict[str, float]:
    """The medians over this run."""
    return {key: round(statistics.median(found[key] for found in SEEN), 1) for key in SEEN[0]}


def commit(root: Path) -> str:
    """The commit: MODELCENTER_COMMIT, for a copy of the sources without their history, or else what git reports."""
    if given := os.environ.get("MODELCENTER_COMMIT"):
        return given
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    except OSError:  # no git on this machine
        return "unknown"
    return (head.stdout.strip() or "unknown") + ("+changes" if dirty.stdout.strip() else "")


def hardware() -> dict[str, Any]:
    """The CPU's name, which a virtual machine may shorten, its widest vectors, its cores, and memory in GiB."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = next((x.split(":")[1].strip() for x in text.splitlines() if x.startswith("model name")), "")
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "vectors": next((v for flag, v in {"avx512f": "AVX-512", "avx2": "AVX2"}.items() if flag in text.split()), ""),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "peft", "datasets", "numpy", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def operator_library() -> str:
    """Which compiled operators this process uses, with their instruction set."""
    from engine.ops import library

    return library.cpu().what.rpartition("(")[2].rstrip(")")

"""The machine: what it is, and how fast it multiplies matrices and copies memory at best."""

import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

SEEN: list[dict[str, float]] = []  # limits measured in this run, one entry per round

# fp32, in the shapes of a 768-wide layer and of a large square product, by torch's own call and by engine.ops.linear,
# which chooses between its library and oneDNN. The limit is the best of all.
WORK = """
import json, time, torch
from engine.ops import linear
torch.manual_seed(0)

def best(call, seconds=0.6):
    call()
    ends, least = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < ends:
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return least

rate = 0
with torch.no_grad():
    for rows, inner, columns in ((2048, 768, 3072), (2048, 2048, 2048)):
        x, w = torch.randn(rows, inner), torch.randn(columns, inner)
        for call in (lambda: torch.mm(x, w.t()), lambda: linear(x, w)):
            rate = max(rate, 2 * rows * inner * columns / best(call) / 1e9)
    source, target = torch.ones(64 * 2**20), torch.ones(64 * 2**20)
    copied = 2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9
print(json.dumps({"gemm_gflops": rate, "copy_gb_per_s": copied}))
"""


def measure(child: Callable[..., dict[str, Any]], threads: int) -> dict[str, float]:
    """GFLOP/s of fp32 matrix products, and GB/s of a copy, counting bytes read and written."""
    found = child(["-c", WORK], threads)
    SEEN.append({key: found[key] for key in ("gemm_gflops", "copy_gb_per_s")})
    return SEEN[-1]


def limits() -> dict[str, float]:
    """Medians over this run."""
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

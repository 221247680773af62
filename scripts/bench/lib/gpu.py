"""Shared by the GPU benchmarks: the limits of a GPU, and calls that return when the GPU is done."""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any


def add_flags(p: argparse.ArgumentParser) -> argparse.ArgumentParser:
    p.add_argument("--device", default="cuda", help="cpu only shows that it runs (default: cuda)")
    return p


def name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def memory_gb(device: str) -> float:
    """The memory of the GPU, in GB; for a CPU, enough for everything."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1e9 if device == "cuda" else float("inf")


def synchronize(device: str) -> None:
    """Wait until the device has finished all its work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def synchronised(calls: Mapping[str, Callable[[], Any]], device: str) -> dict[str, Callable[[], None]]:
    """The same calls, but each returns when the device is done."""

    def whole(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            synchronize(device)

        return run

    return {name: whole(call) for name, call in calls.items()}


_LEAD = 100_000_000  # cycles of a GPU: 50 ms, more than the host takes to launch the timed calls


def on_device(call: Callable[[], Any], device: str, times: int = 1) -> tuple[float, float]:
    """(milliseconds of the device, milliseconds of the host) for one of `count` calls.

    The calls are queued behind other work of the device, as an optimizer's step is behind a backward pass, so that the
    device does not wait for the host to launch them.
    """
    import torch

    synchronize(device)
    if device == "cuda":
        torch.cuda._sleep(_LEAD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    began = time.perf_counter()
    for _ in range(times):
        call()
    host = 1000 * (time.perf_counter() - began) / times
    if device != "cuda":
        return host, host
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times, host


def limits(device: str) -> dict[str, float]:
    """The TFLOP/s of bf16 products, and the GB/s of a copy, counting bytes read and written; each is the best of
    several."""
    import torch

    found = _limits(device)
    if device == "cuda":
        torch.cuda.empty_cache()  # for the processes measured next
    return found


def _limits(device: str) -> dict[str, float]:
    import torch

    size = 8192 if device == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(2**28 if device == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)

    def best(call: Callable[[], Any]) -> float:
        return min(on_device(call, device)[0] for _ in range(12)) / 1000

    return {
        "bf16_gemm_tflops": float(f"{2 * size**3 / best(lambda: a @ b) / 1e12:.4g}"),  # on a CPU it may be 0.001
        "copy_gb_per_s": round(2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9, 1),
    }


def peak_gb(device: str) -> float:
    """Peak memory of tensors since the last call, in GB."""
    import torch

    if device != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)

"""The rates at which this process multiplies fp32 matrices, also rounded to bf16, and copies memory. As a script,
prints the machine's limits as JSON."""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from engine.ops import linear

SHAPES = ((2048, 768, 3072), (2048, 2048, 2048))  # shapes of a 768-wide layer, and a large square product
COPIED = 64 * 2**20  # numbers
SECONDS = 0.6  # of each measurement


class Products(NamedTuple):
    """Products of matrices, and their GFLOP in total."""

    call: Callable[[], Any]
    gflop: float

    def for_seconds(self, seconds: float) -> "Products":
        """The products, repeated so that they take about this many seconds."""
        times = max(1, round(seconds / best(self.call, seconds)))
        return Products(lambda: [self.call() for _ in range(times)], times * self.gflop)


def best(call: Callable[[], Any], seconds: float = SECONDS) -> float:
    """The shortest time of a call, in seconds, of those that begin within `seconds`, and of one at least."""
    call()
    ends, least = time.perf_counter() + seconds, float("inf")
    while True:
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        least = min(least, now - began)
        if now >= ends:
            return least


def fastest_products(seconds: float = SECONDS) -> tuple[float, Products]:
    """The highest rate in GFLOP/s, and one product in its shape and by its call: torch's own, or engine.ops.linear,
    which chooses between its library and oneDNN. Each is measured for `seconds`."""
    torch.manual_seed(0)
    found: list[tuple[float, Products]] = []
    for rows, inner, columns in SHAPES:
        x, w = torch.randn(rows, inner), torch.randn(columns, inner)
        for call in (partial(torch.mm, x, w.t()), partial(linear, x, w)):
            product = Products(call, 2 * rows * inner * columns / 1e9)
            found.append((product.gflop / best(product.call, seconds), product))
    return max(found, key=lambda entry: entry[0])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement (default: %(default)s)")
    seconds = p.parse_args().seconds
    with torch.no_grad():
        rate, _ = fastest_products(seconds)
        torch.set_float32_matmul_precision("medium")
        rounded, _ = fastest_products(seconds)
        source, target = torch.ones(COPIED), torch.ones(COPIED)
        copied = 2 * source.nbytes / best(lambda: target.copy_(source), seconds) / 1e9
    print(json.dumps({"gemm_gflops": rate, "rounded_gemm_gflops": rounded, "copy_gb_per_s": copied}))


if __name__ == "__main__":
    main()

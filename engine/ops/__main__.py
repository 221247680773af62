"""`python -m engine.ops` says which compiled operators are in use and why others are not; `--build` compiles them."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings

from engine.ops import build


def main(arguments: list[str] | None = None) -> int:
    """Report or build; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.ops", description=__doc__)
    parser.add_argument("--build", action="store_true", help="compile for the CPU, and for CUDA if available")
    parser.add_argument("--cuda", action="store_true", help="with --build: also compile for CUDA if torch has no CUDA")
    parser.add_argument("--verbose", action="store_true", help="with --build: print the compilers' output")
    args = parser.parse_args(arguments)
    if not args.build:
        if args.cuda or args.verbose:
            parser.error("--cuda and --verbose need --build")
        return _report()
    kinds = ["cpu"]
    if args.cuda or (build.nvcc() and _torch_has_cuda()):
        kinds.append("cuda")
    failed = False
    for kind in kinds:
        began = time.perf_counter()
        try:
            path, report = build.build(kind)
        except build.BuildError as error:
            print(f"{kind}: not built, torch's operators are used instead: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"{kind}: built {path} in {time.perf_counter() - began:.0f} s")
        if args.verbose and report:
            print(report)
    return int(failed)


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def _report() -> int:
    import torch

    from engine.ops import gemm, library, onednn_linear

    warnings.filterwarnings("ignore", "the fused .* operators are not in use")  # the report says so, and why
    lines = []
    for device in ("cpu", "cuda"):
        name = f"fused operators, {device.upper()}"
        try:
            status = library.on(torch.device(device))
        except RuntimeError as error:  # a GPU that is full, or in exclusive use by another process
            status = library.Status(False, f"the GPU does not respond: {str(error).splitlines()[0]}")
        lines.append(f"{name}: {status.what}" if status.loaded else f"{name}: not loaded: {status.what}")
    used, why = onednn_linear()
    if used:
        name = "fused, oneDNN for a few rows" if gemm.compiled() else "oneDNN"
    else:
        name = "torch, fused for a few rows" if gemm.few_compiled() else "torch"
    lines.append(f"linear on the CPU: {name}: {why}")
    if gemm.multiplies_in_bf16():
        lines.append('with torch.set_float32_matmul_precision("medium"): in bf16, with sums in fp32')
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader has closed the pipe; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The CUDA kernels' logic without a GPU: csrc/cuda compiled by the C++ compiler on threads that are fibres.

`cuda_on_cpu/cuda_runtime.h` says how a launch runs. The library takes the place of the CPU operators in a process of
its own, where the tests of the operators, and what only a launch can get wrong, run on it. It says nothing about speed,
about streams, nor about what nvcc makes of the source.
"""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import fused_cases
import fused_cases_8bit
import pytest
import torch
from fused_cases import BF16, F16, F32

from engine.ops import build, dropout_masks, fused

pytestmark = pytest.mark.full

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# An error of arithmetic on integers, a vector that is not aligned or an index outside an array ends the process.
FLAGS = [
    "-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing",
    "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-Wno-unknown-pragmas", f"-I{HERE / 'cuda_on_cpu'}",
    "-D__CUDACC__", "-D__CUDA_ARCH__=900", "-include", "cuda_runtime.h", "-x", "c++",
]  # fmt: skip
LOAD = "import sys, torch\nfrom engine.ops import library\nassert library.cpu().loaded\ntorch.ops.load_library({!r})\n"
OPERATORS = "(library or compiled_and_reference or denormals or past_the_caches) and not (on_average or values_and)"


@pytest.fixture(scope="module")
def library_file(compiled, tmp_path_factory):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("denormals are flushed here as on x86")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    return compile_to(folder / "emulated.so", build.sources())


def compile_to(out, sources):
    kernels, bind = (str(out.with_suffix(f".{name}.o")) for name in ("kernels", "bind"))
    cxx = build.compiler()
    build._run([cxx, *FLAGS, "-c", str(sources / "cuda" / "kernels.cu"), "-o", kernels])
    source = str(HERE / "cuda_on_cpu" / "bind.cpp")
    build._run([cxx, "-O1", "-std=c++17", "-fPIC", *build._include(), f"-I{sources}", "-c", source, "-o", bind])
    build._run([cxx, "-shared", kernels, bind, "-o", str(out), *build._link("cpu")])
    return out


def run(library_file, code, *arguments, seed=0, processors=2):
    """`code` in a process whose operators are these."""
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{HERE}", "CUDA_ON_CPU_SEED": str(seed),
        "CUDA_ON_CPU_PROCESSORS": str(processors),
    }  # fmt: skip
    command = [sys.executable, "-c", LOAD.format(str(library_file)) + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_operators_tests_pass_on_the_cuda_kernels(library_file, tmp_path):
    code = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    files = [str(HERE / name) for name in ("test_ops_fused.py", "test_ops_8bit.py", "test_dropout.py")]
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inside"), "-m", "not full"]
    said = run(library_file, code, *files, *options, "-k", OPERATORS)
    passed = int(said.rpartition(" passed")[0].split()[-1])
    assert passed >= 125 and " failed" not in said


def test_lists_orders_and_processors_do_not_show(compiled, library_file, tmp_path):
    """The CPU operators' bits, on tensors between pages that may not be touched; the norm adds up in its own order."""
    found = []
    for number, (seed, processors) in enumerate(((1, 1), (2, 3))):
        out = str(tmp_path / f"{number}.pt")
        run(library_file, "import test_cuda_on_cpu as t\ntorch.save(t.work(), sys.argv[1])", out, seed=seed,
            processors=processors)  # fmt: skip
        found.append(torch.load(out))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    wanted = work()
    torch.testing.assert_close(found[0].pop(0), wanted.pop(0), rtol=1e-12, atol=0)
    for index, (a, b) in enumerate(zip(found[0], wanted, strict=True)):
        assert torch.equal(a, b), index


# -- what both sides do ------------------------------------------------------------------------------------------------

# More tensors than one launch takes, and tensors of several chunks.
SIZES = [i % 37 for i in range(300)] + [16384, 16385, 0, 4, 40_001]
ROWS = [(i % 3, 1 + i * 29 % 200) for i in range(260)] + [(70, 129), (1, 17_000)]


def work():
    """The norm, then what each operator wrote."""
    torch.manual_seed(0)
    out = [norm()]
    for mode, p, g, m in (("plain", F32, F32, F32), ("remainder", BF16, BF16, BF16), ("random", BF16, F16, F32)):
        case = fused_cases.Case(mode, p, g, m, sizes=SIZES)
        for name in ("p", "g", "m", "v", "aux"):
            setattr(case, name, [fenced(x, i % 2) for i, x in enumerate(getattr(case, name))])
        for _ in range(2):
            case.adamw(gscale=torch.tensor(0.5), found_inf=torch.tensor(0.0))
        out += case.tensors()
    shapes, fused_cases_8bit.SHAPES = fused_cases_8bit.SHAPES, ROWS
    eight = fused_cases_8bit.Case("master", BF16, BF16)
    fused_cases_8bit.SHAPES = shapes
    for name in ("p", "m", "v", "aux"):
        setattr(eight, name, [fenced(x, i % 2) for i, x in enumerate(getattr(eight, name))])
    eight.scales = [[fenced(x, 1) for x in scale] for scale in eight.scales]
    for seed in range(2):
        g = [fenced(torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed)).to(BF16), 1) for x in eight.p]
        fused.adamw8_(
            eight.p, g, eight.m, eight.v, *eight.scales, eight.step, eight.aux, widths=eight.widths,
            places=eight.places, mode="master", **fused_cases_8bit.SETTINGS,
        )  # fmt: skip
    out += eight.tensors()
    for source, target in ((F32, F16), (F16, BF16), (BF16, F32)):
        numbers = [fenced(torch.randn(n).to(source), 1) for n in SIZES]
        copies = [fenced(torch.zeros(n, dtype=target), i % 2) for i, n in enumerate(SIZES)]
        fused.cast_scale_copy_(copies, numbers, torch.tensor(0.3))
        out += copies
    for rows, channels, first in ((70, 300, 5), (3, 4097, 1000), (1, 1, 127)):
        x, residual = (fenced(torch.randn(rows * channels).to(BF16), 1).view(rows, channels) for _ in range(2))
        out.append(
            dropout_masks._run(x, residual, fenced(torch.arange(rows) << 33, 1), 9000, fused_cases.KEY, 3, first)
        )
    return out


def norm():
    types = [F32, BF16, F16] * len(SIZES)
    g = [fenced(torch.randn(n).to(types[i]), i % 2) for i, n in enumerate(SIZES)]
    total = torch.zeros((), dtype=torch.float64)
    fused.grad_norm_sq(g, total)
    return total


_FENCES: list[mmap.mmap] = []  # alive as long as the process


def fenced(x, at_end):
    """A copy of x beside a page that nobody may read or write: behind its end, or before its beginning. On its other
    side are NaNs, which nobody should have use for."""
    page, size = mmap.PAGESIZE, x.numel() * x.element_size()
    if not size:
        return x.clone()
    inside = -(-size // page) * page
    room = mmap.mmap(-1, inside + 2 * page)
    _FENCES.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for fence in (start, start + page + inside):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), page, 0) == 0
    ctypes.memset(start + page, 0xFF, inside)
    offset = page + (inside - size if at_end else 0)
    return torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)

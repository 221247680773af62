"""The CUDA kernels' logic without a GPU: csrc/cuda compiled by the C++ compiler on threads that are fibres.

`cuda_on_cpu/cuda_runtime.h` says how a launch runs. The library takes the place of the CPU operators in a process of
its own, where the tests of the operators, and what only a launch can get wrong, run on it. It says nothing about speed,
about streams, nor about what nvcc makes of the source.
"""

import ctypes
import itertools
import mmap
import os
import platform
from pathlib import Path

import fused_cases
import fused_cases_8bit
import pytest
import torch
import torch.nn.functional as F
import warm
from fused_cases import BF16, F16, F32

from engine import ops
from engine.ops import build, dropout_masks, fused

pytestmark = pytest.mark.full

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# An error of arithmetic on integers, a vector that is not aligned or an index outside an array ends the process.
FLAGS = [
    "-O1", "-U_FORTIFY_SOURCE", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-Wno-unknown-pragmas",
    f"-I{HERE / 'cuda_on_cpu'}", "-D__CUDACC__", "-D__CUDA_ARCH__=900", "-include", "cuda_runtime.h", "-x", "c++",
]  # fmt: skip
LOAD = (
    "import sys, torch\nfrom engine.ops import library\n"
    "assert library.cpu().loaded\nassert library.load_cuda({!r}).loaded\n"
)
OPERATORS = "(library or compiled_and_reference or denormals or past_the_caches) and not (on_average or values_and)"


@pytest.fixture(scope="module")
def library_file(compiled, tmp_path_factory):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("denormals are flushed here as on x86")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    return compile_to(folder / "emulated.so", build.sources())


def compile_to(out, sources):
    cxx, objects = build.compiler(), []
    for file in sorted((sources / "cuda").glob("*.cu")):
        objects.append(str(out.with_suffix(f".{file.stem}.o")))
        build._run([cxx, *FLAGS, "-c", str(file), "-o", objects[-1]])
    source, bind = str(HERE / "cuda_on_cpu" / "bind.cpp"), str(out.with_suffix(".bind.o"))
    build._run([cxx, "-O0", "-std=c++17", "-fPIC", *build._include(), f"-I{sources}", "-c", source, "-o", bind])
    build._run([cxx, "-shared", *objects, bind, "-o", str(out), *build._link("cpu")])
    return out


def run(library_file, code, *arguments, seed=0, processors=2):
    """`code` in a process whose operators are these."""
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{HERE}", "CUDA_ON_CPU_SEED": str(seed),
        "CUDA_ON_CPU_PROCESSORS": str(processors),
    }  # fmt: skip
    code = LOAD.format(str(library_file)) + code
    done = warm.run(["-c", *arguments], environment, ROOT, code, timeout=600)
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
    for number, (seed, processors) in enumerate(((1, 3), (2, 50))):  # fewer blocks than there is work, and more
        out = str(tmp_path / f"{number}.pt")
        run(library_file, "import test_cuda_on_cpu as t\ntorch.save(t.work(), sys.argv[1])", out, seed=seed,
            processors=processors)  # fmt: skip
        found.append(torch.load(out))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    wanted = work()
    torch.testing.assert_close(found[0].pop(0), wanted.pop(0), rtol=1e-12, atol=0)
    for index, (a, b) in enumerate(zip(found[0], wanted, strict=True)):
        assert torch.equal(a, b), index


def test_the_losses_tests_pass_on_the_cuda_kernel(library_file, tmp_path):
    code = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inside"), "-k", "not torch-"]
    said = run(library_file, code, str(HERE / "test_ops_loss.py"), *options, seed=3)
    passed = int(said.rpartition(" passed")[0].split()[-1])
    assert passed >= 65 and " failed" not in said


def test_losses_between_pages_that_may_not_be_touched(library_file, tmp_path):
    """Their bits depend neither on the order of threads nor on where a row begins, up to how its ends are read."""
    found = []
    for number, seed in enumerate((1, 2)):
        out = str(tmp_path / f"{number}.pt")
        run(library_file, "import test_cuda_on_cpu as t\ntorch.save(t.losses(), sys.argv[1])", out, seed=seed)
        found.append(torch.load(out))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("target", [-1, 5, 1 << 32])
def test_a_target_that_is_no_class_stops_the_kernel(library_file, target):
    code = (
        "from engine import ops\nlogits = torch.zeros(3, 5).bfloat16()\n"
        f"ops.cross_entropy_(logits, torch.tensor([0, {target}, 1]), 1)\n"
    )
    with pytest.raises(AssertionError, match="a target of cross_entropy_ is none of the classes"):
        run(library_file, code)


def test_a_failure_is_told_once(library_file):
    """An operator of a CPU asks too whether one of a GPU has failed."""
    code = (
        "import pytest\nx = torch.ones(2, 3)\n"
        "with pytest.raises(RuntimeError, match='weight'):\n"
        "    library.operator('norm')(x, torch.ones(4), None, 1e-5, None, None, 0, 0, 0, 0)\n"
        "assert library._failure() is None\n"
    )
    run(library_file, code)


def test_norms_and_other_operators_of_rows_are_those_of_fp64(library_file):
    """With rows, weights and gradients between pages that may not be touched."""
    run(library_file, "import rows_cases, test_cuda_on_cpu as t\nrows_cases.check_all(t.fenced)", seed=1, processors=2)


# -- what both sides do ------------------------------------------------------------------------------------------------

# More tensors than one launch takes, and tensors of several chunks.
SIZES = [i % 37 for i in range(600)] + [1023, 1024, 1025, 0, 16383, 16384, 16385, 0, 4, 40_001, 0]
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
    empty = fused_cases.Case("plain", F32, F32, F32, sizes=[0] * 513 + [5, 0])  # a launch has nothing to do
    empty.adamw()
    out += empty.tensors()
    return out + dropouts()


def dropouts():
    out, special = [], torch.tensor(fused_cases.SPECIAL)
    shapes = (  # the longest have rows of 3 blocks of channels, of which a thread goes through several
        (650, 300, 5, BF16), (3, 4097, 1000, BF16), (1, 1, 127, BF16), (650, 320, 0, BF16), (1, 128, 256, F16),
        (5, 384, 640, F32), (4, 1600, 192, F16), (301, 16, 120, BF16), (7, 12, 4, F32), (3, 24, 4, BF16),
    )  # fmt: skip
    for (rows, channels, first, dtype), at_end in itertools.product(shapes, (0, 1)):
        x, residual = (fenced(torch.randn(rows * channels).to(dtype), at_end).view(rows, channels) for _ in range(2))
        tokens = fenced(torch.arange(rows) << 33, at_end)
        for add, numbers in itertools.product((None, residual), (None, tokens)):
            out.append(dropout_masks._run(x, add, numbers, 9000, fused_cases.KEY, 3, first))
        for threshold in (0, 65535):
            out.append(dropout_masks._run(x, residual, None, threshold, fused_cases.KEY, 3, first))
    for dtype in (F32, BF16, F16):
        out += fused_cases.drop_at_odd_elements("cpu", dtype)
        x = special.repeat(2, 128).to(dtype)
        bits = torch.int32 if dtype == F32 else torch.int16
        out.append(dropout_masks._run(x, None, None, 9000, fused_cases.KEY, 3, 0).view(bits))
    return out


def losses():
    """The losses and gradients of rows beside a fence on either side, checked."""
    out = []
    for dtype, classes, at_end in itertools.product((F32, BF16, F16), (1, 31, 1030, 18_001), (0, 1)):
        rows = 3 if classes < 5000 else 1
        rng = torch.Generator().manual_seed(classes)
        logits = fenced((torch.randn(rows, classes, generator=rng) * 4).to(dtype), at_end)
        targets = fenced(torch.randint(0, classes, (rows,), generator=rng), at_end)
        double = logits.double().requires_grad_()
        wanted = F.cross_entropy(double, targets, reduction="none", label_smoothing=0.1)
        wanted.sum().backward()
        found = ops.cross_entropy_(logits, targets, 1, 0.1)
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits.double(), double.grad, rtol=0.01, atol=1e-6)
        out += [found, logits]
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

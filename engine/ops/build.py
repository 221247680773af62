"""Compiles csrc/ into shared libraries without importing torch. Needs torch's headers, a C++ compiler and, for CUDA,
nvcc.

The CPU library holds each kernel for several instruction sets and chooses one when it is loaded, so it runs on any CPU
of the architecture. Both libraries only use the stable ABI of torch 2.11.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE.parent.parent  # of a checkout

_COMMON = ["-O3", "-std=c++17"]
# Without contraction, and with IEEE division and square root, all processors give the same bits.
_CPU = [*_COMMON, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_CUDA = [*_COMMON, "-fmad=false", "-ftz=true", "-prec-div=true", "-prec-sqrt=true", "-lineinfo", "-Xptxas", "-v"]
_TORCH = ["-DTORCH_STABLE_ONLY", "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # torch 2.11 and later
_ISAS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-mpclmul"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c", "-mpclmul"),
        "-mprefer-vector-width=512",
    ],
}
_ROUNDED = ["-mavx512bf16"]  # added to the flags of avx512, for products of numbers rounded to bf16
_ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")


class BuildError(RuntimeError):
    """A library cannot be built here: the message gives the reason in one line, then the compiler's output."""


def sources() -> Path:
    """The folder of the C++ and CUDA files, in a checkout or in an install."""
    checkout = _ROOT / "csrc"
    return checkout if (checkout / "core").is_dir() else _PACKAGE.parent / "csrc"


@functools.cache
def key() -> str:
    """A hash of the sources and flags: part of a library's file name, so that no outdated library is ever loaded."""
    digest = hashlib.sha256(repr((_CPU, _CUDA, _TORCH, _ISAS, _ROUNDED)).encode())
    for path in sorted(sources().rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def file_name(kind: str) -> str:
    """The file name of the "cpu" or "cuda" library for this machine and these sources."""
    return f"fused-{kind}-{platform.system().lower()}-{platform.machine()}-{key()}.so"


def folders() -> list[Path]:
    """The folders where libraries are looked for, in this order; they are built in the first writable one."""
    if chosen := os.environ.get("MODELCENTER_LIBRARY_DIR"):
        return [Path(chosen)]
    first = _ROOT / "build" / "csrc" if (_ROOT / "csrc" / "core").is_dir() else _PACKAGE / "lib"
    return [first, *(cache / "modelcenter" / "csrc" for cache in _caches())]


def _caches() -> list[Path]:
    """The user's cache folder; none for users without a home directory, as in some containers."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return [Path(chosen)]
    try:
        return [Path.home() / ".cache"]
    except RuntimeError:
        return []


def find(kind: str) -> Path | None:
    """The library, if it has been built."""
    return next((path for folder in folders() if (path := folder / file_name(kind)).is_file()), None)


def nvcc() -> str | None:
    """The CUDA compiler, if there is one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = (home and f"{home}/bin/nvcc", shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc")
    return next((place for place in places if place and Path(place).exists()), None)


def build(kind: str, jobs: int | None = None) -> tuple[Path, str]:
    """Compile the "cpu" or the "cuda" library.

    Returns (its path, the compilers' output: for CUDA the registers and spills of each kernel).

    Raises:
        BuildError: there is no compiler, no torch or no writable folder, or the compiler fails.
    """
    parts = _cpu_parts() if kind == "cpu" else _cuda_parts()
    jobs = jobs or _jobs()
    folder = _writable()
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as room:
        objects = [f"{room}/{index}.o" for index in range(len(parts))]
        with ThreadPoolExecutor(jobs) as pool:
            work = [[*command, "-o", out] for command, out in zip(parts, objects, strict=True)]
            reports = list(pool.map(_run, work))
        made = f"{room}/library.so"
        _run([compiler(), "-shared", *objects, "-o", made, *_link(kind)])
        target = folder / file_name(kind)
        os.replace(made, target)  # atomic: concurrent builds and loads see the old file or the new one
    return target, "\n".join(report for report in reports if report)


def _jobs() -> int:
    """The number of compilers that run at a time: $MAX_JOBS, else one per processor; at most 4."""
    chosen = os.environ.get("MAX_JOBS")
    if chosen and not (chosen.isdecimal() and int(chosen)):
        raise BuildError(f"MAX_JOBS is {chosen!r}, expected a whole number of at least 1, or nothing")
    return min(int(chosen or os.cpu_count() or 1), 4)


def compiler() -> str:
    """The C++ compiler: $CXX, or the first that is found."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name):
            return name
    chosen = f"CXX={os.environ['CXX']}, g++" if os.environ.get("CXX") else "g++"
    raise BuildError(f"no C++ compiler ({chosen}, c++ and clang++ were tried)")


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed, and its headers are needed")
    folder = Path(spec.submodule_search_locations[0])
    version = re.match(r"(\d+)\.(\d+)", (folder / "version.py").read_text().partition("__version__ = '")[2])
    if version is None or (int(version[1]), int(version[2])) < (2, 11):
        raise BuildError("torch 2.11 or later is needed")
    return folder


def _include() -> list[str]:
    return [*_TORCH, f"-I{_torch() / 'include'}"]


def _cpu_parts() -> list[list[str]]:
    cxx, cpu = compiler(), sources() / "cpu"
    kernels = [[cxx, *_CPU, *flags, "-c", str(cpu / name)] for name, flags in cpu_kernels(cxx)]
    bind = [cxx, *_CPU, *_include(), "-c", str(cpu / "bind.cpp")]
    return [bind, *kernels, [cxx, *_CPU, "-c", str(cpu / "dispatch.cpp")]]  # the slowest first


def cpu_kernels(cxx: str) -> list[tuple[str, list[str]]]:
    """The kernel files for this machine's CPUs, each with the flags for this compiler."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [("kernels.cpp", ["-DMC_ISA=plain"]), ("rounded.cpp", [])]
    kernels = [("kernels.cpp", [*flags, f"-DMC_ISA={isa}"]) for isa, flags in reversed(_ISAS.items())]
    rounded = [*_ISAS["avx512"], *_ROUNDED] if knows(cxx, _ROUNDED) else []
    return [*kernels, ("rounded.cpp", rounded)]


def knows(cxx: str, flags: Sequence[str]) -> bool:
    """Whether a compiler accepts these flags: older ones lack the latest instructions."""
    probe = [cxx, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(probe, capture_output=True).returncode == 0


def _cuda_parts() -> list[list[str]]:
    cxx, cuda = compiler(), sources() / "cuda"
    if (cc := nvcc()) is None:
        raise BuildError("no nvcc (CUDA_HOME, PATH and /usr/local/cuda were tried)")
    if not (codes := architectures(cc)):
        chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
        raise BuildError(
            f"TORCH_CUDA_ARCH_LIST is {chosen}, expected compute capabilities, such as 9.0" if chosen else
            f"{cc} supports none of the compute capabilities {', '.join(_ARCHITECTURES)}"
        )  # fmt: skip
    generate = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    generate.append(f"-gencode=arch=compute_{codes[-1]},code=compute_{codes[-1]}")  # PTX, for future GPUs
    kernels = [cc, *_CUDA, *generate, "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "2"]
    kernels += ["-ccbin", cxx, "-c"]
    bind = [cxx, *_CPU, *_include(), "-c", str(cuda / "bind.cpp")]
    return [*([*kernels, str(file)] for file in sorted(cuda.glob("*.cu"))), bind]


def architectures(cc: str) -> list[str]:
    """The compute capabilities to compile for: those of TORCH_CUDA_ARCH_LIST ("8.0;9.0"), or all that nvcc knows."""
    if chosen := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return [code.replace(".", "") for code in re.findall(r"\d+\.\d+", chosen)]
    known = re.findall(r"compute_(\d+)\b", _run([cc, "--list-gpu-arch"]))
    return [code for code in _ARCHITECTURES if code in known]


def _link(kind: str) -> list[str]:
    libraries = _torch() / "lib"
    torch = [f"-L{libraries}", "-ltorch_cpu"]
    if kind == "cpu":
        return torch
    # nvcc may be a script outside its toolkit, so ask it for the path.
    said = re.search(r"TOP=(\S+)", _run([str(nvcc()), "-dryrun", "-x", "cu", os.devnull]))
    top = Path(said[1]) if said else Path(str(nvcc())).resolve().parent.parent
    found = [f"-L{folder}" for folder in (top / "lib64", top / "lib", *top.glob("targets/*/lib")) if folder.is_dir()]
    return [*torch, *found, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def _writable() -> Path:
    tried = []
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            tried.append(f"{folder} ({error.strerror or error})")
    raise BuildError(f"no folder to build into could be written; tried {', '.join(tried)}")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace")
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise BuildError(f"{Path(command[0]).name} failed with exit code {done.returncode}\n{said}")
    return (done.stdout + done.stderr).strip()

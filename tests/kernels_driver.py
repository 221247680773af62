"""Compiles engine/kernels_driver.cpp, which runs the kernels of csrc/cpu without torch, and reads what it prints."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine.ops import build

# {type: (integers as which its numbers are compared, bits of infinity: larger ones are NaNs)}. NaNs' signs vary.
TYPES = {
    "f64": (np.uint64, 0x7FF0 << 48), "f32": (np.uint32, 0x7F80 << 16), "f16": (np.uint16, 0x7C00),
    "bf16": (np.uint16, 0x7F80), "u16": (np.uint16, None), "u8": (np.uint8, None),
}  # fmt: skip


def compiled(cxx: str, out: Path, *flags: str, isas: tuple[str, ...] = ("plain",)) -> Path:
    """Compile the program with kernels for these instruction sets; it uses that of MODELCENTER_ISA, or the widest."""
    cpu = build.sources() / "cpu"
    flags = (*build._CPU, "-Wno-psabi", f"-I{build.sources()}", *flags)
    parts = [(cpu / "kernels.cpp", *build._ISAS[isa], f"-DMC_ISA={isa}") for isa in isas]
    rounded = (*build._ISAS["avx512"], *build._ROUNDED) if "avx512" in isas and build.knows(cxx, build._ROUNDED) else ()
    parts += [(cpu / "rounded.cpp", *rounded), (cpu / "dispatch.cpp",)]
    parts += [(Path(__file__).parent / "engine" / "kernels_driver.cpp",)]
    objects = [f"{out}-{i}.o" for i in range(len(parts))]
    with ThreadPoolExecutor(2) as pool:
        work = [[cxx, *flags, *part, "-c", "-o", o] for part, o in zip(parts, objects, strict=True)]
        list(pool.map(lambda command: subprocess.run(command, check=True), work))
    subprocess.run([cxx, *flags, *objects, "-pthread", "-o", out], check=True)
    return out


def sections(printed: bytes) -> dict[str, np.ndarray]:
    """The numbers of each section as integers, with all NaNs equal."""
    found, at = {}, 0
    while at < len(printed):
        end = printed.index(b"\n", at)
        name, kind, count = printed[at:end].decode().rsplit(" ", 2)
        integer, top = TYPES[kind]
        bits = np.frombuffer(printed, integer, int(count), end + 1)
        if top is not None:
            magnitudes = bits & integer(2 ** (8 * bits.itemsize - 1) - 1)
            bits = np.where(magnitudes > top, integer(top + 1), bits)
        assert name not in found, name
        found[name] = bits
        at = end + 1 + bits.nbytes
    kernels = (
        "adamw8",
        "dropout",
        "cast",
        "activation",
        "rotate",
        "cross_entropy",
        "product",
        "attention",
        "attention by distances",
        "transpose",
        "crc32",
    )
    assert len(found) > 900 and all(any(name.startswith(kernel) for name in found) for kernel in kernels)
    return found

"""The kernels of csrc/cpu on aarch64, run by an emulator: the bits that the plain path has on this machine.

Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu and qemu-user) and skips without them.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.ops import build

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (CROSS, EMULATOR, "g++") if not shutil.which(tool)]
# The integers in which numbers are compared, and what of them is a NaN's, whose sign is the processor's own.
TYPES = {
    "f64": (np.uint64, 0x7FF0 << 48), "f32": (np.uint32, 0x7F80 << 16), "f16": (np.uint16, 0x7C00),
    "bf16": (np.uint16, 0x7F80), "u16": (np.uint16, None), "u8": (np.uint8, None),
}  # fmt: skip

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def compiled(cxx: str, out: Path, *flags: str) -> Path:
    cpu = build.sources() / "cpu"
    files = [Path(__file__).with_name("kernels_driver.cpp"), cpu / "kernels.cpp", cpu / "dispatch.cpp"]
    flags = (*build._CPU, "-Wno-psabi", "-DMC_ISA=plain", f"-I{build.sources()}", *flags)
    subprocess.run([cxx, *flags, *map(str, files), "-o", str(out)], check=True)
    return out


def sections(printed: bytes) -> dict[str, np.ndarray]:
    """The numbers of each section as integers, every NaN the same one."""
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
    return found


def test_all_kernels_give_the_bits_of_the_plain_path(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(compiled, CROSS, tmp_path / "there", "-static")
        here = compiled("g++", tmp_path / "here")
    runs = [here], [EMULATOR, there.result()]
    ours, others = (sections(subprocess.run(run, check=True, capture_output=True).stdout) for run in runs)
    assert list(ours) == list(others) and len(ours) > 500
    assert all(any(name.startswith(kernel) for name in ours) for kernel in ("adamw8", "dropout", "product", "cast"))
    different = [name for name in ours if not np.array_equal(ours[name], others[name])]
    assert different == []


def test_the_bindings_compile(tmp_path):
    command = [CROSS, *build._CPU, *build._include(), "-c", str(build.sources() / "cpu" / "bind.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "bind.o")], check=True)

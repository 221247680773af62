"""The kernels of csrc/cpu on aarch64, run by an emulator: the bits that the plain path has on this machine.

Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu and qemu-user) and skips without them.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kernels_driver import compiled, sections

from engine.ops import build

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (CROSS, EMULATOR, "g++") if not shutil.which(tool)]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def test_all_kernels_give_the_bits_of_the_plain_path(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(compiled, CROSS, tmp_path / "there", "-static")
        here = compiled("g++", tmp_path / "here")
    runs = [here], [EMULATOR, there.result()]
    ours, others = (sections(subprocess.run(run, check=True, capture_output=True).stdout) for run in runs)
    assert list(ours) == list(others)
    different = [name for name in ours if not np.array_equal(ours[name], others[name])]
    assert different == []


def test_the_bindings_compile(tmp_path):
    command = [CROSS, *build._CPU, *build._include(), "-c", str(build.sources() / "cpu" / "bind.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "bind.o")], check=True)

"""The kernels of csrc/cpu under gcc's or clang's sanitizers: memory that is not theirs, undefined behaviour, races.

Also that instruction sets have the same bits, but for products, where AVX2 and AVX-512, which have the same, round once
for twice. Skips where the compiler lacks a sanitizer, or the system does not run what it makes.
"""

import os
import platform
import subprocess

import numpy as np
import pytest
from kernels_driver import compiled, sections

from engine.ops import build

X86 = platform.machine() in ("x86_64", "AMD64")

pytestmark = pytest.mark.full


def watched(tmp_path, *flags, isas):
    """What the program prints on each instruction set; a report of the sanitizer fails."""
    try:
        cxx = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }")
    made = subprocess.run([cxx, *flags, probe, "-o", tmp_path / "probe"], capture_output=True).returncode == 0
    if not made or subprocess.run([tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip(f"{cxx} {flags[0]} makes no program that runs here")
    # Optimised, it would take four times as long to compile, and less memory would be read and written.
    program = compiled(cxx, tmp_path / "driver", "-O0", "-g1", "-fno-sanitize-recover=all", *flags, isas=isas)
    found = {}
    for isa in isas:  # one that this CPU lacks is replaced by the next
        environment = {**os.environ, "MODELCENTER_ISA": isa, "ASAN_OPTIONS": "detect_leaks=0"}
        done = subprocess.run([program], capture_output=True, env=environment)
        assert done.returncode == 0 and not done.stderr, f"{isa}: {done.stderr.decode(errors='replace')[:4000]}"
        found[isa] = sections(done.stdout)
    return found


def test_memory_and_arithmetic_on_each_instruction_set(tmp_path):
    isas = tuple(build._ISAS) if X86 else ("plain",)
    found = watched(tmp_path, "-fsanitize=address,undefined", isas=isas)
    plain = found["plain"]
    for name, bits in plain.items():
        sums = name.startswith(("product", "attention"))
        numbers = bits.view(np.float32) if sums else None
        assert not sums or np.isfinite(numbers).all(), f"{name}: memory that was not written is read, or none is"
        for isa in isas[1:]:
            if sums:
                other = found[isa][name].view(np.float32)
                np.testing.assert_allclose(other, numbers, 1e-4, 1e-5 * max(1, np.abs(numbers).max(initial=0)), name)
            assert np.array_equal(found[isa][name], found["avx2"][name] if sums else bits), (isa, name)


def test_threads_share_no_memory_that_is_written(tmp_path):
    watched(tmp_path, "-fsanitize=thread", isas=("plain",))

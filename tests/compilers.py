"""A C++ compiler for builds whose speed does not matter."""

import shutil
from pathlib import Path

import pytest

from engine.ops import build


def unoptimised(folder: Path) -> Path:
    """The compiler of `engine.ops.build` as a script that adds -O0: optimising is most of a build of csrc. What nvcc
    makes for GPUs stays as it is. Skips the test where there is no compiler."""
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    script = folder / "c++-unoptimised"
    script.write_text(f'#!/bin/sh\nexec "{shutil.which(compiler)}" "$@" -O0\n')
    script.chmod(0o755)
    return script

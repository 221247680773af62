"""Directories that a test saves and compares."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelcenter.hub.files.atomic_directory import new_directory


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def write_config(target, text, *more):
    with new_directory(target) as scratch:
        for name in ("config.json", *more):
            (scratch / name).write_text(text)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Simulate a full disk: inside, writing a file beyond ``size`` bytes is an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""Directories that a test saves and compares."""

from pathlib import Path

from modelcenter.hub.files.atomic_directory import new_directory


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def write_config(target, text, *more):
    with new_directory(target) as scratch:
        for name in ("config.json", *more):
            (scratch / name).write_text(text)

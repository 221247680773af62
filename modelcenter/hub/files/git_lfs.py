"""The pointers that Git leaves in place of large files if Git LFS is not installed. Imports no torch."""

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise ValueError for a pointer instead of the file itself."""
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs install` and `git lfs pull` in "
                f"{path.parent}, or get the model with `modelcenter download`"
            )

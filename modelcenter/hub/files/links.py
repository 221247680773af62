"""Links to missing files. Imports no torch."""

import os
from pathlib import Path


def refuse_broken_link(path: Path) -> None:
    """Raise ValueError for a broken link, which a listing of its directory shows as a file.

    Links in huggingface_hub's cache are broken if a snapshot was copied without its blobs.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which does not exist. Copy a model out of a cache with the "
            "files themselves (cp -rL), or get it with `modelcenter download --local_dir`"
        )

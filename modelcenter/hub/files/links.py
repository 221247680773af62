"""Links to files that are gone. Imports no torch."""

import os
from pathlib import Path


def refuse_broken_link(path: Path) -> None:
    """Raise ValueError for a link that leads nowhere, which a listing of its directory shows as a file.

    Those of huggingface_hub's cache do so where a snapshot was copied without its blobs.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which is not there. Copy a model out of a cache with the files "
            "themselves (cp -rL), or get it with `modelcenter download --local_dir`"
        )

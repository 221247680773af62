"""Information that a launcher such as torchrun gives to each process. Imports no torch."""

import os


def launched_rank() -> int:
    """The future rank of this process, known before the ranks meet; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)

"""What a launcher such as torchrun says to each process. Imports no torch."""

import os


def launched_rank() -> int:
    """The rank that this process is to have, known also before the ranks meet; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)

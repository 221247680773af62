"""The reference model's log-probabilities in the checkpoints of a run: one that goes on takes them from there, and is
trained against the same reference, bit for bit, on any number of ranks."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

REFERENCE_FILE = "reference.npz"
_NAME = "reference"  # beside the arrays, which are called by a digest of their rows


def digest(*arrays: np.ndarray) -> str:
    """A name for the rows that these arrays are."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def write_reference(folder: Path, reference: str, log_probs: Mapping[str, np.ndarray]) -> None:
    """Write log-probabilities into a checkpoint.

    Args:
        reference: which model gave them. log_probs: {digest of the rows: fp32 (n, 2)}.
    """
    np.savez(folder / REFERENCE_FILE, allow_pickle=False, **{_NAME: np.array(reference)}, **log_probs)


def read_reference(folder: Path, reference: str) -> dict[str, np.ndarray]:
    """What `write_reference` wrote; {}: nothing, or of another model.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / REFERENCE_FILE
    if not path.exists():  # older checkpoints have none
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
            of = str(found.pop(_NAME))
    except Exception as error:  # numpy's and zipfile's kinds of them are many
        raise ValueError(f"resume: {path} is damaged ({error}); give another checkpoint") from error
    return found if of == reference else {}

"""The reference model's log-probabilities in the checkpoints of a run: a resumed run reads them, and so has bitwise the
same reference on any number of ranks."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

REFERENCE_FILE = "reference.npz"
_NAME, _START = "reference", "start"  # keys in addition to those of the arrays, which are digests of their rows


def digest(*arrays: np.ndarray) -> str:
    """A digest of the rows in these arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def write_reference(folder: Path, reference: str, start: str, log_probs: Mapping[str, np.ndarray]) -> None:
    """Write log-probabilities into a checkpoint.

    Args:
        reference: the model that computed them. start: the model with which the run began. log_probs: {digest of the
            rows: fp32 (n, 2)}, NaN where no step of the run needs them.
    """
    names = {_NAME: np.array(reference), _START: np.array(start)}
    np.savez(folder / REFERENCE_FILE, allow_pickle=False, **names, **log_probs)


def read_reference(folder: Path, reference: str) -> tuple[dict[str, np.ndarray], str | None]:
    """(log-probabilities, the model with which the run began), as written by `write_reference`. ({}, None): there are
    none, or they are of another reference. Older checkpoints have no model (None), and all log-probabilities.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / REFERENCE_FILE
    if not path.exists():  # older checkpoints have none
        return {}, None
    try:
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
            of, start = str(found.pop(_NAME)), found.pop(_START, None)
    except Exception as error:  # numpy and zipfile raise many types
        raise ValueError(f"resume: {path} is damaged ({error}); give another checkpoint") from error
    return (found, None if start is None else str(start)) if of == reference else ({}, None)

"""The states of Python's, NumPy's and torch's random generators, as values that load without running code."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from engine import runtime


def generator_states() -> dict[str, Any]:
    """The states of this rank's generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *map(float, rest)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Set the generators of this rank to ``generator_states``."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def reseed_generators(states: dict[str, Any]) -> None:
    """Seed the generators from the states of one rank of another mesh; each rank gets its own stream."""
    digest = hashlib.sha256(states["torch"].numpy().tobytes()).digest()
    runtime.seed_generators(int.from_bytes(digest[:8], "little") % 2**63)

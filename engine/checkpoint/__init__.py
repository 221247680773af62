"""Distributed checkpoints: directories that are complete or absent, and readable on any number of ranks.

::

    manifest.json     format_version and, for each other file, its size in bytes and its sha256, or those of its parts
    model/            the parameters and persistent buffers, by torch.distributed.checkpoint
    optim/            the optimizers' tensors, by parameter name, in the same format   (training checkpoints)
    state/            schedules, loss scale, user state; random generators by rank    (training checkpoints)
    ...               what the caller adds (configuration, tokenizer)

``model``, ``optimizer`` and ``training`` write and read these folders, ``random_state`` and ``safe_pickle`` the values
in state/. ``files`` handles the manifest, and the rename that makes a directory complete; ``steps`` handles directories
of many checkpoints; ``dcp`` and ``dcp_metadata`` handle the format of torch.distributed.checkpoint.
"""

import importlib
from typing import TYPE_CHECKING, Any

from engine.checkpoint.dcp_metadata import stored_metadata
from engine.checkpoint.files import (
    FORMAT_VERSION,
    MANIFEST,
    atomic_directory,
    check_manifest,
    hash_ranges,
    named_checkpoint,
)

if TYPE_CHECKING:
    from engine.checkpoint.model import (
        load_model,
        save_model,
        stored_tensors,
        write_model,
    )
    from engine.checkpoint.steps import finish_save, latest_checkpoint
    from engine.checkpoint.training import load_checkpoint, save_checkpoint, wait_checkpoint
    from engine.parallel.pipeline.stages import whole_tensor
    from engine.shards import all_tensors, local_slices, named_tensors

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "all_tensors",
    "atomic_directory",
    "check_manifest",
    "finish_save",
    "hash_ranges",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "local_slices",
    "named_checkpoint",
    "named_tensors",
    "save_checkpoint",
    "save_model",
    "stored_metadata",
    "stored_tensors",
    "wait_checkpoint",
    "whole_tensor",
    "write_model",
]

_HOMES = {
    "all_tensors": "engine.shards",
    "local_slices": "engine.shards",
    "named_tensors": "engine.shards",
    "whole_tensor": "engine.parallel.pipeline.stages",
    "finish_save": "engine.checkpoint.steps",
    "latest_checkpoint": "engine.checkpoint.steps",
    "load_checkpoint": "engine.checkpoint.training",
    "save_checkpoint": "engine.checkpoint.training",
    "wait_checkpoint": "engine.checkpoint.training",
}


def __getattr__(name: str) -> Any:
    # Functions that only need files load without torch.distributed.checkpoint, whose import takes a second.
    if name in ("model", "optimizer", "training"):
        return importlib.import_module(f"engine.checkpoint.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'engine.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "engine.checkpoint.model")), name)
    globals()[name] = value
    return value

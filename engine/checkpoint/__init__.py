"""Distributed checkpoints: a directory that is complete or absent, readable on any number of ranks.

::

    manifest.json     format_version and, for each other file, its size in bytes and its sha256
    model/            the parameters and persistent buffers, by torch.distributed.checkpoint
    optim/            the optimizers' tensors by parameter name, likewise             (training checkpoints)
    state/            schedules, loss scale, user state; random generators by rank    (training checkpoints)
    ...               what the caller adds (configuration, tokenizer)
"""

from engine.checkpoint.files import FORMAT_VERSION, MANIFEST, atomic_directory, check_manifest, together
from engine.checkpoint.model import (
    all_tensors,
    load_model,
    local_slices,
    named_tensors,
    save_model,
    stored_metadata,
    stored_tensors,
    write_model,
)
from engine.checkpoint.training import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    wait_checkpoint,
)
from engine.parallel.stages import whole_tensor

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "all_tensors",
    "atomic_directory",
    "check_manifest",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "local_slices",
    "named_tensors",
    "save_checkpoint",
    "save_model",
    "stored_metadata",
    "stored_tensors",
    "together",
    "wait_checkpoint",
    "whole_tensor",
    "write_model",
]

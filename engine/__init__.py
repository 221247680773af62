"""The training engine: shards the parameters, gradients and optimizer states of any module over ranks.

It has BMTrain's API on top of PyTorch's FSDP2, DTensor and distributed checkpoints, and knows no model.
``import engine`` imports neither torch nor anything that starts a process group; each public name is imported when it
is first used (PEP 562).

Where to look::

    startup, process_group, rendezvous   ``init_distributed``: what the launcher says, and how ranks meet and part
    runtime                              this rank's number, device, seed and settings
    policy                               ``Policy``: ZeRO level, precision, recomputation, offload, compilation
    parallel/                            ``shard``: FSDP2, and tensor, context, sequence and pipeline parallelism
    mixed_precision, recompute           what wraps the forward of a unit
    init, shards, names, tensors         initial values; what a rank holds of a model; DTensors
    accumulation/, lockstep              gradients of a global batch; loops that keep all ranks in step
    optim/, lr_scheduler                 optimizers, clipping and ``OptimManager``; learning-rate schedules
    checkpoint/, background, direct_io   saving and loading, also while training goes on, past the page cache
    ops/, loss/                          operators, compiled from csrc/ or in torch; the cross-entropy
    collectives, distributed             collectives for the engine itself, and BMTrain's differentiable ones
    bmtrain/, nn, utils, inspect, debug  the rest of BMTrain's API
    description, profiler, memory        what a model costs: computed, traced, measured
    testing                              a function on several ranks of this machine, or a pretended cluster
    notes, outputs, torch_compat         what is noted on models and parameters; tensors in outputs; versions of torch
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> module that holds it. A submodule is listed under its own name.
_PUBLIC = {
    "init_distributed": "engine.startup",
    "is_initialized": "engine.runtime",
    "rank": "engine.runtime",
    "world_size": "engine.runtime",
    "local_rank": "engine.runtime",
    "data_rank": "engine.runtime",
    "data_size": "engine.runtime",
    "device": "engine.runtime",
    "set_seed": "engine.runtime",
    "synchronize": "engine.runtime",
    "print_rank": "engine.runtime",
    "sum_loss": "engine.collectives",
    "gather_result": "engine.collectives",
    "Policy": "engine.policy",
    "shard": "engine.parallel.shard",
    "materialize": "engine.shards",
    "accumulate": "engine.accumulation",
    "in_step": "engine.lockstep",
    "describe": "engine.description",
    "profile": "engine.profiler",
    "local_slices": "engine.shards",
    # BMTrain's words
    "config": "engine.bmtrain.settings",
    "wait_loader": "engine.bmtrain.settings",
    "init_parameters": "engine.bmtrain.model",
    "grouped_parameters": "engine.bmtrain.model",
    "BMTrainModelWrapper": "engine.bmtrain.model",
    "DistributedModule": "engine.bmtrain.parameter",
    "DistributedParameter": "engine.bmtrain.parameter",
    "ParameterInitializer": "engine.bmtrain.parameter",
    "Block": "engine.bmtrain.block",
    "CheckpointBlock": "engine.bmtrain.block",
    "TransformerBlockList": "engine.bmtrain.block",
    "PipelineTransformerBlockList": "engine.bmtrain.pipeline",
    "save": "engine.bmtrain.store",
    "load": "engine.bmtrain.store",
    "print_block": "engine.utils",
    "print_dict": "engine.utils",
    "see_memory": "engine.utils",
    "save_checkpoint": "engine.checkpoint",
    "load_checkpoint": "engine.checkpoint",
    "latest_checkpoint": "engine.checkpoint",
    "wait_checkpoint": "engine.checkpoint",
}
_SUBMODULES = (
    "accumulation",
    "checkpoint",
    "debug",
    "distributed",
    "init",
    "inspect",
    "loss",
    "lr_scheduler",
    "memory",
    "nn",
    "ops",
    "optim",
    "parallel",
    "policy",
    "profiler",
    "recompute",
    "runtime",
    "testing",
    "utils",
)

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"engine.{name}")
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_SUBMODULES})

"""Training: flags, tasks, and the one loop.

script.py goes from the command line to the end of a run: config/ has the flags; tasks/ and metrics/ say what rows,
heads and scores are; setup/ makes the model, the optimizer and the sizes of a step; loop.py trains, on the batches of
batch_sources.py; monitoring/ measures, checkpoints/ saves and resumes, output/ writes files and shows lines;
distillation/ trains with a teacher. dry_run.py shows a plan; inference/ has predict, evaluate and generate, on models
that trained.py finds.

Names are imported on first use, so that flags and --help need no torch.
"""

import importlib
from typing import Any

_PUBLIC = {
    "accumulate": "modelcenter.training.accumulation",
    "evaluate": "modelcenter.training.evaluation",
    "run": "modelcenter.training.script",
    "train": "modelcenter.training.loop",
    "TrainConfig": "modelcenter.training.config",
    "ClassificationConfig": "modelcenter.training.config",
    "Classification": "modelcenter.training.tasks.classification",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'modelcenter.training' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value

"""Training: flags, tasks, and the one loop.

script.py a run from its command line, or from Python, to its end config/ the flags tasks/, metrics/ what rows, heads
and scores are setup/ from flags to a run that can start: ranks, data, model, optimizer, sizes of a step loop.py the
training loop, on the batches of batch_sources.py accumulation.py, evaluation.py
                        gradients and losses of global batches, however they are split (joint_loss.py: losses over all
                        items together, such as those in contrastive.py; ranking_losses.py: those of rerankers)
checkpoints/, output/   saving and resuming; the files and messages of a run
monitoring/             clocks, throughput, skipped steps
stopping.py             stopping on signals and after max_time
distillation/           training with a teacher
replaced_tokens.py, structured.py, target_tokens.py
                        what replaced token detection, CPM-Bee's rows and encoder-decoders' languages need
dry_run.py              --dry_run: the plan of a run
inference/              predict, evaluate and generate, on models that trained.py finds

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

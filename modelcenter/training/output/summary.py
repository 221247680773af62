"""summary.json: how a run ended, its time and memory, and the machine."""

import os
import platform
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import engine
from engine.memory import peak_resident
from modelcenter import __version__
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.tasks import TASKS

if TYPE_CHECKING:
    from modelcenter.training.checkpoints.model_selection import ModelSelection
    from modelcenter.training.loop import Run


def summary_of(run: "Run", status: str, reason: str | None, skipped: int) -> dict[str, Any]:
    """The fields of summary.json. Collective if the run finished: memory is then the maximum over the ranks.

    Args:
        skipped: steps that changed nothing.
    """
    seconds, tokens = run.clock.seconds, run.throughput.tokens
    return {
        "status": status,
        **({} if reason is None else {"reason": reason}),
        "task": run.task.name,
        "model": run.cfg.model,
        "parameters": _parameters(run.model),
        "steps": run.step,
        "epochs": run.epoch(),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "skipped_steps": skipped,
        "peak_memory": _max_over_ranks(peak_memory()) if status == "finished" else peak_memory(),
        "data": {"train": run.train_set.fingerprint(), "eval": run.eval_set and run.eval_set.fingerprint()},
        **_last_and_best(run.record.rows, run.selection),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": _command_of_call(run.cfg) if run.cfg.words else _command(),
        **_versions_and_hardware(),
    }


def _command() -> str:
    """The command line, without the launcher's; as `modelcenter VERB` if the package was run by `python -m`."""
    program, *words = sys.argv
    return shlex.join(["modelcenter" if os.path.basename(program) == "__main__.py" else program, *words])


def _command_of_call(cfg: TrainConfig) -> str:
    """The command line that is equivalent to a call of training.run."""
    verb = TASKS[cfg.task].verb
    return shlex.join(["modelcenter", verb, cfg.task.removeprefix(f"{verb}-"), *cfg.words])


def _parameters(model: Model) -> int:
    """The number of parameters of the model without an adapter, as in model/; the same before and after merging."""
    if model.adapter is None:
        return model.num_parameters()
    return model.adapter.layout.num_parameters


def _last_and_best(rows: list[dict[str, Any]], selection: "ModelSelection") -> dict[str, dict[str, Any]]:
    """The latest numbers of metrics.jsonl, and those of the best evaluation or, without evaluations, of the best
    loss."""
    evaluations = [row for row in rows if "eval_loss" in row]
    trained = [row for row in rows if row.get("loss") is not None]
    # The last row of its step: after a stop, the step may have been evaluated again on other data.
    scored = [row for row in evaluations if row["step"] == selection.best.get("step")][-1:]
    if selection.best and not scored:  # its row is in the folder that the run was resumed from
        known = [row for row in evaluations if row.get(selection.metric) is not None]
        scored = sorted(known, key=lambda row: row[selection.metric], reverse=not selection.smaller_is_better)[:1]
    best = scored[0] if scored else min(trained, key=lambda r: r["loss"], default={})
    last: dict[str, Any] = {}
    for row in sorted((*trained[-1:], *evaluations[-1:]), key=lambda r: r["step"]):
        last |= row  # step and epoch are those of the newer row
    return {"last": last, "best": {"metric": selection.metric if scored else "loss", **best} if best else {}}


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process so far: host (resident), and device if that is a GPU."""
    peak = {"host_bytes": peak_resident()}
    if engine.device().type == "cuda":
        peak["device_bytes"] = torch.cuda.max_memory_allocated()
    return peak


def _max_over_ranks(peak: dict[str, int]) -> dict[str, int]:
    if engine.world_size() == 1:
        return peak
    highest = torch.tensor(list(peak.values()), device=engine.device())
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return dict(zip(peak, highest.tolist(), strict=True))


def _versions_and_hardware() -> dict[str, Any]:
    versions = {"modelcenter": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("transformers", "tokenizers", "numpy"):
        if name in sys.modules:
            versions[name] = getattr(sys.modules[name], "__version__", "unknown")
    device = engine.device()
    return {
        "versions": versions,
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": engine.world_size(),
        },
    }

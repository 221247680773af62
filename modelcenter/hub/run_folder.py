"""Using the folder of a training run as a checkpoint."""

import os
from os.path import expanduser
from pathlib import Path
from typing import Any

from engine import checkpoint
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import ADAPTER_CONFIG_FILE, CONFIG_FILE, MANIFEST_FILE, RUN_FILE


def find_step(path: Any, step: str | None) -> Any:
    """The checkpoint to read from a training run's folder: the named step; by default the final model, or the final
    adapter if the weights are in 4 bits, else the last checkpoint.

    Args:
        path: if it is not a run, it is returned unchanged. step: a number, "best" or "last"; None: the default.

    Raises:
        ValueError: there is no such step.
    """
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    folder = Path(expanduser(str(path)))
    if (other := checkpoint.named_checkpoint(folder)) != folder:
        path = folder = other
    steps = next((p for p in (folder / "checkpoints", folder) if _is_steps(p)), None)
    if step is not None:
        if steps is None:
            raise ValueError(f"--step {step}: {folder} holds no checkpoints/step-...")
        return _checkpoint_of_step(steps, step)
    if (folder / MANIFEST_FILE).is_file() or (folder / CONFIG_FILE).is_file():
        return path
    if (folder / "model" / CONFIG_FILE).is_file():
        return folder / "model"
    if (folder / "adapter" / ADAPTER_CONFIG_FILE).is_file() and (steps is None or _in_4_bits(steps)):
        return folder / "adapter"
    return path if steps is None else _checkpoint_of_step(steps, "last")


def _checkpoint_of_step(steps: Path, step: str) -> Path:
    """The checkpoint of a step (a number, "best" or "last") in a folder. Raises ValueError if there is none."""
    name = f"step-{int(step):08d}" if step.isdigit() else step
    found = checkpoint.named_checkpoint(steps / name)
    if not (found / MANIFEST_FILE).is_file():
        if name == "last":
            latest = checkpoint.latest_checkpoint(steps)
            if latest is not None:
                return latest
        held = ", ".join(sorted(p.name for p in steps.iterdir() if not p.name.startswith("."))) or "nothing"
        raise ValueError(f"--step {step}: {steps} holds no complete checkpoint of that name; it holds {held}")
    return found.resolve()


def _is_steps(folder: Path) -> bool:
    return folder.is_dir() and any(p.is_dir() for p in folder.glob("step-*"))


def _in_4_bits(steps: Path) -> bool:
    """Whether the run of these checkpoints ends with an adapter but no model (--quantize)."""
    latest = checkpoint.latest_checkpoint(steps)
    if latest is None or not (latest / RUN_FILE).is_file():
        return False
    return read_json(latest / RUN_FILE).get("flags", {}).get("quantize") is not None

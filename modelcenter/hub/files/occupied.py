"""Folders into which no model may be saved, because they belong to an adapter or a run."""

from pathlib import Path

from modelcenter.hub.files.names import ADAPTER_CONFIG_FILE


def refuse_occupied(target: Path) -> None:
    """Raise ValueError for the folder of an adapter or a run, whose readers would take a model saved there for part of
    it. (transformers would apply the adapter to the model; predict, push and others would use this model as the run's,
    even after more training.)"""
    if (target / ADAPTER_CONFIG_FILE).is_file():
        raise ValueError(
            f"cannot save a model to {target}: it holds an adapter ({ADAPTER_CONFIG_FILE}), and transformers would "
            "apply it to the model, in which it may be merged already; name another directory or move the adapter away"
        )
    if (target / "config.yaml").is_file() and any((target / name).is_dir() for name in ("checkpoints", "model")):
        raise ValueError(
            f"cannot save a model to {target}: it is the folder of a run (config.yaml), which keeps its model in "
            f"model/; name another directory, or {target / 'model'} to replace that"
        )

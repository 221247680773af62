"""Places that are not a model's, where none is saved."""

from pathlib import Path

from modelcenter.hub.files.names import ADAPTER_CONFIG_FILE


def refuse_occupied(target: Path) -> None:
    """Raise ValueError for an adapter's or a run's folder: what reads these would take a model that is saved there for
    a part of them. (transformers would add the adapter; predict, push and the like would use this model for the run's,
    also after more training.)"""
    if (target / ADAPTER_CONFIG_FILE).is_file():
        raise ValueError(
            f"cannot save a model to {target}: an adapter lies there ({ADAPTER_CONFIG_FILE}), and transformers would "
            "add it to the model, into which it may be merged already; name another directory or move the adapter away"
        )
    if (target / "config.yaml").is_file() and any((target / name).is_dir() for name in ("checkpoints", "model")):
        raise ValueError(
            f"cannot save a model to {target}: it is the folder of a run (config.yaml), which keeps its model in "
            f"model/; name another directory, or {target / 'model'} to replace that"
        )

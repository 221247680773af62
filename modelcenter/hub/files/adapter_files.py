"""Adapters found where a model is expected: describing and refusing them. Imports no torch."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import CONFIG_FILE, RUN_FILE


def describe_adapter(config: Path) -> str:
    """Describe the adapter of an adapter_config.json, and say how to make a model from it."""
    values = read_json(config)
    base, adapter = values.get("base_model_name_or_path"), config.parent
    base = base if isinstance(base, str) and base else "BASE"
    made = adapter.parent / "model"
    if (made / CONFIG_FILE).is_file() and adapter.name == "adapter":
        return f"an adapter for {base}; {made} is the model with it merged"
    if (kind := values.get("peft_type", "LORA")) != "LORA":
        return f"an adapter for {base}, not a model by itself (peft_type {kind!r})"
    command = f"modelcenter export {shlex.quote(base)} --adapter {shlex.quote(str(adapter))} --output DST"
    return (
        f"an adapter for {base}, not a model by itself. `{command}` merges it into its base; in Python, "
        "modelcenter.adapters.load_lora adds it to its base"
    )


def refuse_adapter_tensors(names: Iterable[str], directory: Path) -> None:
    """Raise ValueError for the tensors of a model with an adapter: they are not a model as they are."""
    if not any(".lora_A." in name for name in names):
        return
    if not (directory / RUN_FILE).is_file():
        raise ValueError(
            f"{directory} is a checkpoint of a model with an adapter: load it into such a model "
            "(engine.load_checkpoint), then save a model with merge_lora and save_pretrained, or the adapter with "
            "save_adapter"
        )
    flags = read_json(directory / RUN_FILE).get("flags", {})
    if flags.get("quantize") is not None:
        base = shlex.quote(str(flags.get("model")))
        raise ValueError(
            f"{directory} is a checkpoint of a run with an adapter on 4-bit weights (--quantize); `modelcenter "
            f"export {directory} ADAPTER --keep_adapter` writes the adapter alone, and `modelcenter export {base} "
            "--adapter ADAPTER --output DST` merges that into its base"
        )
    raise ValueError(
        f"{directory} is a checkpoint of a run with an adapter (--lora_rank); `modelcenter export {directory} DST` "
        "merges it into a model, and with --keep_adapter writes the adapter alone"
    )

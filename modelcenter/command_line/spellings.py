"""Other names of flags: aliases of the same values, and flags of other programs whose values are translated too."""

import dataclasses
from typing import Any

from modelcenter.command_line.values import boolean

# Flags of other programs whose values differ from ours: flag -> (our flag, {its value: ours; None: says nothing new}).
TRANSLATED: dict[str, tuple[str, dict[Any, Any]]] = {
    "bf16": ("precision", {True: "bf16", False: "fp32"}),
    "fp16": ("precision", {True: "fp16", False: None}),  # what takes its place, --bf16 says
    "gradient_checkpointing": ("recompute", {True: "full", False: "none"}),
    "eval_strategy": ("eval_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "evaluation_strategy": ("eval_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "save_strategy": ("save_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "do_train": ("epochs", {True: None}),
    "do_eval": ("eval_every", {True: None}),
}
_PACKED = "rows are packed one after another, so there is no padding to save; leave it out"
# Flags of other programs that have no counterpart: what to do instead.
INSTEAD = {
    "dataloader_num_workers": "rows are tokenised before training, and a thread makes batches ahead (--prefetch)",
    "deepspeed": "--zero shards the model, and --offload keeps the optimizer's state on the host",
    "do_predict": "`modelcenter predict RUN DATA` does it after the run",
    "fsdp": "--zero shards the model",
    "greater_is_better": "each metric knows; leave it out",
    "group_by_length": _PACKED,
    "load_best_model_at_end": "--best_metric names the metric, and the best model becomes model/",
    "load_in_4bit": "--quantize nf4 keeps the weights under --lora_rank in 4 bits",
    "pad_to_max_length": _PACKED,
}


def all_spellings(cls: Any) -> dict[str, str]:
    """Every spelling -> the flag's own name."""
    return {name: f.name for f in dataclasses.fields(cls) for name in (f.name, *f.metadata["aliases"])}


def translated(cls: Any) -> list[str]:
    """Those flags of other programs that mean a flag of this configuration."""
    names = {field.name for field in dataclasses.fields(cls)}
    return [name for name, (ours, _) in TRANSLATED.items() if ours in names]


def translate(name: str, value: Any) -> tuple[str, Any]:
    """(our flag, our value) of another program's flag; the value is None if it says nothing new.

    Raises:
        ValueError: a value that the other program does not have.
    """
    ours, values = TRANSLATED[name]
    value = boolean(name, value) if True in values else "no" if value is False else value  # YAML reads no as False
    if value not in values:
        raise ValueError(f"{name}: got {value!r}, expected {' or '.join(map(str, values))}; {ours} takes more")
    return ours, values[value]

"""Other names of flags: aliases of the same values, and flags of other programs whose values are translated too."""

import dataclasses
import functools
from typing import Any

from modelcenter.command_line.values import boolean

# Flags of other programs whose values differ from ours: flag -> (our flag, {its value: ours; None: says nothing new}).
TRANSLATED: dict[str, tuple[str, dict[Any, Any]]] = {
    "bf16": ("precision", {True: "bf16", False: "fp32"}),
    "eval_strategy": ("eval_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "evaluation_strategy": ("eval_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "save_strategy": ("save_every", {"epoch": "epoch", "no": "never", "steps": None}),
}


@functools.cache
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

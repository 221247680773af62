"""Floating-point dtypes of parameters: their names, the choice between several, and unsupported ones."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_DTYPES = {
    "fp32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point dtype from a torch.dtype or its short name; None for None and "auto".

    Raises:
        ValueError: it is not a floating-point dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype).removeprefix("torch."))
    if found not in _DTYPES.values():
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(_DTYPES)}, or auto for that of the file")
    return found


def common_dtype(dtypes: set[torch.dtype], config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the files: their only one, or if there are several the one in config.json, else the widest.

    Raises:
        ValueError: there are several, and config.json names a dtype that a model cannot have.
    """
    if len(dtypes) == 1:
        return next(iter(dtypes))
    key = "dtype" if config.get("dtype") else "torch_dtype"
    try:
        named = parse_dtype(config.get(key))
    except ValueError as error:
        raise ValueError(
            f"the weights have several dtypes and config.json says {key}={config.get(key)!r}, which no model can "
            "have: pass the dtype to load in (dtype='float32')"
        ) from error
    if named in dtypes:
        return named
    return functools.reduce(torch.promote_types, dtypes, torch.float16) if dtypes else torch.float32


def refuse_quantised(dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise ValueError if the dtype of a (name, dtype) is quantised: its values are meaningless without a scale."""
    for name, dtype in dtypes:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(
                f"tensor {name!r} has the dtype {dtype}; quantised and integer weights are not supported, load a "
                "float16, bfloat16 or float32 checkpoint"
            )

"""The tensors in what a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch


def trained_tensors(output: Any, in_objects: bool = False) -> Iterator[torch.Tensor]:
    """The tensors in nested containers that require gradients. With ``in_objects``, those in sets and in the attributes
    of objects (except modules) as well."""
    seen, left = set[int](), [output]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            left += (getattr(value, field.name) for field in dataclasses.fields(value))
        elif in_objects and isinstance(value, set | frozenset):
            left += value
        elif in_objects and not isinstance(value, type | ModuleType | torch.nn.Module):
            left += getattr(value, "__dict__", {}).values()
            left += (getattr(value, name) for name in _slots(type(value)) if hasattr(value, name))


def _slots(kind: type) -> list[str]:
    """The attributes that objects of a Python class have outside their ``__dict__``."""
    written = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for names in written for name, value in names.items() if isinstance(value, MemberDescriptorType)]

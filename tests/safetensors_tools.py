"""Compare and change checkpoints with one safetensors file."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def assert_same_file(a: Path, b: Path) -> None:
    """Assert equal names, shapes, dtypes and bits."""
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in first.items()} == {n: (t.dtype, t.shape) for n, t in second.items()}
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path

"""The parity harness: the public modelcenter.testing, with models of transformers created once for all tests."""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter import testing
from modelcenter.testing import assert_same, randomize_, run_backward

__all__ = [
    "ArchitectureTests",
    "assert_same",
    "assert_starts_alike",
    "made_once",
    "randomize_",
    "run_backward",
    "skip_unless_transformers_has",
]

# Families that the oldest supported transformers lacks, and the version that added them.
LATER = {"gte": "5.24"}


def skip_unless_transformers_has(family: str) -> None:
    """Skip a test, or a file of tests, if this version of transformers lacks the model to compare with."""
    if family in LATER and family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"{family} is in transformers from {LATER[family]} on", allow_module_level=True)


def assert_starts_alike(config: Any, hf_class: str, task: str, folder: Path) -> None:
    """Assert that new models of ours and of transformers, for a config of theirs, have the same tensors, and large ones
    about the same standard deviations and maxima."""
    wanted = dict(getattr(transformers, hf_class)(config).named_parameters())
    config.save_pretrained(folder)
    mc.from_config(folder, task).save_pretrained(folder / "ours")
    ours = load_file(folder / "ours" / "model.safetensors")
    assert set(ours) == set(wanted)
    for name, tensor in wanted.items():
        if tensor.numel() > 1000:
            assert ours[name].std().item() == pytest.approx(tensor.std().item(), rel=0.1), name
            assert ours[name].abs().max().item() == pytest.approx(tensor.abs().max().item(), rel=0.05), name


def made_once(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function (..., folder, **fields) that creates a model and saves it in a folder.

    Calls with the same arguments return the same model, which no test may change, and copy its files. Instances of a
    test class count as equal.
    """
    made: dict[str, tuple[Any, Path, list[tuple[Any, ...]]]] = {}

    @functools.wraps(reference)
    def again(*arguments: Any, **fields: Any) -> Any:
        *what, folder = arguments
        key = repr(([type(x) if isinstance(x, ArchitectureTests) else x for x in what], sorted(fields.items())))
        if key not in made:
            files = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
            with torch.random.fork_rng(devices=[]):  # draws of a test must not depend on being the first
                torch.manual_seed(0)
                model = reference(*what, files, **fields)
            made[key] = model, files, state_of(model)
        model, files, state = made[key]
        assert state_of(model) == state, f"a test has changed the model of {key}, which others use too"
        shutil.copytree(files, folder, dirs_exist_ok=True)
        model.zero_grad()
        return model.eval()

    return again


def state_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Values that differ after any change of a parameter."""
    return [(name, p.dtype, p.requires_grad, p.data_ptr(), p._version) for name, p in model.named_parameters()]


class ArchitectureTests(testing.ArchitectureTests):
    reference = made_once(testing.ArchitectureTests.reference)

    def __init_subclass__(cls) -> None:
        if "reference" in vars(cls):
            cls.reference = made_once(cls.reference)  # type: ignore[method-assign]

"""The parity harness: modelcenter.testing, which is public, with the models of transformers made once for all tests."""

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

# Families that the oldest supported transformers lacks, and the version that brought them.
LATER = {"gte": "5.24"}


def skip_unless_transformers_has(family: str) -> None:
    """Skip a test, or a file of tests, that compares with a model which this version of transformers lacks."""
    if family in LATER and family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"{family} is in transformers from {LATER[family]} on", allow_module_level=True)


def assert_starts_alike(config: Any, hf_class: str, task: str, folder: Path) -> None:
    """Of a config of transformers, a new model of ours has the tensors of one of theirs, and the large ones their
    deviations and greatest numbers."""
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
    """Of a function (..., folder, **fields) that makes a model and saves it in a folder: one whose calls with the same
    arguments give the first one's model, which no test may change, and copies of its files. Tests of a class count as
    the class."""
    made: dict[str, tuple[Any, Path, list[tuple[Any, ...]]]] = {}

    @functools.wraps(reference)
    def again(*arguments: Any, **fields: Any) -> Any:
        *what, folder = arguments
        key = repr(([type(x) if isinstance(x, ArchitectureTests) else x for x in what], sorted(fields.items())))
        if key not in made:
            files = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
            with torch.random.fork_rng(devices=[]):  # what a test draws does not depend on whether it is the first
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
    """Of each parameter what a change of it changes."""
    return [(name, p.dtype, p.requires_grad, p.data_ptr(), p._version) for name, p in model.named_parameters()]


class ArchitectureTests(testing.ArchitectureTests):
    reference = made_once(testing.ArchitectureTests.reference)

    def __init_subclass__(cls) -> None:
        if "reference" in vars(cls):
            cls.reference = made_once(cls.reference)  # type: ignore[method-assign]

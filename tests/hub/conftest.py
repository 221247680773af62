"""Checkpoints for the tests of the hub layer: transformers' own classes with every parameter randomised."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from modelcenter.convert.bert import ARCH

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
}


def make_theirs(task: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config) -> torch.nn.Module:
    """transformers' model of a task, small, in eval mode, with random values in every parameter."""
    labels = {} if task == "question-answering" else {"num_labels": 3}
    built = transformers.BertConfig(**{**SIZES, **labels, **config})
    model = getattr(transformers, ARCH.tasks[task].hf_class)(built)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if not built.tie_word_embeddings and hasattr(getattr(model, "cls", None), "predictions"):
            # transformers never reads this copy; a checkpoint that trained with it tied has it equal.
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
    return model.to(dtype).eval()


@pytest.fixture
def theirs():
    return make_theirs


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(task, **) -> the directory of a transformers checkpoint that is made once, and only read."""
    made: dict[str, Path] = {}

    def find(task: str, max_shard_size: str = "5GB", **kwargs) -> Path:
        key = repr((task, max_shard_size, sorted(kwargs.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("theirs")
            with torch.random.fork_rng(devices=[]):  # what a test draws does not depend on whether it is the first
                make_theirs(task, **kwargs).save_pretrained(made[key], max_shard_size=max_shard_size)
        return made[key]

    return find


@pytest.fixture
def saved(checkpoint, tmp_path):
    """saved(task, **) -> the directory of a transformers checkpoint of the test's own."""

    def save(task: str, name: str = "theirs", **kwargs) -> Path:
        return shutil.copytree(
            checkpoint(task, **kwargs), tmp_path / name, copy_function=shutil.copy, dirs_exist_ok=True
        )

    return save


def edit_config(directory: Path, **changes) -> None:
    """Change fields of config.json; None removes one."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


@pytest.fixture
def config_of():
    return edit_config

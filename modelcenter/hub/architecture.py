"""From a config.json to a model on meta: its architecture, task, config and modules."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.names import model_tensors
from modelcenter import registry
from modelcenter.config import ModelConfig
from modelcenter.convert.layout import Layout, compile_layout
from modelcenter.convert.pieces import Shape
from modelcenter.convert.rules import ArchMap
from modelcenter.hub.files.cross_encoder_files import stored_score_tokens
from modelcenter.hub.files.described_tasks import dense_steps, described_task
from modelcenter.hub.files.embedding_files import FindFile
from modelcenter.registry import ARCHITECTURES, ArchSpec, model_type_of, nearest


@dataclass(frozen=True)
class Blueprint:
    """A model with the head of one task, before it is allocated.

    Attributes:
        arch: the rules that convert it. config: under our names. model: on meta.
        shapes: of the model's own parameters and persistent buffers, without those of adapters.
        score_tokens: if the checkpoint lacks a head with one label, the tokens from whose logits it is built: the one
            for yes, and optionally the one for no.
    """

    arch: ArchMap
    task: str
    config: ModelConfig
    model: Any
    shapes: dict[str, Shape]
    score_tokens: tuple[int, ...] = ()

    @functools.cached_property
    def layout(self) -> Layout:
        return compile_layout(self.arch, self.task, self.config, self.shapes)


def make_blueprint(
    spec: ArchSpec, task: str, values: Mapping[str, Any], overrides: Mapping[str, Any], origin: str
) -> Blueprint:
    """The model that a config.json describes, with the head of a task.

    Args:
        values: the content of config.json. overrides: of its fields, under our names or Hugging Face's.
        origin: where the values come from, for messages.

    Raises:
        ValueError: a field is not understood, or the sizes are not possible.
    """
    config = parse_config(spec, task, values, overrides, origin)
    model = on_meta(spec, config, task)
    shapes = {name: tuple(tensor.shape) for name, tensor in model_tensors(model)}
    return Blueprint(spec.arch_map(), task, config, model, shapes)


def find_spec(config: Mapping[str, Any], architecture: str | None, origin: str) -> ArchSpec:
    """The architecture that a config.json names. Raises ValueError if it is missing, unknown or not `architecture`."""
    kind = model_type_of(config) or architecture
    if kind is None:
        raise ValueError(
            f"{origin}: config.json has no model_type, and no known class in its architectures; set it: "
            "model_type='bert' in from_pretrained, --model_config model_type=bert in training, or in config.json. "
            f"Known: {', '.join(ARCHITECTURES)}"
        )
    if architecture is not None and str(kind) not in ARCHITECTURES:
        raise ValueError(f"{origin} has the model_type {kind!r}, expected {architecture!r}; load it with its own class")
    spec = registry.get(kind, config.get("architectures"))
    if architecture not in (None, spec.model_type):
        held = repr(kind) if kind == spec.model_type else f"{kind!r} (here {spec.model_type!r})"
        raise ValueError(f"{origin} has the model_type {held}, expected {architecture!r}; load it with its own class")
    return spec


def choose_task(
    arch: ArchMap, task: str | None, config: Mapping[str, Any], origin: str, find: FindFile | None = None
) -> str:
    """The requested task; else "embedding", "multi-vector" or "sparse-embedding" if other files describe these, or
    "sequence-classification" if they define a score by the logits of two words; else the task of the `architectures`
    in config.json.

    Args:
        find: name of a file -> its path, or None if it does not exist; None: there are no other files.

    Raises:
        ValueError: the task does not exist, or none is declared.
    """
    if task is not None:
        if task not in arch.tasks:
            close = nearest(task, arch.tasks)
            raise ValueError(f"task: got {task!r}, {arch.model_type} has {', '.join(arch.tasks)}.{close}")
        return task
    if find is not None and (described := described_task(find, arch)) is not None:
        return described
    if find is not None and "sequence-classification" in arch.tasks and stored_score_tokens(find):
        return "sequence-classification"
    declared = arch.declared_task(config.get("architectures"))
    if declared is None:
        raise ValueError(
            f"{origin}: its architectures, {config.get('architectures')}, name no head of {arch.model_type} that "
            f"exists here; pass task=, one of {', '.join(arch.tasks)}, or name its class there"
        )
    return declared


def stored_task(arch: ArchMap, config: Mapping[str, Any], find: FindFile) -> str | None:
    """The task whose parameter names a distributed checkpoint uses: that of the class in its config, or a task of
    embeddings if it has their dense layers, which no class has. None: neither.

    Args:
        find: as in choose_task.
    """
    described = described_task(find, arch)
    if dense_steps(described, find):
        return described
    return arch.declared_task(config.get("architectures"))


def parse_config(
    spec: ArchSpec, task: str, values: Mapping[str, Any], overrides: Mapping[str, Any], origin: str
) -> ModelConfig:
    """Convert a config.json to our config for a task. Raises ValueError if a field is not understood."""
    arch: ArchMap = spec.arch_map()
    fixed = arch.tasks[task].labels
    if fixed is not None:
        overrides = {"num_labels": fixed, **overrides}
    try:
        return arch.config.read(values, spec.config_class(), overrides)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


class _NoInit(TorchFunctionMode):
    """Skips torch.nn.init, which does nothing on meta but imports torch's compiler, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def on_meta(spec: ArchSpec, config: ModelConfig, task: str) -> Any:
    """A model on meta, with names and shapes only. Raises ValueError if a size exceeds what a tensor can have."""
    try:
        with torch.device("meta"), _NoInit():
            return spec.model_class()(config, task)
    except RuntimeError as error:
        raise ValueError(f"the sizes in the config are not possible for {config.model_type}: {error}") from error

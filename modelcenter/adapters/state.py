"""What an adapter leaves on a model: which parameters are its own, and what the model was before."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.checkpoint import all_tensors
from engine.init import clean_name
from engine.shards import is_sharded
from modelcenter.convert.rules import CROSS, ArchMap, Layout, compile_layout
from modelcenter.models.base import VOCABULARY_TASKS, Model
from modelcenter.registry import get, nearest

NAME = "default"  # peft's name of an adapter where there is one
# In the names of an adapter's parameters; no architecture has a module of these names.
UPDATE, PROMPT = (".lora_A.", ".lora_B.", ".lora_magnitude_vector."), "tuned_prompt."


@dataclass
class Attached:
    """The adapter of a model, as `model.adapter`.

    Attributes:
        kind: "lora" or "prompt". layout: of the base model's parameters. base: the checkpoint they came from, revision:
            its commit on the Hub, None of a directory.
        ranks, scales: {linear layer: rank, factor of its update}. dora, rslora: as peft's config has them.
        alpha, rank, dropout: the usual ones, for the saved config.
        trained: parameters of the base model that are trained and saved whole.
        required: requires_grad of every parameter before.
        merged: the weights hold the update, and the adapter adds nothing. quantized: how the weights under it are kept.
    """

    kind: str
    layout: Layout
    base: str | None
    ranks: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    trained: list[str] = field(default_factory=list)
    required: dict[str, bool] = field(default_factory=dict)
    merged: bool = False
    quantized: str | None = None
    revision: str | None = None


def is_adapter(name: str) -> bool:
    """Whether a parameter (by clean name) belongs to an adapter rather than to the base model."""
    return name.startswith(PROMPT) or any(part in name for part in UPDATE)


def base_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters without those of an adapter; whole ones, however the model is sharded."""
    return {name: tuple(t.shape) for name, t in all_tensors(model).items() if not is_adapter(name)}


def layout_of(model: Model) -> tuple[ArchMap, Layout]:
    """The conversion rules of a model and its parameters by them."""
    arch: ArchMap = get(model.config.model_type).arch_map()
    if model.adapter is not None:
        return arch, model.adapter.layout
    return arch, compile_layout(arch, model.task, model.config, base_shapes(model))


def embedding_width(model: Model) -> int:
    """Of a token's embedding as the model looks it up; of an encoder-decoder, the encoder's."""
    c: Any = model.config
    return getattr(c, "embedding_size", None) or c.hidden_size


def base_name(model: Model) -> str | None:
    """What transformers is to load under the adapter: the Hub id, or the directory."""
    report = getattr(model, "load_report", None)
    if report is None:
        return getattr(model, "base_name", None)
    return report.repo or (str(report.directory) if report.directory is not None else report.source)


def check_free(model: Model, what: str) -> None:
    """Raise ValueError if an adapter can no longer be put into the model."""
    if model.adapter is not None:
        raise ValueError(f"{what}: the model has an adapter already ({model.adapter.kind}); merge it first")
    if is_sharded(model) or model.pipeline is not None:
        raise ValueError(
            f"{what}: the model is sharded already, and an adapter goes in before: pass it to from_pretrained as "
            "adapter=, or load with policy=False, add it and call engine.shard"
        )


def adapter_parameters(model: nn.Module) -> list[str]:
    """Clean names of an adapter's parameters."""
    return [name for name in (clean_name(n) for n, _ in model.named_parameters()) if is_adapter(name)]


def trained_whole(model: Model, names: Collection[str] | None, fresh: Collection[str]) -> list[str]:
    """The parameters of the base model to train beside an adapter.

    Args:
        names: modules, ours or Hugging Face's, or parameters of ours; None: the head of a task that is not a
            vocabulary's, and every module of which the checkpoint held nothing.
        fresh: the parameters that the checkpoint lacked.

    Raises:
        ValueError: no such module, one without parameters, or one that no adapter file can hold.
    """
    _, layout = layout_of(model)
    everything = list(layout.native_shapes)
    if names is None:
        places = {name.split(".")[0] for name in fresh if model.is_head(name)}
        if model.task not in (*VOCABULARY_TASKS, "base"):
            places.add("head")
        chosen = [name for name in everything if name in fresh or name.split(".")[0] in places]
    else:
        chosen = []
        for wanted in names:
            found = [name for name in everything if name == wanted or name.startswith(f"{wanted}.")]
            found = found or _by_hub_name(layout, wanted)
            if not found:
                modules = {name.rpartition(".")[0] for name in everything}
                raise ValueError(
                    f"modules_to_save: {wanted!r} is no module of this model that owns parameters."
                    f"{nearest(wanted, modules)} (A tied vocabulary head owns none: its matrix is the embedding.)"
                )
            chosen += found
    for name in chosen:
        shared = model.is_head(name) and model.task in VOCABULARY_TASKS
        tied = name == "embed.weight" and getattr(model.config, "tie_embeddings", False)
        if shared or (tied and model.task in VOCABULARY_TASKS):
            raise ValueError(
                f"modules_to_save: {name} takes part in the vocabulary's matrix, of which peft would make a second "
                f"copy in transformers' model; leave it out for the task {model.task!r}"
            )
    check_modules(layout, chosen)
    return list(dict.fromkeys(chosen))


def saved_modules(layout: Layout, trained: Collection[str]) -> dict[str, str]:
    """{hub tensor that holds parameters of `trained`, by its key: the module of transformers' model that is saved}."""
    modules = {}
    for key in layout.shapes:
        natives = layout.natives(key)
        if set(natives).intersection(trained):
            written = layout.written[key]
            # Outside the base model a head is one module, whatever it is made of.
            inside = written != key or layout.part[natives[0]] in ("", CROSS)
            modules[key] = written.rpartition(".")[0] if inside else written.split(".")[0]
    return modules


def check_modules(layout: Layout, chosen: Collection[str], tied: Collection[str] = ()) -> None:
    """Raise ValueError where peft, which copies whole modules, would save or train other tensors than `chosen`.

    Args:
        tied: keys of tensors that are others here and that a file has with the values of these.
    """
    modules = saved_modules(layout, chosen)
    for key, module in modules.items():
        missing = [name for name in layout.natives(key) if name not in chosen]
        for other in layout.shapes:
            if other not in modules and layout.written[other].startswith(f"{module}."):
                missing += layout.natives(other)
        if missing:
            raise ValueError(f"modules_to_save: transformers' {module} also holds {', '.join(missing)}; add it")
    for tie in layout.ties.values():
        if tie.to in modules and tie.compare and tie.key not in tied:
            raise ValueError(
                f"modules_to_save: transformers' {layout.written[tie.to]} is {tie.key}, too, and peft would train and "
                f"load a copy of {modules[tie.to]} alone; leave {', '.join(layout.natives(tie.to))} out"
            )


def _by_hub_name(layout: Layout, wanted: str) -> list[str]:
    """Our parameters in a module of transformers' model, named wholly or by its end."""
    found = []
    for key, written in layout.written.items():
        if key in layout.shapes and re.fullmatch(rf"(.*\.)?{re.escape(wanted)}\.(.*\.)?[^.]+", written):
            found += layout.natives(key)
    return found


def start_spec(original: Mapping[str, tuple[Any, ...]], model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """How the parameters of a model with an adapter start: A as torch's linear layers, B at 0, a prompt as Lester et
    al. 2021 (arXiv:2104.08691)."""
    spec = dict(original)
    for raw, parameter in model.named_parameters():
        name = clean_name(raw)
        if ".lora_A." in name:
            spec[name] = ("uniform", 1 / math.sqrt(parameter.shape[1]))
        elif ".lora_B." in name:
            spec[name] = ("zeros",)
        elif ".lora_magnitude_vector." in name:
            spec[name] = ("ones",)
        elif name.startswith(PROMPT):
            spec[name] = ("uniform", 0.5)
    return spec


def split_plan(original: Callable[[], dict[str, str]], model: nn.Module, adapted: Collection[str]) -> dict[str, str]:
    """The plan of tensor parallelism of a model whose layers `adapted` have low-rank updates.

    A layer that splits its outputs splits those of B; one that splits its inputs splits those of A.
    """
    linears = [clean_name(n.removesuffix(".base_layer")) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    plan: dict[str, str] = {}
    for pattern, style in original().items():
        match = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        names = [name for name in linears if match(name)]
        if not any(name in adapted for name in names):
            plan[pattern] = style
            continue
        for name in names:
            if name not in adapted:
                plan[name] = style
                continue
            plan[f"{name}.base_layer"] = style
            plan[f"{name}.lora_{'A' if style == 'rowwise' else 'B'}.{NAME}"] = style
    return plan


def take_over(model: Model, state: Attached, spec: Mapping[str, tuple[Any, ...]]) -> None:
    """Record an adapter on the model; its start and its split become the model's."""
    state.revision = getattr(model, "base_revision", None)
    model.adapter = state
    own: Any = model  # methods of this instance hide those of its class
    own.init_spec = functools.partial(start_spec, spec, model)
    if state.ranks:
        own.tp_plan = functools.partial(split_plan, type(model).tp_plan.__get__(model), model, set(state.ranks))


def let_go(model: Model) -> None:
    """Undo take_over, and make trainable what was trainable before."""
    required = model.adapter.required
    model.adapter = None
    for method in ("init_spec", "tp_plan"):
        model.__dict__.pop(method, None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(required.get(clean_name(name), True))


def materialize_own(model: nn.Module) -> None:
    """Give an adapter that was made on meta its memory beside a plain model that has its own."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)

"""Modules of the base model that are fully trained and saved with an adapter (peft's modules_to_save)."""

import re
from collections.abc import Collection, Mapping

import torch

from engine.checkpoint import whole_tensor
from modelcenter.adapters.peft_format import PREFIX
from modelcenter.adapters.state import layout_of
from modelcenter.convert.layout import Layout
from modelcenter.convert.rules import CROSS_ATTENTION, DENSE
from modelcenter.convert.stream import export_tensor
from modelcenter.models.base import VOCABULARY_TASKS, Model
from modelcenter.registry import nearest


def choose_parameters(model: Model, names: str | Collection[str] | None, fresh: Collection[str]) -> list[str]:
    """The parameters of the base model to train together with an adapter.

    Args:
        names: names of modules, ours or Hugging Face's, or of our parameters; None: the head, unless it is over the
            vocabulary, and every module of which the checkpoint held nothing.
        fresh: the parameters that the checkpoint lacked.

    Raises:
        ValueError: a module does not exist, has no parameters, or cannot be stored in an adapter file.
    """
    _, layout = layout_of(model)
    parameters = [name for name in layout.native_shapes if name not in model.constants]
    if names is None:
        places = {name.split(".")[0] for name in fresh if model.is_head(name)}
        if model.task not in (*VOCABULARY_TASKS, "base"):
            places.add("head")
        chosen = [name for name in parameters if name in fresh or name.split(".")[0] in places]
    else:
        given = [names] if isinstance(names, str) else names
        chosen = [parameter for name in given for parameter in _parameters_of(layout, parameters, name)]
    check_modules(layout, chosen)
    return list(dict.fromkeys(chosen))


def _parameters_of(layout: Layout, parameters: Collection[str], module: str) -> list[str]:
    """The parameters in a module, given by our name or transformers', or one parameter by our name."""
    chosen = [name for name in parameters if name == module or name.startswith(f"{module}.")]
    chosen = chosen or [name for name in _by_hub_name(layout, module) if name in parameters]
    if not chosen:
        modules = {name.rpartition(".")[0] for name in parameters}
        raise ValueError(
            f"modules_to_save: {module!r} is not a module of this model with its own parameters."
            f"{nearest(module, modules)} (A tied vocabulary head has none: its matrix is the embedding.)"
        )
    return chosen


def _by_hub_name(layout: Layout, module: str) -> list[str]:
    """Our parameters in a module of transformers' model, given by its full name or a suffix."""
    chosen = []
    for key in layout.shapes:
        names = (layout.written[key], layout.in_model(key))
        if any(re.fullmatch(rf"(.*\.)?{re.escape(module)}\.(.*\.)?[^.]+", name) for name in names):
            chosen += layout.natives(key)
    return chosen


def saved_modules(layout: Layout, trained: Collection[str]) -> dict[str, str]:
    """{key of a hub tensor with parameters of `trained`: the module of transformers' model to save}."""
    modules = {}
    for key in layout.shapes:
        natives = layout.natives(key)
        if set(natives).intersection(trained):
            name = layout.in_model(key)
            # Outside the base model, a head is one module, whatever it contains.
            inside = layout.written[key] != key or layout.native_parts[natives[0]] in ("", CROSS_ATTENTION)
            modules[key] = name.rpartition(".")[0] if inside else name.split(".")[0]
    return modules


def check_modules(layout: Layout, chosen: Collection[str], tied: Collection[str] = ()) -> None:
    """Raise ValueError if peft, which copies whole modules, would save or train other tensors than `chosen`.

    Args:
        tied: keys of tensors that are tied to others here, and stored in a file with the values of these.
    """
    modules = saved_modules(layout, chosen)
    for key, module in modules.items():
        missing = [name for name in layout.natives(key) if name not in chosen]
        for other in layout.shapes:
            if other not in modules and layout.in_model(other).startswith(f"{module}."):
                missing += layout.natives(other)
        if missing:
            raise ValueError(f"modules_to_save: transformers' {module} also holds {', '.join(missing)}; add it")
    for tie in layout.ties.values():
        if tie.to in modules and tie.compare and tie.hub not in tied:
            raise ValueError(
                f"modules_to_save: transformers' {layout.written[tie.to]} is also {tie.hub}, but peft would train and "
                f"load only a copy of {modules[tie.to]}; leave {', '.join(layout.natives(tie.to))} out"
            )


def gather_modules(
    model: Model, layout: Layout, held: Mapping[str, torch.Tensor], prefix: str = PREFIX
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The fully trained modules: ({name in the file: tensor}, names of the modules of transformers' model).

    Includes the dense layers of embeddings, trained or not, because no other file would hold them. Collective.

    Args:
        held: engine.checkpoint.named_tensors of the model. prefix: of the names in the file.
    """
    dense = [name for name, part in layout.native_parts.items() if part == DENSE]
    saved = [*model.adapter.trained, *dense]
    modules = saved_modules(layout, saved)
    check_modules(layout, saved)  # a loaded file may hold modules that our files cannot
    tensors = {}
    for key in modules:
        natives = {}
        for name in layout.natives(key):
            full = whole_tensor(model, held, name)
            natives[name] = torch.empty(layout.native_shapes[name]) if full is None else full.detach().cpu()
        tensors[prefix + layout.in_model(key)] = export_tensor(layout, key, natives).contiguous()
    return tensors, list(dict.fromkeys(modules.values()))

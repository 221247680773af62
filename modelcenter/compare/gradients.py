"""Gradients of our models, and parameters of transformers' models, under the same names: those of its checkpoints, and
of its models where a checkpoint joins their tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.names import model_tensors
from modelcenter import registry
from modelcenter.convert.layout import Layout, compile_layout
from modelcenter.convert.match import to_key
from modelcenter.convert.stream import export_tensor
from modelcenter.models.base import Model


def layout_of(model: Model) -> Layout:
    """The conversion layout of one of our models, by the tensors of transformers' model."""
    arch = registry.get(model.config.model_type).arch_map().of_model()
    shapes = {name: tuple(tensor.shape) for name, tensor in model_tensors(model)}
    return compile_layout(arch, model.task, model.config, shapes)


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Each parameter's `grad`, zeros where it has none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}


def hub_gradients(model: Model, grads: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Gradients of one of our models as transformers' model has them, of what is trained.

    Args:
        grads: native name -> gradient; None: each parameter's `grad` (zero where it has none).
    """
    if grads is None:
        grads = gradients_of(dict(model.named_parameters()))
    layout, trained = layout_of(model), {name for name, p in model.named_parameters() if p.requires_grad}
    return {
        layout.written[key]: export_tensor(layout, key, {name: grads[name] for name in layout.natives(key)})
        for key in layout.pieces
        if trained.intersection(layout.natives(key))
    }


def parameters_by_file_name(theirs: nn.Module, ours: Model) -> dict[str, nn.Parameter]:
    """The parameters of a transformers model under the names of `hub_gradients`, which its modules may not have.

    Call it after a backward pass: a parameter without a gradient is left out where files only repeat another under its
    name (`cls.predictions.bias` of BERT's untied head, which nothing there uses).
    """
    layout, arch = layout_of(ours), registry.get(ours.config.model_type).arch_map().of_model()
    parameters = {}
    for name, p in theirs.named_parameters():
        key = to_key(arch, name)
        key = layout.aliases.get(key, key)
        if key not in layout.shapes and arch.ignores(key):
            continue  # Marian's sinusoids, which nothing trains
        if key in layout.shapes and ours.constants.issuperset(layout.natives(key)):
            continue  # ESM's head of contacts, which has no loss; sinusoids of PEGASUS, which only transformers trains
        if key in layout.ties and not layout.ties[key].write:
            key = layout.ties[key].to
        elif key in layout.ties and p.grad is None:
            continue
        parameters[layout.written.get(key, name)] = p
    return parameters

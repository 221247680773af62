"""peft's layers in our models, whose parameters may be split over ranks."""

from typing import Any

import torch
from torch import nn

from engine.names import clean_name
from engine.tensors import local_box, local_tensor
from modelcenter.adapters.peft_format import ADAPTER_NAME


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """{name of one of our linear layers: peft's layer around it}; in a pipeline, those of this rank's stage."""
    modules: Any = model.named_modules()
    adapted = {clean_name(name): module for name, module in modules if hasattr(module, "lora_A")}
    return {name: layer for name, layer in adapted.items() if layer.base_layer.weight is not None}


def merged_weight(layer: Any, dora: bool) -> torch.Tensor:
    """This rank's part of a layer's weight with its update added, in fp32 or wider."""
    merged = _updated_weight(layer)
    if dora:
        magnitude = _gathered(layer.lora_magnitude_vector[ADAPTER_NAME].weight).to(merged)
        rows, _ = local_ranges(layer.base_layer.weight)
        merged *= (magnitude[rows] / merged.norm(dim=1))[:, None]
    return merged


@torch.no_grad()
def reset_magnitude(layer: Any) -> None:
    """Set DoRA's magnitudes to the norms of the updated rows, which are split over ranks like the magnitudes."""
    weight = _updated_weight(layer)
    local = local_tensor(layer.lora_magnitude_vector[ADAPTER_NAME].weight)
    if local.shape[0] != weight.shape[0]:
        raise ValueError("use_dora: the rows of a weight and their norms are on different ranks; use tp_size=1")
    local.copy_(weight.norm(dim=1))


def _updated_weight(layer: Any) -> torch.Tensor:
    """This rank's part of a layer's W + scale * B A, in fp32 or wider."""
    weight = layer.base_layer.weight
    local = local_tensor(weight).detach()
    wide = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
    a, b = (_gathered(part[ADAPTER_NAME].weight).to(wide) for part in (layer.lora_A, layer.lora_B))
    rows, columns = local_ranges(weight)
    return wide.addmm_(b[rows], a[:, columns], alpha=layer.scaling[ADAPTER_NAME])


def _gathered(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def local_ranges(weight: Any) -> tuple[slice, slice]:
    """(rows, columns) of a weight that this rank holds."""
    if not hasattr(weight, "placements"):
        return slice(None), slice(None)
    size, offset = local_box(weight.shape, weight.device_mesh, weight.placements)
    rows, columns = (slice(start, start + n) for start, n in zip(offset, size, strict=True))
    return rows, columns

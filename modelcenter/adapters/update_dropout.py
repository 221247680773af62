"""Dropout on the input of low-rank updates, with masks that depend on the token, like the model's own.

peft's layer gets only its input, not the tokens it belongs to. A hook on the module around adapted layers, which is
called with the batch, therefore sets the draws of each layer; for layers directly in the model (a projection of
embeddings), a hook sets them when the batch is packed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from engine.ops import Draws, dropout
from modelcenter.adapters.lora_layers import local_ranges, lora_layers
from modelcenter.adapters.peft_format import ADAPTER_NAME
from modelcenter.layers.attention import CrossAttention
from modelcenter.layers.dropout import DrawingModule, name_sites
from modelcenter.layers.packing import Packed


class UpdateDropout(DrawingModule):
    """x: (..., in_features), or under tensor parallelism this rank's part of them -> the same.

    Attributes:
        draws: of the batch that its layer reads next. None: masks come from torch's generator, as if no training loop
            gives the rows of a batch, and in compiled graphs.
        first_channel: the index of the first of its channels. split: other ranks have other channels, or the same
            tokens, and must draw consistent masks.
    """

    draws: Draws | None = None
    first_channel = 0

    def __init__(self, p: float, split: bool = False):
        super().__init__()
        self.p, self.split = p, split

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.draws is None or torch.compiler.is_compiling():
            if self.split:
                raise ValueError(
                    "lora_dropout: with tp_size above 1, ranks draw the same masks only in a training loop that names "
                    "the step and its rows (as the scripts' does), without compile. Use tp_size=1, or leave "
                    "lora_dropout out (for a saved adapter: dataclasses.replace(load_lora(path), dropout=0.0))"
                )
            return dropout(x, self.p)
        site, tokens = self.site or 0, self.draws.of(x.shape[0])
        return dropout(x, self.p, key=self.draws.key, site=site, tokens=tokens, first_channel=self.first_channel)


def key_update_dropout(model: Any, split: bool) -> list[Any]:
    """Replace the dropout in peft's layers by UpdateDropout; split: by tensor parallelism.

    Returns the hooks, each with `remove()`.
    """
    layers = lora_layers(model)
    for layer in layers.values():
        layer.lora_dropout[ADAPTER_NAME] = UpdateDropout(layer.lora_dropout[ADAPTER_NAME].p, split)
    name_sites(model)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in layers)
    handles = [model.get_submodule(name).register_forward_pre_hook(_before_forward) for name in parents if name]
    if "" in parents:
        handles.append(model.register_packed_hook(_after_packing))
    return handles


def _before_forward(parent: Any, args: tuple[Any, ...]) -> None:
    """Before attention or a feed-forward network runs, set the draws of the dropouts in it."""
    if parent.training and not torch.compiler.is_compiling():
        _note_draws(parent, parent.named_children(), next((arg for arg in args if isinstance(arg, Packed)), None))


def _after_packing(model: Any, ctx: Packed) -> None:
    """Set the draws of adapted layers directly in the model that read tokens; a pooler reads sequences."""
    _note_draws(model, ((name, layer) for name, layer in model.named_children() if not model.is_head(f"{name}.")), ctx)


def _note_draws(parent: Any, layers: Iterable[tuple[str, Any]], ctx: Packed | None) -> None:
    for name, layer in layers:
        drop = layer.lora_dropout[ADAPTER_NAME] if hasattr(layer, "lora_dropout") else None
        if isinstance(drop, UpdateDropout):
            reads_encoder = isinstance(parent, CrossAttention) and name in ("k", "v")
            drop.draws = None if ctx is None else ctx.memory_draws if reads_encoder else ctx.draws
            _, columns = local_ranges(layer.base_layer.weight)
            drop.first_channel = columns.start or 0

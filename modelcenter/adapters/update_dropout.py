"""Dropout of what goes into a low-rank update, with masks as the model's own: keyed by the token.

peft's layer takes its input alone, and says nothing of the tokens it belongs to. So the module around adapted layers,
which is called with the batch, notes for each of them by which numbers it is to draw; for layers that are the model's
own (a projection of embeddings), the model does when it has made the batch.
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
        draws: of the batch that its layer is about to see. None: masks are drawn from torch's generator, as where no
            training loop says which rows a batch holds, and in compiled graphs.
        first_channel: the number of the first of its channels. split: other ranks have other channels, or the same
            tokens, and must draw the same masks.
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
                    "lora_dropout: the ranks of tp_size above 1 draw the same masks only in a training loop that says "
                    "which step and rows these are (as the scripts' does), without compile. Use tp_size=1, or leave "
                    "lora_dropout out, of a saved adapter by dataclasses.replace(load_lora(path), dropout=0.0)"
                )
            return dropout(x, self.p)
        site, tokens = self.site or 0, self.draws.of(x.shape[0])
        return dropout(x, self.p, key=self.draws.key, site=site, tokens=tokens, first_channel=self.first_channel)


def key_update_dropout(model: Any, split: bool) -> list[Any]:
    """Put UpdateDropout in place of the dropout in peft's layers; split: by tensor parallelism.

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
    """Before attention or a feed-forward network: tell the dropouts in it which tokens they will see."""
    if parent.training and not torch.compiler.is_compiling():
        _note_draws(parent, parent.named_children(), next((arg for arg in args if isinstance(arg, Packed)), None))


def _after_packing(model: Any, ctx: Packed) -> None:
    """The same for the model's own layers that see tokens; a pooler sees sequences."""
    _note_draws(model, ((name, layer) for name, layer in model.named_children() if not model.is_head(f"{name}.")), ctx)


def _note_draws(parent: Any, layers: Iterable[tuple[str, Any]], ctx: Packed | None) -> None:
    for name, layer in layers:
        drop = layer.lora_dropout[ADAPTER_NAME] if hasattr(layer, "lora_dropout") else None
        if isinstance(drop, UpdateDropout):
            reads_encoder = isinstance(parent, CrossAttention) and name in ("k", "v")
            drop.draws = None if ctx is None else ctx.memory_draws if reads_encoder else ctx.draws
            _, columns = local_ranges(layer.base_layer.weight)
            drop.first_channel = columns.start or 0

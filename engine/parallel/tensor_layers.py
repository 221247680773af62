"""The layers of tensor parallelism. Each computes with this rank's part of a layer, and calls the few collectives.

``engine.parallel.tensor`` changes the class of a model's modules to these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from engine.ops import Experts, embedding, linear
from engine.ops.embeddings import check_ids
from engine.parallel import functional as f
from engine.parallel.rng import rng_streams


class CollectiveCache:
    """Applies a collective only once to a tensor that several layers take as their input, such as q, k and v (between
    which low-rank updates may run, with other inputs).

    It holds strong references until ``forget``. Weak ones would not die at the same time on all ranks (a collective may
    hold a tensor a little longer), and all ranks must make the same collectives.
    """

    _MOST = 8  # inputs held at once; a plan in which no layer ends what "colwise" begins never calls `forget`

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, tuple[int, bool], Tensor]] = []

    def __call__(self, function: Callable[[Tensor, f.Group], Tensor], x: Tensor, group: f.Group) -> Tensor:
        # Tensors of inference mode have no version counter, but no layer changes its input.
        key = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        for given, its_key, out in self._results:
            if given is x and its_key == key:
                return out
        out = function(x, group)
        self._results.append((x, key, out))
        del self._results[: -self._MOST]
        return out

    def forget(self) -> None:
        """Release the tensors, because no further layer takes these inputs."""
        self._results.clear()


class TensorParallelGroup:
    """What the split layers of one model share: the group, and collectives that serve several layers."""

    def __init__(self, mesh: DeviceMesh, sequence: bool = False) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.size, self.rank, self.sequence = mesh.size(), mesh.get_local_rank(), sequence
        self._inputs = CollectiveCache()

    def whole_input(self, x: Tensor) -> Tensor:
        """The input of layers that split their outputs."""
        return self._inputs(f.gather_rows if self.sequence else f.copy_to, x, self.group)

    def forget_input(self) -> None:
        """Forget the inputs, because all layers that share them have run."""
        self._inputs.forget()

    def summed_output(self, x: Tensor) -> Tensor:
        """The output of layers that split their inputs: the sum of each rank's x."""
        return (f.scatter_sum_rows if self.sequence else f.reduce_from)(x, self.group)


class SplitLayer(nn.Module):
    """First base class of a split layer, before nn.Linear or nn.Embedding."""

    tp_group: TensorParallelGroup
    _first: int  # number of this rank's first row of the whole weight
    weight: Any
    bias: Any
    out_features: int
    padding_idx: int | None

    @property
    def first_row(self) -> int:
        """Index of this rank's first output among those of the whole layer."""
        return self._first


class Colwise(SplitLayer):
    """A linear layer split by outputs: (..., in) -> (..., out / ranks), this rank's columns."""

    _whole = False

    def forward(self, x: Tensor) -> Tensor:
        t = self.tp_group
        out = linear(t.whole_input(x), local(self.weight), local(self.bias))
        if self._whole:
            t.forget_input()
            return f.join_columns(out, t.group, self.out_features)
        if self.training:
            rng_streams.enter("tp", t.rank)
        return out


class ColwiseGather(Colwise):
    """``Colwise`` with the outputs joined again: (..., in) -> (..., out) on each rank."""

    _whole = True


class Rowwise(SplitLayer):
    """A linear layer split by inputs: (..., in / ranks), as ``Colwise`` returns, -> (..., out), summed over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        rng_streams.leave("tp")
        t, bias = self.tp_group, self.bias
        t.forget_input()
        out = t.summed_output(linear(x, local(self.weight)))
        if isinstance(bias, DTensor):  # each rank adds it to its rows
            bias = bias.to_local(grad_placements=[Partial()])
        return out if bias is None else out + bias  # once, after the sum


class Vocab(SplitLayer):
    """An embedding table split by rows: ids (...) -> (..., width), each row from the rank that has it."""

    num_embeddings: int

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        weight = local(self.weight)
        own = ids - self._first
        outside = (own < 0) | (own >= weight.shape[0])
        if not weight.shape[0]:  # more ranks than rows
            out = weight.sum() * weight.new_zeros(*ids.shape, weight.shape[1])
            return f.reduce_from(out, self.tp_group.group)
        padding = None if self.padding_idx is None else self.padding_idx - self._first
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        out = embedding(own.masked_fill(outside, 0), weight, padding).masked_fill(outside[..., None], 0.0)
        return f.reduce_from(out, self.tp_group.group)


class WideNorm(SplitLayer):
    """A root-mean-square norm split by channels: (..., n / ranks), as ``Colwise`` returns, -> the same.

    The mean is that of all n channels; the product with the weight is rounded once.
    """

    eps: float
    _width: int  # n

    def forward(self, x: Tensor) -> Tensor:
        group = self.tp_group.group
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        # Each rank divides by the sum, so the gradient of the sum is that of all ranks.
        squares = f.copy_to(f.reduce_from(wide.square().sum(-1, keepdim=True), group), group)
        normed = wide * torch.rsqrt(squares / self._width + self.eps)
        return (normed * local(self.weight)).to(x.dtype)


class SplitExperts(SplitLayer):
    """Experts split by their intermediate channels: (T, H) and logits (T, experts) -> (T, H), summed over ranks.

    Every rank chooses each token's experts by the same logits, of which it adds to the gradient only its part.
    """

    gate: Any
    up: Any
    down: Any
    mix: Callable[..., Tensor]

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        t = self.tp_group
        parts = local(self.gate), local(self.up), local(self.down)
        out = self.mix(t.whole_input(x), t.whole_input(logits), *parts)
        t.forget_input()
        return t.summed_output(out)


#: {style: (the class of module that it splits, the layer that computes with a part of one)}
LAYERS: dict[str, tuple[type[nn.Module], type[SplitLayer]]] = {
    "colwise": (nn.Linear, Colwise),
    "colwise_gather": (nn.Linear, ColwiseGather),
    "rowwise": (nn.Linear, Rowwise),
    "vocab": (nn.Embedding, Vocab),
    "experts": (Experts, SplitExperts),
    "norm": (nn.Module, WideNorm),
}


def local(parameter: Any) -> Any:
    """The local tensor of a parameter, differentiably; anything else is returned as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


_split_classes: dict[tuple[type, type], type[nn.Module]] = {}  # those made so far, as are the next
_partial_classes: dict[tuple[type, tuple[str, ...]], type[nn.Module]] = {}


def split_class(layer: type[SplitLayer], kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``kind``, a class of linear layers or embeddings, that computes with a part as ``layer`` does."""
    key = layer, kind
    if key not in _split_classes:
        _split_classes[key] = type(kind.__name__, (layer, kind), {"__module__": kind.__module__})
    return _split_classes[key]


def partial_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of ``kind`` whose attributes of these names are local tensors, in recomputed forwards too."""
    key = kind, names
    if key not in _partial_classes:
        shown = {name: property(functools.partial(_summed_over_ranks, name=name)) for name in names}
        _partial_classes[key] = type(kind.__name__, (kind,), {"__module__": kind.__module__, **shown})
    return _partial_classes[key]


def _summed_over_ranks(module: nn.Module, name: str) -> Any:
    parameter = module._parameters.get(name)
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:  # gathered: only the tp dimension is left
        return parameter.to_local(grad_placements=[Partial()])
    return module.__getattr__(name)

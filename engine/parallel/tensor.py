"""Tensor parallelism: each rank of a group holds a part of each layer and computes with plain tensors.

Parameters are DTensors on the ``tp`` dimension of the mesh, which FSDP shards further; layers take their local tensor
and call the few collectives themselves (Shoeybi et al. 2019, arXiv:1909.08053), so nothing is dispatched through
DTensor in forward and backward.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from engine import runtime
from engine.collectives import first_difference
from engine.names import clean_name
from engine.ops import embedding, linear
from engine.ops.embeddings import check_ids
from engine.parallel import functional as f
from engine.parallel.rng import rng_streams
from engine.tensors import as_shard, local_box, local_tensor, part_of

# transformers' names for what there is here.
_ALIASES = {
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "partial",
}
STYLES = {
    "colwise": "nn.Linear whose outputs are split over the ranks; takes whole inputs",
    "colwise_gather": "the same, with the outputs put together again",
    "rowwise": "nn.Linear whose inputs are split over the ranks; gives whole outputs",
    "vocab": "nn.Embedding, or a parameter (vocabulary, ...), whose rows are split over the ranks",
    "partial": "any module that each rank applies to its own part of the activations",
}
_HEAD_COUNTS = ("num_heads", "num_kv_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head")


class CollectiveCache:
    """Applies a collective once to each tensor that several layers take, such as the input of q, k and v (with low-rank
    updates between them, whose inputs are others).

    References are strong, up to ``forget``: when a tensor dies is not the same on all ranks (a collective may hold it a
    little longer), and they must all make the same collectives.
    """

    _MOST = 8  # inputs that are held at once; a plan where no layer ends what "colwise" begins never forgets

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, tuple[int, bool], Tensor]] = []

    def __call__(self, function: Callable[[Tensor, f.Group], Tensor], x: Tensor, group: f.Group) -> Tensor:
        # A tensor of inference mode does not count its changes: no layer changes its input.
        key = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        for given, its_key, out in self._results:
            if given is x and its_key == key:
                return out
        out = function(x, group)
        self._results.append((x, key, out))
        del self._results[: -self._MOST]
        return out

    def forget(self) -> None:
        """Let go of the tensors: no layer will take these inputs again."""
        self._results.clear()


class TensorParallelGroup:
    """What the split layers of one model share: the group, and collectives made once for several layers."""

    def __init__(self, mesh: DeviceMesh, sequence: bool = False) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.size, self.rank, self.sequence = mesh.size(), mesh.get_local_rank(), sequence
        self._inputs = CollectiveCache()

    def whole_input(self, x: Tensor) -> Tensor:
        """The input of layers that split their outputs."""
        return self._inputs(f.gather_rows if self.sequence else f.copy_to, x, self.group)

    def forget_input(self) -> None:
        """Forget the inputs: the layers that share them have all run."""
        self._inputs.forget()

    def summed_output(self, x: Tensor) -> Tensor:
        """The output of layers that split their inputs: the sum of each rank's x."""
        return (f.scatter_sum_rows if self.sequence else f.reduce_from)(x, self.group)


class _Layer(nn.Module):
    """First base class of a split layer, before nn.Linear or nn.Embedding."""

    tp_group: TensorParallelGroup
    _first: int  # number of this rank's first row of the whole weight
    weight: Any
    bias: Any
    out_features: int
    padding_idx: int | None

    @property
    def first_row(self) -> int:
        """Number of this rank's first output among those of the whole layer."""
        return self._first


class _Colwise(_Layer):
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


class _ColwiseGather(_Colwise):
    _whole = True


class _Rowwise(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        rng_streams.leave("tp")
        t, bias = self.tp_group, self.bias
        t.forget_input()
        out = t.summed_output(linear(x, local(self.weight)))
        if isinstance(bias, DTensor):  # each rank adds it to its rows
            bias = bias.to_local(grad_placements=[Partial()])
        return out if bias is None else out + bias  # once, after the sum


class _Vocab(_Layer):
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


_CLASSES: dict[str, tuple[type[nn.Module], type[_Layer]]] = {
    "colwise": (nn.Linear, _Colwise),
    "colwise_gather": (nn.Linear, _ColwiseGather),
    "rowwise": (nn.Linear, _Rowwise),
    "vocab": (nn.Embedding, _Vocab),
}
_split_classes: dict[tuple[type, type], type] = {}  # made so far, by layer and class of the module
_partial_classes: dict[tuple[type, tuple[str, ...]], type] = {}  # by class of the module and names of its parameters


def local(parameter: Any) -> Any:
    """What this rank computes with: the local tensor of a parameter, in the graph; anything else as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def find_plan(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """The styles of ``plan``, of ``model.tp_plan()`` or of ``transformers``' ``_tp_plan``, in our names.

    Raises ValueError if there is none, or a style is not known.
    """
    if plan is None:
        own = getattr(model, "tp_plan", None)
        plan = own() if callable(own) else own or getattr(model, "_tp_plan", None) or None
    self_split = _self_split(model)
    if plan is None and all(id(p) in self_split for p in model.parameters()):
        plan = {}
    if plan is None or not (plan or self_split):
        if self_split:
            raise ValueError(
                f"{type(model).__name__} has layers that tp_size splits and others beside them: give it a tp_plan() "
                "that returns {name of a module that sees this rank's rows only, such as a norm: 'partial'}, or {} if "
                "all of them see what every rank sees"
            )
        raise ValueError(
            f"tp_size is {runtime.current().tp_size} but {type(model).__name__} does not say how to split it: give it "
            "a tp_plan(), or pass engine.shard(model, tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})"
        )
    found = {pattern: _ALIASES.get(style, style) for pattern, style in plan.items()}
    for pattern, style in found.items():
        if style not in STYLES:
            known = "; ".join(f"{name}: {what}" for name, what in STYLES.items())
            raise ValueError(f"tp_plan has the style {style!r} for {pattern}, expected one of: {known}")
    return found


def _self_split(model: nn.Module) -> set[int]:
    """Ids of the parameters of layers that declare how they are split (``tp_split``, BMTrain's layers)."""
    layers = [module for module in model.modules() if hasattr(module, "tp_split")]
    return {id(p) for module in layers for p in module.parameters(recurse=False)}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    sequence_units: Any = None,
    absent: Collection[str] = (),
) -> None:
    """Split ``model`` over the ranks of ``mesh``, one-dimensional, in place. On meta too.

    Every rank starts from the same parameters and keeps its part; the rest of the model stays as it is.

    Args:
        plan: {name of modules or parameters, * for one component of it: style}, see ``STYLES``; None: what the model
            says (``find_plan``).
        sequence_units: modules between which activations are split by rows over the same ranks (sequence
            parallelism): their parameters outside of split layers get gradients of a part of the rows.
        absent: names of modules and parameters that are on other stages of a pipeline.

    Raises:
        ValueError: no plan, an unknown style, a name that nothing has, a module the style does not fit, or a number of
            heads that the ranks do not divide.
    """
    given = plan is not None or callable(getattr(model, "tp_plan", None))
    styles = _assign(model, find_plan(model, plan), given, absent)
    _check_heads(model, styles, mesh.size())
    group = TensorParallelGroup(mesh, sequence=sequence_units is not None)
    placed: _Placed = {}
    split: set[nn.Module] = set()
    for name, (style, module, own_name) in styles.items():
        if style == "partial":
            _mark_partial(module, mesh, placed)
            continue
        if own_name is not None:
            _place(module, own_name, mesh, Shard(0), placed)
            continue
        _split_layer(name, module, style, group, placed)
        split.add(module)
    for module in [m for m in model.modules() if hasattr(m, "tp_split")]:
        for own, dim in module.tp_split.items():  # type: ignore[union-attr, operator]
            if module._parameters[own] is not None:
                _place(module, own, mesh, Replicate() if dim is None else Shard(dim), placed)
        split.add(module)
    for unit in sequence_units or ():
        for module in unit.modules():
            if module not in split and next(module.parameters(recurse=False), None) is not None:
                _mark_partial(module, mesh, placed)
            elif isinstance(module, _Rowwise) and module.bias is not None:
                _place(module, "bias", mesh, Replicate(), placed)
    for module in model.modules():  # places that only share a parameter
        for own, parameter in module._parameters.items():
            if id(parameter) in placed:
                module._parameters[own] = placed[id(parameter)][1]


def _split_layer(name: str, module: nn.Module, style: str, group: TensorParallelGroup, placed: _Placed) -> None:
    """Keep this rank's part of a linear layer or an embedding, and give the module the class that computes with it."""
    kind, layer = _CLASSES[style]
    if not isinstance(module, kind):
        raise ValueError(
            f"tp_plan gives {name} the style {style!r}, which is for {kind.__name__}, but it is a "
            f"{type(module).__name__}"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise ValueError(f"embedding {name} has max_norm or scale_grad_by_freq, which style 'vocab' does not do")
    assert isinstance(module.weight, Tensor)
    placement = Shard(1) if style == "rowwise" else Shard(0)
    first = local_box(module.weight.shape, group.mesh, [placement])[1][0]
    _place(module, "weight", group.mesh, placement, placed)
    if style in ("colwise", "colwise_gather") and module.bias is not None:
        _place(module, "bias", group.mesh, Shard(0), placed)
    key = layer, type(module)
    if key not in _split_classes:
        _split_classes[key] = _subclass(*key)
    module.__class__ = _split_classes[key]
    assert isinstance(module, _Layer)
    module.tp_group, module._first = group, first


def _subclass(layer: type[_Layer], kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (layer, kind), {"__module__": kind.__module__})


_Placed = dict[int, tuple[nn.Parameter, nn.Parameter]]  # id of a parameter: it, what took its place
_Target = tuple[str, nn.Module, str | None]  # style, module, name of one parameter of it


def _assign(model: nn.Module, plan: Mapping[str, str], strict: bool, absent: Collection[str]) -> dict[str, _Target]:
    """{name: what to do}; a parameter that two modules share is split in both."""
    modules = {clean_name(n): module for n, module in model.named_modules() if n not in absent}
    found: dict[str, _Target] = {}
    for pattern, style in plan.items():
        match = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        names = [name for name in modules if name and match(name)]
        found |= {name: (style, modules[name], None) for name in names}
        for prefix, module in modules.items():
            for own, parameter in module._parameters.items():
                full = f"{prefix}.{own}" if prefix else own
                if parameter is not None and match(full):
                    if style != "vocab":
                        raise ValueError(f"tp_plan gives parameter {full} the style {style!r}, expected 'vocab'")
                    names.append(full)
                    found[full] = (style, module, own)
        if strict and not names and not any(match(name) for name in absent):
            raise ValueError(f"tp_plan names {pattern!r}, but no module or parameter of {type(model).__name__} has it")
    tables = {
        id(module.weight)
        for style, module, own in found.values()
        if own is None and style in ("vocab", "colwise", "colwise_gather") and isinstance(module.weight, nn.Parameter)
    }
    for name, module in modules.items():
        if id(module._parameters.get("weight")) in tables and name not in found:
            style = "vocab" if isinstance(module, nn.Embedding) else "colwise_gather"
            found[name] = (style, module, None)
    return found


def _check_heads(model: nn.Module, styles: Mapping[str, _Target], size: int) -> None:
    for name, (style, _, own_name) in styles.items():
        if style != "colwise" or own_name is not None:
            continue
        owner = _owner(model, name)
        parent = model.get_submodule(owner)
        for place in (parent, getattr(parent, "config", None)):
            if place is not parent and "attention" not in type(parent).__name__.lower():
                continue
            for count in _HEAD_COUNTS:
                heads = getattr(place, count, None)
                if isinstance(heads, int) and heads % size:
                    raise ValueError(
                        f"{owner or type(model).__name__} has {count}={heads}, which tp_size={size} does not divide: "
                        f"each rank computes whole heads. Use a tp_size that divides {heads}"
                    )


def _owner(model: nn.Module, name: str) -> str:
    """The name of the module that computes with the layer ``name``: around a low-rank update, not inside it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if "base_layer" in model.get_submodule(".".join(parts[:depth]))._modules:
            return ".".join(parts[: depth - 1])
    return ".".join(parts[:-1])


@torch.no_grad()
def _place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, placed: _Placed) -> None:
    """Replace a parameter by its part on this rank."""
    parameter = module._parameters[name]
    assert parameter is not None
    done: Any = parameter
    if isinstance(parameter, DTensor):  # shared with a module that was here before
        pass
    elif id(parameter) in placed:
        done = placed[id(parameter)][1]
    else:
        part = part_of(parameter.detach(), mesh, [placement])
        if not part.is_meta:
            part = part.to(runtime.device())
        done = nn.Parameter(as_shard(part, parameter.shape, mesh, [placement]), requires_grad=parameter.requires_grad)
        placed[id(parameter)] = parameter, done
    if tuple(done.placements) != (placement,):
        raise ValueError(f"a parameter shared by several modules is split as {done.placements} and as {placement}")
    module._parameters[name] = done


def _mark_partial(module: nn.Module, mesh: DeviceMesh, placed: _Placed) -> None:
    """Give a module whole parameters whose gradients are summed over the ranks."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    for name in names:
        _place(module, name, mesh, Replicate(), placed)
    key = type(module), names
    if key not in _partial_classes:
        _partial_classes[key] = _partial_class(*key)
    module.__class__ = _partial_classes[key]


def _partial_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """``kind``, whose code reads local tensors where it reads these parameters: a recomputed forward does so too."""
    shown = {name: property(functools.partial(_summed_over_ranks, name=name)) for name in names}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **shown})


def _summed_over_ranks(module: nn.Module, name: str) -> Any:
    parameter = module._parameters.get(name)
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:  # gathered: the ranks of tp alone are left
        return parameter.to_local(grad_placements=[Partial()])
    return module.__getattr__(name)


def check_inputs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each call of ``model`` check that the ranks which compute it together were given the same inputs.

    A difference would be a wrong result, or the end of the process inside a collective. Shapes are compared on every
    device, values on the CPU alone: elsewhere that would wait for the device.
    """
    groups = {name: mesh[name].get_group() for name in ("tp", "cp") if mesh[name].size() > 1}
    depths: list[int] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not depths:
            rng_streams.forget()
        depths.append(rng_streams.depth())
        mine = zlib.crc32(repr(sorted(kwargs)).encode(), digest((args, kwargs)))
        for name, group in groups.items():
            other = first_difference(mine, group)
            if other is not None:
                raise ValueError(
                    f"rank {runtime.rank()} computes one batch together with {group.size() - 1} other(s) "
                    f"({name}_size={group.size()}), but its inputs differ from those of number {other} of them: split "
                    "the data by engine.data_rank() and engine.data_size(), not by rank and world size"
                )

    def after(module: nn.Module, *_: Any) -> None:
        rng_streams.unwind(depths.pop() if depths else 0)

    model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    model.register_forward_hook(after, always_call=True)


def digest(value: Any) -> int:
    """A number that tells inputs apart: by names and shapes, and on the CPU by values."""
    found = 0
    for name, x in _tensors_in(value):
        found = zlib.crc32(repr((name, tuple(x.shape), x.dtype)).encode(), found)
        if x.device.type == "cpu" and x.dtype != torch.bfloat16:
            found = zlib.crc32(x.detach().contiguous().numpy().tobytes(), found)
    return found


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, local_tensor(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors_in(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, name)

"""What wraps the forward of a unit: recomputation of its activations in backward, compilation, and, in a model that
stays plain, casts of its parameters (``engine.mixed_precision``).

All of these replace the ``forward`` of the unit and not the unit, so parameter names do not change, the hooks that
gather and free sharded parameters stay outside, and a copy of the model is wrapped too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from engine import runtime
from engine.mixed_precision import Forward, casting, is_cast
from engine.notes import CASTS
from engine.ops import leave_to_eager, remade
from engine.torch_compat import compile_often, run_scripts_as_written

_MARK = "recompute"  # attribute of a wrapped forward: how it recomputes activations

# Graphs that torch.compile may make for the units of one class, in all models of a process. One model needs up to a
# dozen: for training and evaluation, one length and any, all tokens or only those that are read, an input with a
# gradient and without. With torch's default of 8, none were left for an evaluation after training or for a second
# model, which then ran in Python.
_GRAPHS = 64

# Operators whose outputs "selective" keeps: products with weights, and attention as one operator. Batched products are
# left out: in an attention that is written out they make the scores, which are larger than everything else together.
_KEPT = (
    "aten.mm",
    "aten.addmm",
    "aten.linear",
    "mkldnn._linear_pointwise",
    "modelcenter.linear",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "aten._flash_attention_forward",
    "torch_attn._varlen_attn",
    "modelcenter_graph.attention_part",
)


def wrap_units_(
    units: Iterable[nn.Module], recompute: str, compile: bool | str, cast_to: torch.dtype | None = None
) -> None:
    """Wrap the forward of each unit, in place, to recompute activations, compile it and cast parameters. Units that are
    wrapped already stay as they are.

    Args:
        recompute: see ``Policy``.
        compile: False, True (torch's default backend) or the name of a backend.
        cast_to: the dtype in which a unit sees its parameters and inputs; None: no casts.
    """
    selective = recompute == "selective"
    cast: Callable[..., Forward] = _none if cast_to is None else functools.partial(casting, dtype=cast_to)
    for unit in units:
        own = unit.__dict__.get("forward")  # the user's patch of this module, if any
        if hasattr(own, _MARK):
            continue
        # What is compiled is the function of the class, so that the units of one class share compiled code.
        forward: Forward = _ignoring_self(own) if own is not None else type(unit).forward
        if selective:
            _recompute_recurrent_layers(unit)
        if compile and selective:
            # The compiler must see the recomputation, and implements it itself, with the casts as inputs of the graph:
            # the dispatch modes that select operators would turn compilation off.
            forward = cast(_compiled(_selective(_noticing_python(forward)), compile))
        else:
            # The recomputation repeats the compiled forward, so it also repeats the casts.
            if compile:
                forward = _compiled(forward, compile)
            wrap = _none if compile and recompute == "cheap" else _WRAPPERS[recompute]  # the compiler does "cheap"
            forward = wrap(cast(forward, recomputed=recompute in ("full", "selective")))
        CASTS.set(unit, cast_to is not None)
        # A bound method: copy.deepcopy binds it to the copy.
        unit.forward = types.MethodType(_marked(forward, recompute), unit)


def _marked(forward: Forward, recompute: str) -> Forward:
    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    setattr(call, _MARK, recompute)
    return call


def _ignoring_self(bound: Forward) -> Forward:
    return lambda self, *args, **kwargs: bound(*args, **kwargs)


def _compiled(forward: Forward, backend: bool | str) -> Forward:
    leave_to_eager()
    return compile_often(forward, _GRAPHS, **{"backend": backend} if isinstance(backend, str) else {})


def _noticing_python(forward: Forward) -> Forward:
    """Warn if torch.compile leaves the whole unit to Python, as it does if a recomputed part cannot be in its graph."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _warn_of_python(type(self).__name__)
        return forward(self, *args, **kwargs)

    return call


@functools.cache
def _warn_of_python(unit: str) -> None:
    runtime.warn(
        f"compile with recompute='selective': torch.compile falls back to Python for {unit} in training, because a "
        "part of it cannot be in its graph (layers split by tensor parallelism; attention of packed rows with a bias, "
        "segments or a soft cap on a GPU, in 16 bits on a CPU, or by several ranks that share the tokens). Pass "
        "recompute='full', which compiles the rest, or leave compile out",
        stacklevel=2,
    )


def _none(forward: Forward, **_: Any) -> Forward:
    return forward


def _full(forward: Forward) -> Forward:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        run_scripts_as_written()
        # Restores torch's generators, so dropout draws the same mask again.
        return checkpoint(forward, self, *args, use_reentrant=False, **kwargs)

    return call


def _selective(forward: Forward) -> Forward:
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        run_scripts_as_written()
        return checkpoint(forward, self, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return call


# These modules change products in place through views that do not share their version counter, so torch does not notice
# that a kept output has changed.
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_recurrent_layers_running = 0


def _recompute_recurrent_layers(unit: nn.Module) -> None:
    """Make "selective" keep nothing that the recurrent layers of a unit compute."""
    for module in unit.modules():
        if isinstance(module, _RECURRENT):
            module.register_forward_pre_hook(_enter_recurrent)
            module.register_forward_hook(_leave_recurrent, always_call=True)


def _enter_recurrent(*_: Any) -> None:
    global _recurrent_layers_running
    _recurrent_layers_running += 1


def _leave_recurrent(*_: Any) -> None:
    global _recurrent_layers_running
    _recurrent_layers_running -= 1


@functools.cache
def _kept(operator: Any) -> bool:
    return any(str(operator).startswith(name + ".") for name in _KEPT)


@functools.cache
def _place_of_dropout(operator: Any) -> int | None:
    """The position of the dropout probability among an operator's arguments; None: it has none."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _keep(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if _recurrent_layers_running or not _kept(operator):
        return CheckpointPolicy.PREFER_RECOMPUTE
    # If backward skipped an operator that draws random numbers, all later draws in the unit would change.
    place = _place_of_dropout(operator)
    draws = place is not None and (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0
    return CheckpointPolicy.PREFER_RECOMPUTE if draws else CheckpointPolicy.MUST_SAVE


def _offload(forward: Forward) -> Forward:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            return forward(self, *args, **kwargs)

    return call


def _to_host(tensor: torch.Tensor) -> Any:
    # Parameters and views of them stay in memory anyway, or are gathered again for backward.
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or base.is_leaf and base.requires_grad or is_cast(base):
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=tensor.is_cuda)
    return tensor.device, copy


def _from_host(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, copy = packed
    # On the stream that made the copy, which orders the two.
    return copy.to(device, non_blocking=True) if device.type == "cuda" else copy


def _cheap(forward: Forward) -> Forward:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with remade.remaking():
            return forward(self, *args, **kwargs)

    return call


_WRAPPERS = {"none": _none, "cheap": _cheap, "full": _full, "selective": _selective, "offload": _offload}

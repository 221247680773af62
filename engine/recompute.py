"""What is done around the forward of a unit: recomputation of its activations in backward, compilation, and casts of
the parameters of a model that stays plain (``engine.mixed_precision``).

All replace the ``forward`` of the unit, not the unit: parameter names stay, the hooks that gather and free sharded
parameters stay outside, and a copy of the model has them too.
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

_MARK = "recompute"  # attribute of such a forward: the way in which it computes activations again

# Of the units of one class, in all models of a process. A model's take up to a dozen: in training and in evaluation, of
# one length and of any, all tokens or those that are read again, with an input that has a gradient and without. Of
# torch's 8, an evaluation after training or a second model had none left, and ran in Python.
_GRAPHS = 64

# Outputs that "selective" keeps: products with weights, and attention as one operator. Batched products are left out:
# inside an attention that is written out, their output is the scores, larger than all else together.
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
    """Let each unit recompute its activations, compile it and cast its parameters, in place. A unit that has it already
    is left as it is.

    Args:
        recompute: see ``Policy``.
        compile: False, True (torch's default backend) or the name of a backend.
        cast_to: the dtype in which a unit sees its parameters and inputs; None: they are as they are.
    """
    selective = recompute == "selective"
    cast: Callable[..., Forward] = _none if cast_to is None else functools.partial(casting, dtype=cast_to)
    for unit in units:
        own = unit.__dict__.get("forward")  # somebody's patch of this one module
        if hasattr(own, _MARK):
            continue
        # A unit is compiled as its class's function, so that units of one class share what was compiled.
        forward: Forward = _ignoring_self(own) if own is not None else type(unit).forward
        if selective:
            _recompute_recurrent_layers(unit)
        if compile and selective:
            # The compiler must see it and carries it out itself, with the casts as inputs of the graph: the modes that
            # watch operators would turn compilation off.
            forward = cast(_compiled(_selective(_noticing_python(forward)), compile))
        else:
            # Any unit that is compiled can be computed again; for that it needs its casts again.
            if compile:
                forward = _compiled(forward, compile)
            wrap = _none if compile and recompute == "cheap" else _WRAPPERS[recompute]  # the compiler decides on that
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
    """Warn where torch.compile leaves the whole of a unit to Python, as it does if some part of what is recomputed
    cannot be in its graph."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _warn_of_python(type(self).__name__)
        return forward(self, *args, **kwargs)

    return call


@functools.cache
def _warn_of_python(unit: str) -> None:
    runtime.warn(
        f"compile with recompute='selective': torch.compile leaves {unit} to Python in training, as a part of it "
        "cannot be in its graph (layers split by tensor parallelism; attention of packed rows with a bias, segments or "
        "a soft cap on a GPU, in 16 bits on a CPU, or by several ranks that share the tokens). Give recompute='full', "
        "which compiles the rest, or leave out compile",
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


# These change their products in place through parts that share no count of changes with them, so that torch does not
# notice that what it has kept is no more what it was.
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_recurrent_layers_running = 0


def _recompute_recurrent_layers(unit: nn.Module) -> None:
    """Let "selective" keep nothing that the recurrent layers of a unit compute."""
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
    """Where an operator's arguments have its probability of dropout, if they do."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _keep(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if _recurrent_layers_running or not _kept(operator):
        return CheckpointPolicy.PREFER_RECOMPUTE
    # Where an operator that draws were left out, all that is drawn after it in the unit would be drawn otherwise.
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
    # Parameters, and views of them, are in memory anyhow, or gathered again for backward.
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
    # On the stream that made the copy, so the one is there before the other.
    return copy.to(device, non_blocking=True) if device.type == "cuda" else copy


def _cheap(forward: Forward) -> Forward:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with remade.remaking():
            return forward(self, *args, **kwargs)

    return call


_WRAPPERS = {"none": _none, "cheap": _cheap, "full": _full, "selective": _selective, "offload": _offload}

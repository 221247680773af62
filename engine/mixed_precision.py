"""16-bit forward of a model that stays plain: while its modules run, they see casts of their fp32 parameters.

In one process there is nothing to gather or to reduce, so all that is left of FSDP's mixed precision is its casts. FSDP
copies parameters one at a time, in forward and in backward, which took the host longer than the rest of a step. Here
one operator casts all parameters of a unit, and one casts their gradients in backward. The numbers are FSDP's.

Outside of forward, ``_parameters`` holds the fp32 parameters. But if forward used ``torch.utils.checkpoint``, backward
runs modules again. So the casts are shown once more from the moment that backward reaches a unit's outputs, or has
recomputed the unit. Casts that were not kept until then are made anew when a module first reads one of them.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from engine.notes import CASTS, SHOWN
from engine.ops import fused, library, remade
from engine.ops.autograd import Function
from engine.outputs import trained_tensors
from engine.torch_compat import in_backward, run_after_backward, unflattened

Forward = Callable[..., Any]
_ALIGNED = 64  # elements: parts of a tensor begin where separate tensors could begin
_device, _dtype = operator.attrgetter("device"), operator.attrgetter("dtype")


class _ShownWhenRead(dict[str, Any]):
    """Stands in for a module's ``_parameters`` in a backward, and shows the casts once a parameter is read."""

    def __init__(self, parameters: dict[str, Any], show: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.parameters, self._show = parameters, show

    def __getitem__(self, name: str) -> Any:
        self._show()
        return self.parameters[name]


class _Casts:
    """The parameters that one call of a unit uses, their places in the modules, and their casts."""

    def __init__(self, unit: nn.Module, dtype: torch.dtype) -> None:
        self.unit, self.dtype = unit, dtype
        self.places = _own_parameters(unit, dtype)
        self._casts: Sequence[torch.Tensor] | None = None

    def show(self) -> None:
        if not self.places:
            return
        if self._casts is None:
            self._casts = _casts([p for _, _, p in self.places], self.dtype)
        for (module, name, _), cast in zip(self.places, self._casts, strict=True):
            module["_parameters"][name] = cast

    def hide(self) -> None:
        for module, name, parameter in self.places:
            if isinstance(parameters := module["_parameters"], _ShownWhenRead):
                module["_parameters"] = parameters = parameters.parameters
            parameters[name] = parameter

    def forget(self) -> None:
        """Release the casts; those that autograd does not keep are freed."""
        self._casts = None

    def show_in_backward(self, output: Any) -> None:
        """Show the casts again in a backward that reaches a tensor in ``output``."""
        for tensor in trained_tensors(output, in_objects=True):
            if tensor.grad_fn is not None:  # otherwise it is a parameter of some model
                tensor.register_hook(self._reached)

    def show_again(self) -> None:
        """Show the casts until the current backward ends; those that were not kept, once one is read."""
        if self._casts is not None:
            self.show()
        else:
            modules = {id(module): module for module, _, _ in self.places}
            for module in modules.values():
                module["_parameters"] = _ShownWhenRead(module["_parameters"], self._show_read)
        SHOWN.set(self.unit, self)

    def _show_read(self) -> None:
        self.hide()
        with torch.enable_grad():  # as in the forward that is computed again
            self.show()

    def _reached(self, _: torch.Tensor) -> None:
        hide_casts_of(self.unit)
        self.show_again()
        run_after_backward(self.end)

    def stay_shown(self) -> None:
        """After a backward has recomputed the unit, show the casts until it recomputes another unit or ends: parts of
        the unit that use ``torch.utils.checkpoint`` themselves are still to be recomputed."""
        global _last_recomputed
        self.show_again()
        _last_recomputed = weakref.ref(self)
        run_after_backward(self.end)

    def end(self) -> None:
        hide_casts_of(self.unit)
        self.forget()  # a loss that is kept would keep them alive


_last_recomputed: weakref.ref[_Casts] | None = None  # those of the unit that a backward has recomputed last


def _end_last_recomputed(unit: nn.Module) -> None:
    """Before ``unit`` is recomputed: hide the casts that the last recomputed unit still shows, unless it contains
    ``unit``."""
    last = _last_recomputed and _last_recomputed()
    if last and (last.unit is unit or all(module is not unit for module in last.unit.modules())):
        last.end()


def hide_casts_of(unit: nn.Module) -> None:
    """Put the parameters of ``unit`` back if a backward, perhaps one that raised, still shows casts in their places."""
    if (casts := SHOWN.get(unit)) is not None:
        casts.hide()
        SHOWN.set(unit, None)


def casting(forward: Forward, dtype: torch.dtype, recomputed: bool = False) -> Forward:
    """Wrap the ``forward`` of a unit so that its own parameters and its floating-point inputs are in ``dtype``.

    A unit's own parameters are those below it that are not in another unit (``CASTS``). Parameters without dimensions
    are not cast, as in a sharded model.

    Args:
        recomputed: the wrapped call is repeated in backward, and makes its casts anew there.
    """

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_cast_input(value, dtype) for value in args)
        if kwargs:
            kwargs = {name: _cast_input(value, dtype) for name, value in kwargs.items()}
        shown = SHOWN.get(self)
        hide_casts_of(self)
        again = recomputed and in_backward()
        if again:
            _end_last_recomputed(self)
        casts = _Casts(self, dtype)
        casts.show()
        try:
            output = forward(self, *args, **kwargs)
        finally:
            casts.hide()
            if again:
                casts.stay_shown()
            elif shown is not None and in_backward():  # a recomputation; outside of one, an earlier backward raised
                shown.show_again()
        if casts.places and not recomputed and torch.is_grad_enabled():
            if remade.in_force():
                casts.forget()
            casts.show_in_backward(output)
        return output

    return call


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a cast of a parameter, which stays in memory anyway."""
    return getattr(tensor.grad_fn, "_forward_cls", None) is _Cast


def _cast_input(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, list | tuple | dict):
        return tree_map(lambda leaf: _cast_input(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf, value)
    return value


def _own_parameters(unit: nn.Module, dtype: torch.dtype) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
    """The parameters that the unit casts: for each the ``__dict__`` of its module, its name there, and itself.

    They are looked up in each forward: modules may come and go.
    """
    found, left, noted = [], [unit], CASTS.name
    while left:  # visits every module in every step, so it reads attributes without calls
        module = left.pop().__dict__
        parameters, modules = module["_parameters"], module["_modules"]
        for name, p in parameters.items():
            if p is not None and (kind := p.dtype) is not dtype and kind.is_floating_point and p.ndim:
                found.append((module, name, p))
        for child in modules.values():
            if child is not None and not child.__dict__.get(noted):
                left.append(child)
    return found


def _casts(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """A cast of each parameter; a parameter that occurs twice has one cast."""
    once = list({id(p): p for p in parameters}.values())
    trained: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    odd: list[nn.Parameter] = []  # subclasses cast themselves
    grads = torch.is_grad_enabled()
    for p in once:
        plain = type(p) in library.PLAIN and p.is_contiguous()
        (odd if not plain else trained if grads and p.requires_grad else others).append(p)
    found: list[torch.Tensor] = [*_Cast.apply(dtype, *trained)] if trained else []
    if others:
        with torch.no_grad():
            found += _cast_list(others, dtype)
    found += [p.to(dtype) for p in odd]
    in_order = [*trained, *others, *odd]
    if remade.in_force():
        for p, cast in zip(in_order, found, strict=True):
            if cast.ndim > 1:  # casting a matrix again is worth a kernel launch in backward
                remade.note(cast, lambda p: p.to(dtype), p)
    if len(trained) == len(parameters):  # the usual case: the order has not changed
        return found
    shown = dict(zip(map(id, in_order), found, strict=True))
    return [shown[id(p)] for p in parameters]


class _Cast(Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that the unit did not use gets no gradient
        ctx.dtypes = [p.dtype for p in parameters]
        return tuple(_cast_list(parameters, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dtypes: list[torch.dtype] = ctx.dtypes
        given = [g for g in grads if g is not None]
        plain = set(map(type, given)) == {torch.Tensor} and len(set(dtypes)) == 1
        if plain and not torch.is_grad_enabled():  # gradients are enabled with create_graph, for second derivatives
            wide = iter(_cast_list([g.contiguous() for g in given], dtypes[0], in_one=True))
            return None, *[None if g is None else next(wide) for g in grads]
        return None, *(None if g is None else g.to(d) for g, d in zip(grads, dtypes, strict=True))


def _cast_list(tensors: Sequence[torch.Tensor], dtype: torch.dtype, in_one: bool = False) -> Sequence[torch.Tensor]:
    """Copies of plain contiguous tensors in ``dtype``; with ``in_one``, they may be parts of one tensor."""
    (device, *more), (given, *others) = set(map(_device, tensors)), set(map(_dtype, tensors))
    if more or others or given not in library.FLOATS or not library.serves(device):
        return [t.to(dtype) for t in tensors]
    out = _parts_of_one(tensors, dtype) if in_one else None
    if out is None:
        out = [torch.empty_like(t, dtype=dtype) for t in tensors]
    fused.cast_scale_copy_(out, tensors)
    return out


def _parts_of_one(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor] | None:
    """Empty tensors of these shapes as parts of one, because allocating a tensor takes the host most of a cast's time;
    None if some part would not be aligned."""
    sizes = list(map(torch.Tensor.numel, tensors))
    if any(size % _ALIGNED for size in sizes):
        return None
    return unflattened(tensors[0].new_empty(sum(sizes), dtype=dtype), tensors)

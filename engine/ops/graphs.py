"""The operators that torch.compile puts into its graphs as they are, without tracing into them.

Numbers that change from step to step or from layer to layer, such as the key of dropout masks, are tensors () int64 on
the host: an int would be a constant of the graph, and each value would need a graph of its own. `dropout_masks`,
`norm`, `attention` and `activation` call these operators while they are being compiled. Each operator is an autograd
function, whose forward and backward are parts; the graph holds the parts. (`torch.library.custom_op` would wrap both in
one operator, whose call takes 50 us more of Python.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.ops import activation, attention, dropout_masks, norm

_LIBRARY = torch.library.Library("modelcenter_graph", "DEF")
_DRAWN = "Tensor? tokens, Tensor key, Tensor site, SymInt threshold"  # by norms


def _define(schema: str) -> str:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return schema.partition("(")[0]


def _operator(schema: str, apply: Callable[..., Any]) -> None:
    """Define an autograd function as an operator."""
    name = _define(schema)
    for key in ("Autograd", "CompositeExplicitAutograd"):
        _LIBRARY.impl(name, apply, key)


def _part(schema: str, run: Callable[..., Any], like: Callable[..., Any], key: int | None = None) -> None:
    """Define the forward or the backward of an autograd function as an operator, on any device.

    like: the fake implementation, which returns tensors of the same shapes without data. key: the index of the key
    among the arguments, directly followed by the site; None: the function draws nothing.
    """

    def call(*arguments: Any) -> Any:
        if key is None:
            return run(*arguments)
        return run(*arguments[:key], int(arguments[key]), int(arguments[key + 1]), *arguments[key + 2 :])

    name = _define(schema)
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"modelcenter_graph::{name}", like, lib=_LIBRARY)


def _like(x: Tensor, there: object = True) -> Tensor:
    """An uninitialised tensor like x, or without elements unless it is `there`."""
    return x.new_empty(x.shape if there else 0)


# -- dropout -----------------------------------------------------------------------------------------------------------

_DROPOUT = "Tensor x, Tensor? residual, Tensor? tokens, SymInt threshold, Tensor key, Tensor site, SymInt first_channel"
_operator(f"dropout({_DROPOUT}) -> Tensor", dropout_masks.Dropout.apply)
_part(f"dropout_part({_DROPOUT}) -> Tensor", dropout_masks.run, lambda x, *_: _like(x), key=4)

# -- norms -------------------------------------------------------------------------------------------------------------


def _add_and_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, branch: Tensor | None, *drawn: Any
) -> tuple[Tensor, Tensor]:
    *draw, form = drawn
    found: tuple[Tensor, Tensor] = norm.Norm.apply(x, weight, bias, branch, eps, tuple(draw), form)
    return found


def _norm_like(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, branch: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty((1 if bias is None else 2) * (x.numel() // weight.numel()), dtype=torch.float32)
    return _like(x, branch is not None), _like(x), stats


def _norm_backward_like(
    grad: Tensor, extra: Tensor | None, extra_of_sum: bool, total: Tensor, weight: Tensor, stats: Tensor,
    centered: bool, sums: bool, tokens: Tensor | None, key: Tensor, site: Tensor, threshold: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _like(total), _like(total, threshold), _like(weight, sums), _like(weight, sums and centered)


_NORM = f"Tensor x, Tensor weight, Tensor? bias, float eps, Tensor? branch, {_DRAWN}"
_operator(f"add_and_norm({_NORM}, str form) -> (Tensor, Tensor)", _add_and_norm)
_part(f"norm_part({_NORM}) -> (Tensor, Tensor, Tensor)", norm.run, _norm_like, key=6)
_part(
    "norm_backward_part(Tensor grad, Tensor? extra, bool extra_of_sum, Tensor total, Tensor weight, Tensor stats, "
    f"bool centered, bool sums, {_DRAWN}) -> (Tensor, Tensor, Tensor, Tensor)",
    norm.run_backward,
    _norm_backward_like,
    key=9,
)

# -- attention ---------------------------------------------------------------------------------------------------------


def _attention_like(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    heads = others[6]
    return _like(q), q.new_empty(q.shape[0], heads, 2)


def _attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *grads, dbias = attention.run_backward(*arguments)
    return *grads, grads[0].new_empty(0) if dbias is None else dbias


def _attention_backward_like(
    grad: Tensor, need_bias: bool, out: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    q, k, v, _, _, bias = arguments[:6]
    return _like(q), _like(k), _like(v), _like(q if bias is None else bias, need_bias)


_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_queries, Tensor cu_keys, Tensor? bias, Tensor? tokens, SymInt heads, "
    "SymInt kv_heads, float scale, bool causal, SymInt window, float cap, bool may_round, Tensor key, Tensor site, "
    "SymInt first_head, SymInt threshold"
)
_operator(f"attention({_ATTENTION}) -> Tensor", attention.Attention.apply)
_part(f"attention_part({_ATTENTION}) -> (Tensor, Tensor)", attention.run, _attention_like, key=14)
_part(
    f"attention_backward_part(Tensor grad, bool need_bias, Tensor out, Tensor sums, {_ATTENTION})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_like,
    key=18,
)

# -- activations -------------------------------------------------------------------------------------------------------


def _activation_backward_like(grad: Tensor, x: Tensor, up: Tensor | None, kind: int) -> tuple[Tensor, ...]:
    return _like(x), _like(x, up is not None), _like(x, False)


_ACTIVATION = "Tensor x, Tensor? up, int kind"
_operator(f"activation({_ACTIVATION}) -> Tensor", lambda *arguments: activation.Activated.apply(*arguments, True))
_part(f"activation_part({_ACTIVATION}) -> Tensor", activation.run, lambda x, *_: _like(x))
_part(
    f"activation_backward_part(Tensor grad, {_ACTIVATION}) -> (Tensor, Tensor, Tensor)",
    activation.run_backward,
    _activation_backward_like,
)

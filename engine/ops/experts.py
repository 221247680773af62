"""A mixture of experts: each token passes through a few of many feed-forward networks (Shazeer et al. 2017,
arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088).

Tokens are copied once for each of their experts, in the order of the experts, so that every network sees a contiguous
range of rows and every gradient is written once; the results are added in the order of the tokens. No sum depends on
the number of threads, and none uses atomic additions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.ops.activation import Activation, gated
from engine.ops.autograd import Function, once_differentiable
from engine.ops.compilation import eager
from engine.ops.grouped import grouped_linears


class Routing(NamedTuple):
    """Which experts each of T tokens passes through.

    Attributes:
        weights: (T, k) fp32, the factors of the experts' results. experts: (T, k) int64, their numbers.
    """

    weights: Tensor
    experts: Tensor


def route(logits: Tensor, k: int, normalized: bool) -> Routing:
    """The k most probable experts of each token, and their probabilities, computed in fp32.

    Args:
        logits: (T, number of experts). normalized: whether the k probabilities are divided by their sum.
    """
    weights, experts = logits.float().softmax(-1).topk(k)
    return Routing(weights / weights.sum(-1, keepdim=True) if normalized else weights, experts)


def _by_token(x: Tensor, places: Tensor, k: int) -> Tensor:
    """x (T k, H), sorted by expert -> (T, k, H)."""
    return x.index_select(0, places).view(x.shape[0] // k, k, x.shape[1])


class _Dispatch(Function):
    """x (T, H) -> (T k, H): a copy of each token for each of its experts, sorted by expert.

    order: (T k,) the place t k + j in the tokens' order of each copy. places: its inverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return _by_token(grad, places, ctx.k).sum(1), None, None, None


class _Combine(Function):
    """y (T k, H), sorted by expert, and weights (T, k) -> (T, H): the weighted sum of each token's results."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        weights = weights.to(y.dtype)
        ctx.save_for_backward(y, weights, order, places)
        by_token = _by_token(y, places, weights.shape[1])
        return torch.bmm(weights.unsqueeze(1), by_token).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, order, places = ctx.saved_tensors
        need_y, need_weights, *_ = ctx.needs_input_grad
        dy = dweights = None
        if need_y:
            dy = grad.index_select(0, order // weights.shape[1]).mul_(weights.view(-1, 1).index_select(0, order))
        if need_weights:
            by_token = _by_token(y, places, weights.shape[1])
            dweights = torch.bmm(by_token, grad.unsqueeze(2)).squeeze(2).float()
        return dy, dweights, None, None


@eager
def experts(
    x: Tensor, routing: Routing, gate: Tensor | None, up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """The sum of weight * (down @ (activation(gate @ x) * (up @ x))) over the experts of each token.

    Args:
        x: (T, H). gate, up: (experts, I, H); without gate, up's product is activated. down: (experts, H, I).

    Returns:
        (T, H).
    """
    k = routing.experts.shape[1]
    numbers, order = routing.experts.flatten().sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    every = torch.arange(up.shape[0], device=x.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    copies = _Dispatch.apply(x, order, places, k)
    if gate is None:
        (product,) = grouped_linears(copies, ends, up)
        inner = activation(product)
    else:
        inner = gated(activation, *grouped_linears(copies, ends, gate, up))
    (y,) = grouped_linears(inner, ends, down)
    found: Tensor = _Combine.apply(y, routing.weights, order, places)
    return found


class Experts(nn.Module):
    """The networks of a mixture, without the layer that chooses among them.

    Attributes:
        gate, up: (experts, intermediate_size, hidden_size); gate may be None. down: (experts, hidden_size,
            intermediate_size).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        activation: Activation,
        normalized: bool,
        gated: bool = True,
    ):
        """normalized: see `route`."""
        super().__init__()
        self.experts_per_token, self.activation, self.normalized = experts_per_token, activation, normalized
        shape = (num_experts, intermediate_size, hidden_size)
        self.gate = _matrices(*shape) if gated else None
        self.up, self.down = _matrices(*shape), _matrices(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """x (T, hidden_size), logits (T, experts) -> (T, hidden_size)."""
        return self.mix(x, logits, self.gate, self.up, self.down)

    def mix(self, x: Tensor, logits: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
        """`forward` with these matrices."""
        routing = route(logits, self.experts_per_token, self.normalized)
        return experts(x, routing, gate, up, down, self.activation)


def _matrices(*shape: int) -> nn.Parameter:
    """Random matrices."""
    return nn.Parameter(torch.empty(shape).normal_(std=0.02))

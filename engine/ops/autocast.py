"""The casts of torch.autocast, for operators that it does not know."""

from typing import Any

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product with x: that of the enclosing autocast, else x's."""
    return torch.get_autocast_dtype(x.device.type) if _is_cast(x) else x.dtype


def as_factors(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """x and others, cast as the enclosing autocast casts the factors of a product.

    For autograd functions that compute products in backward too, where autocast is off, or compute gradients in
    forward, which need the dtype of the factors.
    """
    if not _is_cast(x):
        return (x, *others)
    return tuple(None if y is None else y.to(product_dtype(x)) for y in (x, *others))


def _is_cast(x: Tensor) -> bool:
    device = x.device.type
    return device != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(device)

"""Operators behind one name, whatever this machine offers: the fast one where there is one, else its torch reference.

Matrix products are in `engine.ops.gemm`.

Dropout (`engine.ops.dropout_masks`): torch's `bernoulli_` draws one number at a time on one thread, slower than the
matrix product beside it. Here 16 bits of a counter-based generator decide an element.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

_EAGER: dict[str, Callable[..., Any]] = {}


def eager(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """`function`, left out of compiled graphs: for one that takes the key of a step or plans in Python."""
    key = name or f"{function.__module__}.{function.__qualname__}"
    _EAGER[key] = function

    def call(*args: Any, **kwargs: Any) -> Any:
        return _EAGER[key](*args, **kwargs)

    return functools.update_wrapper(call, function)


@functools.cache
def leave_to_eager() -> None:
    """Tell torch.compile about the functions marked `eager`; not at import, as it loads the compiler."""
    for key, function in _EAGER.items():
        _EAGER[key] = torch.compiler.disable(function)


from engine.ops.activation import gelu_tanh  # noqa: E402
from engine.ops.cross_entropy import cross_entropy_  # noqa: E402
from engine.ops.dropout_masks import Draws, draws_of, dropout, dropout_add, dropout_key, dropout_rows, fresh_key  # noqa: E402
from engine.ops.embeddings import Embedding, embedding  # noqa: E402
from engine.ops.gemm import linear, matmul, matmul_nt, onednn_linear  # noqa: E402
from engine.ops.norm import rms_norm  # noqa: E402

__all__ = [
    "Draws", "Embedding", "cross_entropy_", "draws_of", "dropout", "dropout_add", "dropout_key", "dropout_rows",
    "eager", "embedding", "fresh_key", "gelu_tanh", "leave_to_eager", "linear", "matmul", "matmul_nt", "onednn_linear",
    "rms_norm",
]  # fmt: skip

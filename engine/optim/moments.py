"""The initial moments of a parameter."""

import torch

from engine.ops import zero_pages
from engine.tensors import as_shard, is_shard, local_tensor


def zero_moment(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros placed as the parameter is. On a CPU, if the first gradient reaches at most half of the rows of a table, as
    with text and a large vocabulary, rows that no gradient ever reaches take no memory."""
    gradient = parameter.grad
    if gradient is None or not parameter.is_contiguous() or not zero_pages.mostly_zero_rows(local_tensor(gradient)):
        return torch.zeros_like(parameter, dtype=dtype)
    moment = zero_pages.zeros(local_tensor(parameter).shape, dtype)
    if is_shard(parameter):
        return as_shard(moment, parameter.shape, parameter.device_mesh, parameter.placements)
    return moment

"""The random bits of dropout: Philox4x32-10 (csrc/core/random.h) with (channel, site, token) as its counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MASK32 = (1 << 32) - 1
BLOCK, _LANES = 128, 16  # channels that 16 counters decide


def scale_of(threshold: int) -> Tensor:
    """The factor of kept elements: 0-d fp32 on the host, divided in fp32 as in csrc."""
    return torch.tensor(65536.0) / torch.tensor(float(65536 - threshold))


def random_bits(tokens: Tensor, first_channel: int, channels: int, key: int, site: int) -> Tensor:
    """(tokens, channels) int64, 16 random bits each."""
    blocks = range(first_channel // BLOCK, (first_channel + channels - 1) // BLOCK + 1)
    a = torch.arange(blocks.start * _LANES, blocks.stop * _LANES, device=tokens.device)[None]
    b: Any = site & _MASK32
    c, d = (tokens & _MASK32)[:, None], (tokens >> 32 & _MASK32)[:, None]
    low, high = key & _MASK32, key >> 32 & _MASK32
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57  # the lower 64 bits, with int64's sign
        a, b = (y >> 32 & _MASK32) ^ b ^ low, y & _MASK32
        c, d = (x >> 32 & _MASK32) ^ d ^ high, x & _MASK32
        low, high = low + 0x9E3779B9 & _MASK32, high + 0xBB67AE85 & _MASK32
    halves = [half for word in torch.broadcast_tensors(a, b, c, d) for half in (word & 0xFFFF, word >> 16)]
    every = torch.stack([half.unflatten(1, (len(blocks), _LANES)) for half in halves], 2).flatten(1)
    begin = first_channel - blocks.start * BLOCK
    return every[:, begin : begin + channels]

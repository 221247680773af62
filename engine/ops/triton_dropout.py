"""The dropout of ``dropout_masks`` in Triton, for GPUs without compiled operators: PyTorch for GPUs comes with Triton,
while nvcc is rarely installed. It gives the same bits as the compiled operator and the reference.

A program handles a block of rows and 128 channels, whose bits come from 16 counters, 8 channels each.
"""

# mypy: disable-error-code="import-not-found, import-untyped, name-defined"
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from engine.ops.philox import BLOCK, scale_of

_ROWS = 16


@functools.cache
def _kernel() -> Any:
    """The kernel. Raises ImportError: Triton is not installed."""
    global triton, tl  # where Triton looks up the names that a kernel uses
    import triton
    import triton.language as tl

    # Numbers that change from call to call must not compile a kernel each.
    @triton.jit(do_not_specialize=["rows", "first_channel", "key", "site", "threshold"])
    def _dropout(
        out, x, residual, tokens, rows, channels, first_channel, key, site, threshold, scale,
        ADDS: tl.constexpr, NUMBERED: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        there = row < rows
        token = row
        if NUMBERED:
            token = tl.load(tokens + row, mask=there, other=0)
        block = first_channel // 128 + tl.program_id(1)
        lane = tl.arange(0, 16)
        zero = tl.zeros((ROWS, 16), tl.uint32)
        # Rounds and keys of Philox4x32-10 as in csrc/core/random.h.
        words = tl.philox(
            key,
            zero + (block * 16 + lane).to(tl.uint32)[None, :],
            tl.full((ROWS, 16), site, tl.uint32),
            zero + token.to(tl.uint32)[:, None],  # its lower 32 bits
            zero + (token >> 32).to(tl.uint32)[:, None],
        )
        for half in tl.static_range(8):
            bits = words[half // 2] >> (16 * (half % 2)) & 0xFFFF
            channel = block * 128 + half * 16 + lane - first_channel
            seen = there[:, None] & ((channel >= 0) & (channel < channels))[None, :]
            place = row[:, None] * channels + channel[None, :]
            y = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) * scale
            y = tl.where(bits >= threshold, y, 0.0)
            if ADDS:
                y = tl.load(residual + place, mask=seen, other=0.0).to(tl.float32) + y
            tl.store(out + place, y.to(out.dtype.element_ty), mask=seen)

    return _dropout


def drop_(
    out: Tensor, x: Tensor, residual: Tensor | None, tokens: Tensor | None, first_channel: int, key: int, site: int,
    threshold: int,
) -> None:  # fmt: skip
    """The same as ``torch.ops.modelcenter.dropout_``, on the current stream of the tensors' device.

    Args:
        out, x, residual: (rows, channels), contiguous; fp32, bf16 or fp16.
        tokens: (rows,) int64, contiguous; None: 0, 1, 2, ...
    """
    rows, channels = x.shape
    if not x.numel():  # a grid cannot be empty
        return
    blocks = (first_channel + channels - 1) // BLOCK + 1 - first_channel // BLOCK
    scale = float(scale_of(threshold))
    _kernel()[(-(-rows // _ROWS), blocks)](
        out, x, residual, tokens, rows, channels, first_channel, key, site, threshold, scale,
        ADDS=residual is not None, NUMBERED=tokens is not None, ROWS=_ROWS,
        enable_fp_fusion=False,  # round product and sum separately
    )  # fmt: skip

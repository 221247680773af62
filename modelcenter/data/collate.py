"""Rows to the packed batch that models take: no padding at all."""

from __future__ import annotations

import numpy as np
import torch

from modelcenter.data.tokenize import Tokens


def pack(tokens: Tokens, rows: np.ndarray, labels: np.ndarray | None = None) -> dict[str, torch.Tensor | int]:
    """Lay rows end to end.

    Returns input_ids (1, T) int64, token_type_ids (1, T) int64 where the data has them, cu_seqlens (n+1,) int32,
    max_seqlen (int: known here, so that no device is asked for it), labels = labels[rows] if given.
    """
    starts, ends = tokens.offsets[rows], tokens.offsets[rows + 1]
    bounds = np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int32)
    batch: dict[str, torch.Tensor | int] = {
        "input_ids": _lay(tokens.ids, starts, ends),
        "cu_seqlens": torch.from_numpy(bounds),
        "max_seqlen": int((ends - starts).max(initial=0)),
    }
    if tokens.type_ids is not None:
        batch["token_type_ids"] = _lay(tokens.type_ids, starts, ends)
    if labels is not None:
        batch["labels"] = torch.from_numpy(labels[rows])
    return batch


def _lay(flat: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
    pieces = [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return (
        torch.from_numpy(np.concatenate(pieces).astype(np.int64))[None]
        if pieces
        else torch.zeros((1, 0), dtype=torch.int64)
    )

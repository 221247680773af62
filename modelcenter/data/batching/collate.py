"""From rows to the packed batches of models, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from modelcenter.data.tokenization.tokenize import Tokens


def pack(tokens: Tokens, rows: np.ndarray, labels: np.ndarray | None = None) -> dict[str, torch.Tensor | int]:
    """Concatenate rows.

    Returns input_ids (1, T) int64, token_type_ids (1, T) int64 if the data have them, cu_seqlens (n+1,) int32,
    max_seqlen (int, computed on the host so that no device is read), labels = labels[rows] if given.
    """
    starts, ends = tokens.offsets[rows], tokens.offsets[rows + 1]
    bounds = np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int32)
    batch: dict[str, torch.Tensor | int] = {
        "input_ids": _lay_out(tokens.ids, starts, ends),
        "cu_seqlens": torch.from_numpy(bounds),
        "max_seqlen": int((ends - starts).max(initial=0)),
    }
    if tokens.type_ids is not None:
        batch["token_type_ids"] = _lay_out(tokens.type_ids, starts, ends)
    if labels is not None:
        batch["labels"] = torch.from_numpy(labels[rows])
    return batch


def pack_pairs(
    sources: Tokens, targets: Tokens, rows: np.ndarray, target_rows: np.ndarray | None = None
) -> dict[str, torch.Tensor | int]:
    """Concatenate both sides of rows, for an encoder-decoder. target_rows: those of the targets, if they differ.

    Returns input_ids (1, S), cu_seqlens and max_seqlen of the sources, labels (1, T), decoder_cu_seqlens and
    decoder_max_seqlen of the targets. The model derives the decoder's inputs: the labels of each row, shifted right by
    one.
    """
    source, target = pack(sources, rows), pack(targets, rows if target_rows is None else target_rows)
    source.pop("token_type_ids", None)  # encoder-decoders take none
    sides = {f"decoder_{name}": target[name] for name in ("cu_seqlens", "max_seqlen")}
    return {**source, **sides, "labels": target["input_ids"]}


def _lay_out(flat: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
    pieces = [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return (
        torch.from_numpy(np.concatenate(pieces).astype(np.int64))[None]
        if pieces
        else torch.zeros((1, 0), dtype=torch.int64)
    )


def pack_documents(rows: Sequence[Sequence[np.ndarray]]) -> dict[str, torch.Tensor | int]:
    """Concatenate rows for a causal language model, each with one or more pieces of documents.

    Returns input_ids (1, T) int64, cu_seqlens (pieces+1,) int32, max_seqlen, labels (1, T): the ids, which the model
    shifts. Each piece is a separate sequence, so attention, positions and the shift restart there.
    """
    pieces = [piece for row in rows for piece in row]
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    flat = np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)
    ids = torch.from_numpy(flat)[None]
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    longest = int(lengths.max(initial=0))
    return {"input_ids": ids, "cu_seqlens": torch.from_numpy(bounds), "max_seqlen": longest, "labels": ids.clone()}


def merge(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge packed batches into one, with their rows in order.

    Tensors of tokens (1, T) are concatenated along the tokens, others along the rows; `cu_seqlens` (of either side)
    continue each other, and the largest `max_seqlen` is kept. `num_choices`, a number for all rows or a tensor with one
    for each, stays a number if it is the same in all. A batch without rows adds nothing.

    Raises:
        ValueError: the batches have different entries.
    """
    if len(batches) == 1:
        return batches[0]
    names = list(batches[0])
    for batch in batches:
        if set(batch) != set(names):
            differing = ", ".join(sorted(set(batch) ^ set(names)))
            raise ValueError(f"batches of different data cannot be joined: not all have {differing}")
    merged: dict[str, Any] = {}
    for name in names:
        values = [batch[name] for batch in batches]
        if name.endswith("cu_seqlens"):
            before = np.concatenate(([0], np.cumsum([int(v[-1]) for v in values[:-1]])))
            parts = [v[1:] + int(shift) for v, shift in zip(values, before, strict=True)]
            merged[name] = torch.cat([values[0][:1], *parts]).to(values[0].dtype)
        elif name.endswith("max_seqlen"):
            merged[name] = max(values)
        elif name == "num_choices":
            merged[name] = _merge_num_choices(batches)
        else:
            merged[name] = torch.cat(values, dim=1 if all(map(_is_per_token, values, batches)) else 0)
    return merged


def _merge_num_choices(batches: Sequence[dict[str, Any]]) -> int | torch.Tensor:
    """num_choices of merged batches."""
    choices = [(batch["num_choices"], len(batch["cu_seqlens"]) - 1) for batch in batches]
    numbers = {number for number, _ in choices if isinstance(number, int)}
    if len(numbers) == 1 and all(isinstance(number, int) for number, _ in choices):
        return numbers.pop()
    return torch.cat([torch.full((n // c,), c) if isinstance(c, int) else c for c, n in choices])


def _is_per_token(value: torch.Tensor, batch: dict[str, Any]) -> bool:
    totals = {int(batch[name][-1]) for name in batch if name.endswith("cu_seqlens")}
    if value.is_floating_point():  # several labels or numbers per row; their number may equal that of tokens
        return False
    return value.dim() == 2 and value.shape[0] == 1 and value.shape[1] in totals


def pack_tokens(flat: np.ndarray, tokens: Tokens, rows: np.ndarray) -> torch.Tensor:
    """(1, T) int64: values of the rows' tokens, concatenated as the tokens in `pack`. flat: one value per token."""
    return _lay_out(flat, tokens.offsets[rows], tokens.offsets[rows + 1])

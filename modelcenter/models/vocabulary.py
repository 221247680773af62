"""Resizing the vocabulary: the embedding table, the head's own matrix and bias if it has them, and the config."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.layers.heads import VocabularyHead

SPREAD = 1e-9  # variance of new rows / variance of old rows; transformers' default


def resize(model: Any, size: int | None, multiple: int | None, seed: int) -> nn.Embedding:
    """See Model.resize_token_embeddings."""
    old = model.config.vocab_size
    size = _new_size(old, size, multiple)
    if getattr(model, "pipeline", None) is not None or any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ValueError(
            "resize_token_embeddings: this model is sharded, its rows lie on several ranks; load it with policy=False, "
            "resize it, and then call engine.shard(model)"
        )
    if size == old:
        return model.embed
    config = model.config.replace(vocab_size=size)  # raises before anything has changed
    for name, table in model.word_tables().items():
        _resize_rows(table.weight, f"{name}.weight", old, size, seed)
        table.num_embeddings = table.weight.shape[0]
    for prefix, module in model.named_modules():
        if isinstance(module, VocabularyHead):
            for name in ("weight", "bias"):
                if (rows := getattr(module, name)) is not None:
                    _resize_rows(rows, f"{prefix}.{name}", old, size, seed)
    model.config = config
    return model.embed


def _new_size(old: int, size: int | None, multiple: int | None) -> int:
    size = old if size is None else size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"resize_token_embeddings: got {size!r} tokens, expected a whole number of at least 1")
    if multiple is None:
        return size
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ValueError(f"pad_to_multiple_of: got {multiple!r}, expected a whole number of at least 1")
    return -(-size // multiple) * multiple


@torch.no_grad()
def _resize_rows(rows: Tensor, name: str, old: int, size: int, seed: int) -> None:
    """Change the number of token rows from `old` to `size`, in place; rows after them (CPM-Ant's prompts) stay last.

    The parameter stays the same object, so that an optimizer without a state for it yet remains valid.
    """
    words, after = rows[:old], rows[old:]
    if size > old:
        digest = hashlib.sha256(f"resize/{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        values = words.float()
        noise = torch.randn((size - old, *rows.shape[1:]), generator=generator).to(rows.device)
        spread = SPREAD**0.5 * values.std(0, unbiased=False)
        words = torch.cat([words, (values.mean(0) + spread * noise).to(rows.dtype)])
    rows.grad = None
    rows.data = torch.cat([words[:size], after])

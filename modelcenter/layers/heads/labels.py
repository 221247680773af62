"""Counting and checking the labels of a batch, and moving them to the tokens that predict them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX

Batch = Mapping[str, Any]
Counts = Mapping[str, Any]


def count_labels(labels: Tensor | None) -> int:
    """The number of labels that are not -100. Synchronises once if the labels are on a GPU."""
    return 0 if labels is None else int((labels != IGNORE_INDEX).sum())


def check_labels(labels: Tensor, classes: int, name: str = "labels", sequences: int | None = None) -> None:
    """Raise ValueError for labels that are not class numbers, are outside the head, or are not one per sequence, before
    a kernel fails on them.

    Values are checked on the host only: on a GPU the check would synchronise, and data loaders check them as well.
    """
    check_whole(labels, name)
    if sequences is not None and labels.numel() != sequences:
        raise ValueError(
            f"{name}: got shape {tuple(labels.shape)}, expected {(sequences,)}: one for each example of the batch"
        )
    if labels.device.type != "cpu" or not labels.numel():
        return
    low, high = int(labels.min()), int(labels.max())
    if high >= classes or (low < 0 and bool(((labels < 0) & (labels != IGNORE_INDEX)).any())):
        raise ValueError(
            f"{name}: got {high if high >= classes else low}, expected 0 to {classes - 1} (or -100: no label); this "
            f"head has {classes} classes, set by num_labels for a classification head"
        )


def check_whole(labels: Tensor, name: str = "labels") -> None:
    """Raise ValueError for labels of a dtype that the loss does not take, or that cannot hold -100."""
    if labels.dtype != torch.long:
        raise ValueError(f"{name}: got {labels.dtype}, expected numbers of classes as torch.int64; convert by .long()")


def token_labels(batch: Batch, prefix: str = "") -> Tensor:
    """The labels of a batch, which must have some, one per position of its `{prefix}input_ids`, if it has these.

    Raises:
        ValueError: they have another shape or dtype.
    """
    labels, name = batch["labels"], f"{prefix}input_ids"
    given = batch.get(name) if batch.get(name) is not None else batch.get(f"{prefix}inputs_embeds")
    if labels.dim() != 2 or (given is not None and labels.shape != given.shape[:2]):
        wanted = "(batch, seq)" if given is None else f"{tuple(given.shape[:2])}, as {name}"
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {wanted}: a label or -100 for each token")
    check_whole(labels)
    return labels


def supervised_labels(batch: Batch, prefix: str = "") -> Tensor:
    """`token_labels`, with -100 where `{prefix}attention_mask` is 0."""
    name = f"{prefix}attention_mask"
    labels, mask = token_labels(batch, prefix), batch.get(name)
    if mask is None or batch.get(f"{prefix}cu_seqlens") is not None:  # packed input has no padding
        return labels
    if mask.shape != labels.shape:
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, expected {tuple(labels.shape)}, as the labels have")
    return labels.masked_fill(mask == 0, IGNORE_INDEX)


def next_labels(batch: Batch) -> Tensor:
    """The labels of a batch, which must have some, shifted left by one: each token has the label of the next one in its
    sequence, the last has -100.

    Tokens that the attention mask excludes predict nothing, not even the first token of the text.
    """
    labels = token_labels(batch)
    if not labels.shape[1]:
        return labels
    if (ends := batch.get("cu_seqlens")) is not None:
        # One more column at the front: empty sequences at the start of the batch end there.
        moved = F.pad(labels[:, 1:], (1, 1), value=IGNORE_INDEX)
        # Not moved[0, ends] = -100, which synchronises on a GPU to copy the number.
        return moved.index_fill_(1, ends.long(), IGNORE_INDEX)[:, 1:]
    moved = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if (mask := batch.get("attention_mask")) is not None:
        moved = moved.masked_fill(mask[:, -moved.shape[1] :] == 0, IGNORE_INDEX)
    return moved


class Smoothing:
    """A head whose training loss supports label smoothing."""

    label_smoothing: float = 0.0
    training: bool

    @property
    def smoothing(self) -> float:
        """The current smoothing: 0 in evaluation."""
        return self.label_smoothing if self.training else 0.0

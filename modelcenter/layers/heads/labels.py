"""Labels of a batch: counted, checked, and moved to the tokens that predict them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX

Batch = Mapping[str, Any]
Counts = Mapping[str, Any]


def count_labels(labels: Tensor | None) -> int:
    """Labels that are not -100. Reads the device once when the labels are on a GPU."""
    return 0 if labels is None else int((labels != IGNORE_INDEX).sum())


def check_labels(labels: Tensor, classes: int, name: str = "labels", sequences: int | None = None) -> None:
    """Raise one clear error for labels that are no class numbers, not one for each of the `sequences`, or outside the
    head, before an error deep in a kernel.

    The numbers are read on the host only: on a GPU that would wait for the device, and data loaders check there too.
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
    """Raise ValueError for labels of a type that the loss does not take, or that cannot hold -100."""
    if labels.dtype != torch.long:
        raise ValueError(f"{name}: got {labels.dtype}, expected numbers of classes as torch.int64; convert by .long()")


def token_labels(batch: Batch, prefix: str = "") -> Tensor:
    """The labels of a batch that has some, one for each place of its `{prefix}input_ids`, where it has these.

    Raises:
        ValueError: they are of another shape or type.
    """
    labels, name = batch["labels"], f"{prefix}input_ids"
    given = batch.get(name) if batch.get(name) is not None else batch.get(f"{prefix}inputs_embeds")
    if labels.dim() != 2 or (given is not None and labels.shape != given.shape[:2]):
        wanted = "(batch, seq)" if given is None else f"{tuple(given.shape[:2])}, as {name}"
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {wanted}: a label or -100 for each token")
    check_whole(labels)
    return labels


def supervised_labels(batch: Batch, prefix: str = "") -> Tensor:
    """`token_labels`, -100 where `{prefix}attention_mask` leaves the token out: nothing is predicted there."""
    name = f"{prefix}attention_mask"
    labels, mask = token_labels(batch, prefix), batch.get(name)
    if mask is None or batch.get(f"{prefix}cu_seqlens") is not None:  # which say what there is
        return labels
    if mask.shape != labels.shape:
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, expected {tuple(labels.shape)}, as the labels have")
    return labels.masked_fill(mask == 0, IGNORE_INDEX)


def next_labels(batch: Batch) -> Tensor:
    """The labels of a batch that has some, moved one place to the left: at each token the label of the next one of its
    sequence, -100 at its last.

    A token that the attention mask leaves out predicts nothing, as nothing that precedes the text can.
    """
    labels = token_labels(batch)
    if not labels.shape[1]:
        return labels
    if (ends := batch.get("cu_seqlens")) is not None:
        # One column before the first, where sequences of no token end that begin the batch.
        moved = F.pad(labels[:, 1:], (1, 1), value=IGNORE_INDEX)
        # Not moved[0, ends] = -100: a GPU would wait for a copy of the number.
        return moved.index_fill_(1, ends.long(), IGNORE_INDEX)[:, 1:]
    moved = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if (mask := batch.get("attention_mask")) is not None:
        moved = moved.masked_fill(mask[:, -moved.shape[1] :] == 0, IGNORE_INDEX)
    return moved


class Smoothing:
    """A head whose loss in training can take a share of each label's weight and spread it over all classes."""

    label_smoothing: float = 0.0
    training: bool

    @property
    def smoothing(self) -> float:
        """The share now: evaluation judges by the labels alone."""
        return self.label_smoothing if self.training else 0.0

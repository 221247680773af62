"""Padded inputs with several choices per example: (batch, choices, seq, ...)."""

from collections.abc import Sequence

from torch import Tensor

from modelcenter.models.inputs import Batch

TOKEN_INPUTS = (
    "input_ids", "attention_mask", "token_type_ids", "task_type_ids", "global_attention_mask", "position_ids",
    "inputs_embeds",
)  # fmt: skip


def count_choices(batch: Batch) -> int:
    """The number of choices of each example in a padded batch.

    Raises:
        ValueError: there are no tokens, or they have no dimension of choices.
    """
    name, width = ("input_ids", "") if batch.get("input_ids") is not None else ("inputs_embeds", ", width")
    given = batch.get(name)
    if given is None:
        raise ValueError("input_ids, inputs_embeds: pass exactly one of them")
    if given.dim() != (4 if width else 3):
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected (batch, choices, seq{width}) or packed")
    return int(given.shape[1])


def flatten_choices(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """The named inputs in the batch as (batch * choices, seq, ...), with choices as consecutive rows.

    Raises:
        ValueError: one has no dimension of choices.
    """
    given = {name: batch[name] for name in names if batch.get(name) is not None}
    for name, value in given.items():
        if value.dim() < 3:
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected (batch, choices, seq)")
    return {name: value.flatten(0, 1) for name, value in given.items()}

"""The two heads of GPT-2 in transformers' GPT2DoubleHeadsModel: a language model and multiple choice."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter.layers.heads import CausalLM, MultipleChoice
from modelcenter.layers.packing import Packed
from modelcenter.models.inputs import Batch
from modelcenter.models.multiple_choice import TOKEN_INPUTS, count_choices, flatten_choices

_TOKENS = (*TOKEN_INPUTS, "labels")


class DoubleHeads(nn.Module):
    """`lm` reads all tokens, `choice` one token per sequence. The two losses are returned separately."""

    def __init__(self, lm: CausalLM, hidden_size: int, dropout: float):
        super().__init__()
        self.lm = lm
        self.choice = MultipleChoice(hidden_size, dropout)

    def counts(self, batch: Batch) -> dict[str, int]:
        if (labels := batch.get("labels")) is not None and labels.dim() == 3:
            batch = {**batch, **flatten_choices(batch, _TOKENS)}
        return self.lm.counts(batch) | {"choice": self.choice.counts({"labels": batch.get("mc_labels")})["loss"]}

    def forward(
        self,
        x: Tensor,
        ctx: Packed,
        batch: Batch,
        counts: Mapping[str, Any],
        table: Tensor,
        want_logits: bool | str,
    ) -> dict[str, Tensor]:
        assert not isinstance(want_logits, str)
        out = self.lm(x, ctx, batch, counts["loss"], table, want_logits)
        choices = batch["num_choices"]
        if "logits" in out and not ctx.layout.packed:
            out["logits"] = out["logits"].unflatten(0, (-1, choices))
        pooled = ctx.select(x, choice_tokens(ctx, batch.get("mc_token_ids")))
        chosen = self.choice(pooled, {"labels": batch.get("mc_labels")}, {"loss": counts["choice"]}, choices, ctx)
        return out | {f"mc_{name}": value for name, value in chosen.items()}


def choice_tokens(ctx: Packed, columns: Tensor | None) -> Tensor:
    """(n,) index, among all tokens, of the token by which each sequence is scored.

    Args:
        columns: n columns of the padded input, or offsets in packed sequences, in any shape; None: the last tokens.

    Raises:
        ValueError: there is not one column per sequence, one has no token, or a sequence is empty and none is given.
    """
    starts, ends = ctx.cu_seqlens[: ctx.num_sequences].long(), ctx.cu_seqlens[1 : ctx.num_sequences + 1].long()
    if columns is None:
        return ctx.last_tokens()
    at = columns.reshape(-1).long()
    if at.numel() != ctx.num_sequences:
        raise ValueError(
            f"mc_token_ids: got {at.numel()} numbers for {ctx.num_sequences} sequences, expected one for each"
        )
    if ctx.layout.packed:
        where, inside = starts + at, (at >= 0) & (starts + at < ends)
    else:
        (rows, width), indices = ctx.shape, ctx.layout.indices
        inside = (at >= 0) & (at < width)
        cells = torch.arange(rows, device=at.device) * width + at.clamp(0, max(width - 1, 0))
        where = cells
        if indices is not None:  # the number of tokens before the cell, and whether it holds one
            where = torch.searchsorted(indices, cells).clamp(max=max(indices.numel() - 1, 0))
            inside = inside & (indices[where] == cells)
    if not bool(inside.all()):
        row = int((~inside).nonzero()[0])
        raise ValueError(f"mc_token_ids: sequence {row} has no token at {int(at[row])}; give the place of one")
    return where


def flatten_batch(batch: Batch) -> dict[str, Any]:
    """The batch with the choices of an example as consecutive rows, and `num_choices`.

    Raises:
        ValueError: a padded input has no dimension of choices, or a packed one does not tell how many there are.
    """
    out = dict(batch)
    ends, labels = batch.get("cu_seqlens"), batch.get("mc_labels")
    if ends is not None:
        sequences, examples = ends.numel() - 1, 1 if labels is None else labels.numel()
        if sequences and (not examples or sequences % examples):
            raise ValueError(f"mc_labels: got {examples} for {sequences} sequences; every example needs as many")
        out["num_choices"] = sequences // examples if sequences else 1
    else:
        out["num_choices"] = count_choices(batch)
        out |= flatten_choices(batch, _TOKENS)
    return out

"""The head of extractive question answering."""

import torch
from torch import Tensor

from engine.loss import IGNORE_INDEX, cross_entropy
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads.labels import Batch, Counts
from modelcenter.layers.linear import Linear
from modelcenter.layers.packing import Packed


class ExtractiveQA(Linear):
    """Start and end of the answer: a softmax over the tokens of each sequence, without padding.

    Positions are columns of the padded input, or offsets in the sequence if the input is packed; those outside the
    sequence are ignored (transformers' softmax includes padding).
    """

    def __init__(self, hidden_size: int, dropout: float = 0.0):
        super().__init__(hidden_size, 2)
        self.dropout = Dropout(dropout)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {
            name: 0 if batch.get(f"{name}_positions") is None else int(self._valid(f"{name}_positions", batch)[1].sum())
            for name in ("start", "end")
        }

    @staticmethod
    def _valid(name: str, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n,) the positions in the batch's input `name`, and which of them are on a token.

        Raises:
            ValueError: the input is not one integer per sequence.
        """
        given, mask, ends = batch[name], batch.get("attention_mask"), batch.get("cu_seqlens")
        if ends is not None:
            lengths = ends[1:] - ends[:-1]
            return (at := _places(name, given, lengths.numel())), at < lengths
        ids = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
        at = _places(name, given, ids.shape[0])
        inside = at < ids.shape[1]
        if mask is None or not ids.shape[1]:
            return at, inside
        return at, inside & mask.gather(1, at.clamp(max=ids.shape[1] - 1)[:, None]).squeeze(1).bool()

    def forward(  # type: ignore[override]
        self, x: Tensor, ctx: Packed, batch: Batch, counts: Counts
    ) -> dict[str, Tensor]:
        both = super().forward(self.dropout(x, ctx))
        lowest = torch.finfo(both.dtype).min  # so that an argmax over columns never falls on padding
        padded = ctx.repad(both, lowest)
        out = {"start_logits": padded[..., 0], "end_logits": padded[..., 1], "logits": padded}
        missing = [name for name in ("start_positions", "end_positions") if batch.get(name) is None]
        if len(missing) == 2:
            return out
        if missing:
            raise ValueError(f"{missing[0]}: the loss is of starts and ends; pass both, or neither")
        loss = x.new_zeros((), dtype=torch.float32)
        for i, name in enumerate(("start", "end")):
            at, valid = self._valid(f"{name}_positions", batch)
            rows = ctx.pad_by_sequence(both[:, i], lowest) if ctx.layout.packed else padded[..., i]
            targets = torch.where(valid, at, IGNORE_INDEX)
            loss = loss + cross_entropy(rows, targets, counts[name])
        return {"loss": loss / 2, **out}


def _places(name: str, given: Tensor, sequences: int) -> Tensor:
    """(n,) the caller's positions, one per sequence; -1 means the first token, as in transformers."""
    if given.numel() != sequences or given.is_floating_point():
        raise ValueError(
            f"{name}: got shape {tuple(given.shape)} of {given.dtype}, expected {(sequences,)} of torch.int64: a "
            "place in each sequence"
        )
    return given.reshape(-1).long().clamp(min=0)

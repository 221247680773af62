"""The decoder inputs of an encoder-decoder: the caller's, or derived from the labels or the encoder's input."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.loss import IGNORE_INDEX
from modelcenter.layers.heads import check_labels, token_labels
from modelcenter.models.base import Model
from modelcenter.models.inputs import Batch


class DecoderInputs(Model):
    """Base of EncoderDecoder. Its config has pad_token_id and decoder_start_token_id."""

    # Tasks in which the decoder, by default, reads the encoder's input again.
    reads_input_again: ClassVar[tuple[str, ...]] = ("sequence-classification", "question-answering")

    def decoder_inputs(self, batch: Batch) -> dict[str, Any]:
        """The batch with decoder inputs: the caller's, else the labels shifted right by one inside each sequence, or in
        tasks that read the input again, the input shifted so.

        If labels are padded at the end of a row, the decoder has no tokens there.

        Raises:
            ValueError: there is nothing to derive them from, or the labels do not fit.
        """
        batch, source = dict(batch), None
        if batch.get("decoder_input_ids") is not None or batch.get("decoder_inputs_embeds") is not None:
            return batch
        if self.task == "seq2seq-lm" and batch.get("labels") is not None:
            c: Any = self.config
            source = token_labels(batch, "decoder_")
            check_labels(source, c.vocab_size)
            if batch.get("decoder_attention_mask") is None and batch.get("decoder_cu_seqlens") is None:
                batch["decoder_attention_mask"] = (source != IGNORE_INDEX).flip(1).cumsum(1).flip(1) > 0
        elif self.task in self.reads_input_again:
            source = batch.get("input_ids")
            for name in ("attention_mask", "cu_seqlens", "max_seqlen"):
                if batch.get(name) is not None:
                    batch[f"decoder_{name}"] = batch[name]
        if source is None:
            needed = "labels" if self.task == "seq2seq-lm" else "input_ids"
            makes = self.task != "base" or "base" in self.reads_input_again
            also = f" or {needed}, of which the decoder's inputs are made" if makes else ""
            raise ValueError(f"decoder_input_ids: pass them{also}")
        ends, mask = batch.get("decoder_cu_seqlens"), batch.get("decoder_attention_mask")
        batch["decoder_input_ids"] = self.shift_right(source, mask, ends)
        return batch

    def shift_right(self, ids: Tensor, mask: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Shift ids (batch, seq), or packed (1, T) with `ends`, right by one inside each sequence: a start token comes
        first, and padding replaces -100. `mask` (batch, seq) is 0 where there is no token."""
        c: Any = self.config
        moved = ids.roll(1, 1)
        moved = moved.masked_fill(moved == IGNORE_INDEX, c.pad_token_id)
        if not ids.numel():
            return moved
        if ends is not None:
            # An empty sequence begins where another does, or after all of them.
            first = torch.zeros(ids.shape[1] + 1, dtype=torch.bool, device=ids.device)
            first.index_fill_(0, ends[:-1].long(), True)  # first[...] = True would synchronise
            first = first[:-1]
        else:
            first = torch.arange(ids.shape[1], device=ids.device) == (
                0 if mask is None else mask.int().argmax(1, keepdim=True)
            )
        return torch.where(first, self.start_tokens(ids, mask, ends), moved)

    def start_tokens(self, ids: Tensor, mask: Tensor | None, ends: Tensor | None) -> int | Tensor:
        """The start tokens of decoder sequences that are derived from `ids`: one for all, or one per element of ids,
        that of its sequence. Arguments as in `shift_right`; ids must not be empty."""
        c: Any = self.config
        return c.decoder_start_token_id

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """`shift_right` under the name that transformers' data collator calls."""
        return self.shift_right(labels)

"""The speed of a run, for the rows of metrics.jsonl."""

from collections.abc import Mapping
from typing import Any

from modelcenter.models.base import Model
from modelcenter.training.batch_sources import GlobalBatch
from modelcenter.training.monitoring.flops import Utilisation


class Throughput:
    """Counts the tokens of a run. tokens: without padding, over all ranks, since its first step."""

    def __init__(self, model: Model, peak_flops: float | None):
        """peak_flops: see flops.Utilisation."""
        self.tokens = 0
        # Slots and tokens in this rank's batches since the last row.
        self._slots = self._filled = 0
        self._utilisation = Utilisation(model, peak_flops)
        self._tokens_at_row, self._seconds_at_row = 0, 0.0  # at the last row

    def add(self, batch: GlobalBatch) -> None:
        """Count the batch of a step."""
        self.tokens += batch.tokens
        for microbatch in batch.microbatches:
            slots, filled = slots_and_tokens(microbatch)
            self._slots, self._filled = self._slots + slots, self._filled + filled
            self._utilisation.add(microbatch)

    def row(self, seconds: float) -> dict[str, Any]:
        """Fields about the steps since the last row. seconds: of the run until now. Collective."""
        passed, tokens = seconds - self._seconds_at_row, self.tokens - self._tokens_at_row
        mfu = self._utilisation.since_last(passed)
        padding = round(1 - self._filled / self._slots, 6) if self._slots else 0.0
        self._slots = self._filled = 0
        self._tokens_at_row, self._seconds_at_row = self.tokens, seconds
        return {
            "tokens": self.tokens,
            "tokens_per_second": round(tokens / max(passed, 1e-9), 1),
            "padding": padding,
            **({} if mfu is None else {"mfu": float(f"{mfu:.4g}")}),
        }

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"tokens": self.tokens}

    def load(self, state: Mapping[str, Any], seconds: float) -> None:
        """Continue from a `state`, taken `seconds` into the run: the next row is about the steps after it."""
        self.tokens = self._tokens_at_row = state["tokens"]
        self._seconds_at_row = seconds


def slots_and_tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(slots, tokens in them) of a microbatch; an encoder-decoder has two sides."""
    slots = filled = 0
    for prefix in ("", "decoder_"):
        ids, ends = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}cu_seqlens")
        if ids is not None and ends is not None:
            slots, filled = slots + ids.numel(), filled + int(ends[-1])
    return slots, filled

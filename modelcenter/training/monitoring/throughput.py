"""How fast a run is, for the rows of metrics.jsonl."""

from collections.abc import Mapping
from typing import Any

from modelcenter.models.base import Model
from modelcenter.training.batch_sources import GlobalBatch
from modelcenter.training.monitoring.flops import Utilisation


class Meter:
    """Counts what a run trains on. tokens: real ones, over all ranks, since its first step."""

    def __init__(self, model: Model, peak_flops: float | None):
        """peak_flops: see flops.Utilisation."""
        self.tokens = 0
        self._slots = self._filled = 0  # of this rank's batches since the last row
        self._utilisation = Utilisation(model, peak_flops)
        self._row_at: tuple[int, float] = (0, 0.0)  # tokens and seconds as of the last row

    def add(self, batch: GlobalBatch) -> None:
        """Count the batch of a step."""
        self.tokens += batch.tokens
        for part in batch.microbatches:
            slots, filled = slots_and_tokens(part)
            self._slots, self._filled = self._slots + slots, self._filled + filled
            self._utilisation.add(part)

    def row(self, seconds: float) -> dict[str, Any]:
        """Fields on the steps since the last row. seconds: of the run until now. Collective."""
        passed, tokens = seconds - self._row_at[1], self.tokens - self._row_at[0]
        used = self._utilisation.since(passed)
        padding = round(1 - self._filled / self._slots, 6) if self._slots else 0.0
        self._slots = self._filled = 0
        self._row_at = (self.tokens, seconds)
        return {
            "tokens": self.tokens,
            "tokens_per_second": round(tokens / max(passed, 1e-9), 1),
            "padding": padding,
            **({} if used is None else {"mfu": float(f"{used:.4g}")}),
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"tokens": self.tokens}

    def load(self, state: Mapping[str, Any], seconds: float) -> None:
        """Go on from what `state` gave, so many seconds into the run: the next row is on the steps from there."""
        self.tokens, self._row_at = state["tokens"], (state["tokens"], seconds)


def slots_and_tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(places, tokens in them) of a microbatch; an encoder-decoder has two sides."""
    slots = filled = 0
    for prefix in ("", "decoder_"):
        ids, ends = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}cu_seqlens")
        if ids is not None and ends is not None:
            slots, filled = slots + ids.numel(), filled + int(ends[-1])
    return slots, filled

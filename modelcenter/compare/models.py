"""Run two models on one batch and compare what they produce."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from modelcenter.compare.gradients import gradients_of, hub_gradients, parameters_by_file_name
from modelcenter.compare.rows import IGNORE
from modelcenter.models.base import Model

STACKS = {
    "hidden_states": "layers",
    "encoder_hidden_states": "encoder layers",
    "decoder_hidden_states": "decoder layers",
}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value of `theirs` where that exceeds 1. NaN counts as infinite."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    gap = (ours.double() - theirs.double()).abs().max().item()
    scale = max(1.0, theirs.double().abs().max().item())
    return gap / scale if gap == gap else float("inf")


@dataclass
class Comparison:
    """Largest differences of one model from another (see `difference`).

    Attributes:
        values: what was compared -> difference: "loss", each output, "gradients", "layers".
        worst_gradient: the parameter whose gradient differs most.
        first_layer: number of the first layer whose output differs beyond the tolerance or that one model lacks
            (0: the embedding), or None.
        depths: "layers", or "encoder layers" and "decoder layers" -> how many of them each model has.
    """

    names: tuple[str, str]
    task: str
    rows: int
    tokens: int
    tolerance: float
    values: dict[str, float] = field(default_factory=dict)
    worst_gradient: str = ""
    first_layer: int | None = None
    depths: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return all(value <= self.tolerance for value in self.values.values())

    def __str__(self) -> str:
        lines = [f"{self.names[0]} against {self.names[1]}: {self.task}, {self.rows} rows, {self.tokens} tokens"]
        for what, value in self.values.items():
            note = ""
            if what == "gradients":
                note = f"  worst: {self.worst_gradient}"
            elif what == "layers" and self.first_layer is not None:
                note = f"  first that differs: {self.first_layer or 'the embedding'}"
                uneven = [f"{a} and {b} {stack}" for stack, (a, b) in self.depths.items() if a != b]
                note += f" ({', '.join(uneven)})" if uneven else ""
            lines.append(f"  {what:<24} {value:.2e}{note}")
        verdict = "equal" if self.equal else "DIFFERENT"
        return "\n".join([*lines, f"{verdict} (largest difference allowed: {self.tolerance:.0e})"])


def compare_models(
    ours: Model,
    theirs: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    their_batch: Mapping[str, Tensor] | None = None,
    names: tuple[str, str] = ("ours", "theirs"),
    tolerance: float = 1e-5,
) -> Comparison:
    """Run both on one padded batch, backward too, and compare what real tokens produce.

    Args:
        ours: a modelcenter model. theirs: a transformers model, or one of ours. Both in eval mode.
        batch: see pad_rows; labels are optional.
        their_batch: the same for `theirs`, where it takes labels in another form; None: batch.
    """
    mask = batch["attention_mask"].bool()
    result = Comparison(names, ours.task, len(batch["input_ids"]), int(mask.sum()), tolerance)
    for model in (ours, theirs):
        model.zero_grad()
    our_out = ours(**batch, output_hidden_states=True)
    their_out = theirs(**(batch if their_batch is None else their_batch), output_hidden_states=True)
    decoder_mask = output_mask(ours, batch)
    result.values |= _output_differences(our_out, their_out, mask, decoder_mask)
    layers = list(_layer_differences(our_out, their_out, mask, decoder_mask))
    result.values["layers"] = max(layers)
    result.depths = {
        stack: (len(our_out[name]) - 1, len(their_out[name]) - 1) for name, stack in STACKS.items() if name in our_out
    }
    result.first_layer = next((i for i, gap in enumerate(layers) if gap > tolerance), None)
    if our_out.get("loss") is not None and their_out.get("loss") is not None:
        for out in (our_out, their_out):
            sum(out[name] for name in ("loss", "mc_loss") if out.get(name) is not None).backward()
        gaps = _gradient_differences(ours, theirs)
        result.worst_gradient = max(gaps, key=gaps.__getitem__)
        result.values["gradients"] = gaps[result.worst_gradient]
    return result


def output_mask(ours: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """Where the outputs of a model have tokens: those of its decoder where that has other rows."""
    if not ours.config.is_encoder_decoder or ours.task not in ("base", "seq2seq-lm"):
        return batch["attention_mask"].bool()
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"].bool()
    return (batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) > 0


def _output_differences(ours: Any, theirs: Any, mask: Tensor, decoder_mask: Tensor) -> dict[str, float]:
    """{name of an output that both have: difference}, at real tokens where it has a place for each."""
    gaps = {}
    for name, value in theirs.items():
        # transformers names the masked-LM logits of BertForPreTraining differently
        our_name = {"prediction_logits": "logits"}.get(name, name)
        if not isinstance(value, Tensor) or our_name not in ours:
            continue
        pair, real = (ours[our_name].detach(), value.detach()), mask if name.startswith("encoder_") else decoder_mask
        if pair[1].shape[: real.dim()] == real.shape:
            pair = (pair[0][real], pair[1][real])
        gaps[name] = difference(*pair)
    return gaps


def _layer_differences(ours: Any, theirs: Any, mask: Tensor, decoder_mask: Tensor) -> Iterator[float]:
    """The difference after each layer, at real tokens; an encoder's layers before its decoder's.

    It is infinite for a layer that only one of them has.
    """
    flat = mask.flatten(0, -2) if mask.dim() == 3 else mask
    for name in STACKS:
        real = decoder_mask if name.startswith("decoder_") else flat
        if name in ours or name in theirs:
            for pair in zip_longest(ours[name], theirs[name]):
                both = [x.detach().reshape(*real.shape, -1)[real] for x in pair if x is not None]
                yield difference(*both) if len(both) == 2 else float("inf")


def _gradient_differences(ours: Model, theirs: nn.Module) -> dict[str, float]:
    """{name in the checkpoint: difference}; infinite for a parameter that only one of them has."""
    our_grads = hub_gradients(ours)
    their_grads = (
        hub_gradients(theirs) if isinstance(theirs, Model) else gradients_of(parameters_by_file_name(theirs, ours))
    )
    gaps = {name: difference(our_grads[name], grad) for name, grad in their_grads.items() if name in our_grads}
    return gaps | dict.fromkeys(sorted(set(their_grads) ^ set(our_grads)), float("inf"))

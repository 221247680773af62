"""The arithmetic of a training step, from a Hugging Face configuration: modelcenter.training.monitoring.flops.

All contenders of a benchmark are measured by the same count, so unnecessary arithmetic costs time and gains no speed.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Sizes of a row: its tokens, the decoder's tokens in an encoder-decoder, and how many have a label."""

    tokens: int
    target: int = 0
    labelled: int = 0


def training(config: Any, rows: Iterable[Row], task: str) -> float:
    """FLOPs of forward and backward over the rows, for transformers' config and a task of this project."""
    import torch

    from modelcenter.hub.architecture import find_spec, parse_config
    from modelcenter.training.monitoring.flops import Arithmetic, Sizes

    tokens, target, labelled = (torch.tensor(sizes) for sizes in zip(*rows, strict=True))
    sizes = Sizes(tokens, target if config.is_encoder_decoder else target[:0], int(labelled.sum()))
    spec = find_spec(config.to_dict(), None, "the config")
    ours = parse_config(spec, task, config.to_dict(), {}, "the config")
    return Arithmetic.of(ours, task).operations(sizes)

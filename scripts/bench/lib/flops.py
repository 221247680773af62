"""The arithmetic that a training step needs, of a Hugging Face configuration: modelcenter.training.monitoring.flops.

All contenders of a benchmark are measured by the same count, so that arithmetic nobody needed is a loss of time and not
a gain of speed.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

# Heads' tasks; a vocabulary's is that of the architecture.
_TASKS = {"masked": "masked-lm", "class": "sequence-classification", "span": "question-answering"}


class Row(NamedTuple):
    """Lengths of a row: its tokens, those of the decoder of an encoder-decoder, and how many have a label."""

    tokens: int
    target: int = 0
    labelled: int = 0


def training(config: Any, rows: Iterable[Row], head: str) -> float:
    """FLOPs of one pass of training over the rows. config: transformers'. head: "vocabulary", "masked" (BERT's has a
    layer of its own in front), "class" (with BERT's pooler) or "span"."""
    import torch

    from modelcenter.hub.architecture import find_spec, parse_config
    from modelcenter.training.monitoring.flops import Arithmetic, Sizes

    task = _TASKS.get(head) or ("seq2seq-lm" if config.is_encoder_decoder else "causal-lm")
    tokens, target, labelled = (torch.tensor(sizes) for sizes in zip(*rows, strict=True))
    sizes = Sizes(tokens, target if config.is_encoder_decoder else target[:0], int(labelled.sum()))
    spec = find_spec(config.to_dict(), None, "the config")
    ours = parse_config(spec, task, config.to_dict(), {}, "the config")
    return Arithmetic.of(ours, task).operations(sizes)

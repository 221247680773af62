"""The arithmetic that a training step needs: multiplications and additions of the model, forward and backward.

Linear layers and attention are counted, on tokens that are there: not padding, not what is computed again, and the
vocabulary only where a label is. All contenders of a benchmark are measured by the same count, so that arithmetic
nobody needed is a loss of time and not a gain of speed. Backward counts twice forward.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Lengths of a row: its tokens, those of the decoder of an encoder-decoder, and how many have a label."""

    tokens: int
    target: int = 0
    labelled: int = 0


def training(config: Any, rows: Iterable[Row], head: str) -> float:
    """FLOPs of one pass of training over the rows. config: transformers'. head: "vocabulary", "masked" (BERT's has a
    layer of its own in front), "class" (with BERT's pooler) or "span"."""
    return 3 * sum(
        _encoder_decoder(config, row) if config.is_encoder_decoder else _stack(config, row) for row in rows
    ) + 3 * sum(_head(config, row, head) for row in rows)


def _stack(config: Any, row: Row) -> float:
    """Forward through the layers of a BERT, a GPT-2 or a Llama."""
    h, n = config.hidden_size, row.tokens
    causal = config.model_type not in ("bert", "roberta", "xlm-roberta")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or h // heads
    inner, kv = heads * size, size * (getattr(config, "num_key_value_heads", None) or heads)
    between = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * h
    mlp = (3 if config.model_type in ("llama", "qwen2", "mistral") else 2) * h * between
    weights = 2 * h * inner + 2 * h * kv + mlp
    return config.num_hidden_layers * (2 * weights * n + 4 * inner * n * n / (2 if causal else 1))


def _encoder_decoder(config: Any, row: Row) -> float:
    """Forward through a T5."""
    h, inner, n, m = config.d_model, config.num_heads * config.d_kv, row.tokens, row.target
    mlp = (3 if config.is_gated_act else 2) * h * config.d_ff
    encoder = 2 * (4 * h * inner + mlp) * n + 4 * inner * n * n
    itself = 2 * (4 * h * inner + mlp) * m + 2 * inner * m * m
    across = 2 * (2 * h * inner) * (n + m) + 4 * inner * n * m
    return config.num_layers * encoder + config.num_decoder_layers * (itself + across)


def _head(config: Any, row: Row, head: str) -> float:
    h = config.hidden_size
    if head == "class":
        return 2 * (h * h + h * config.num_labels)
    if head == "span":
        return 2 * h * 2 * row.tokens
    return 2 * row.labelled * (h * config.vocab_size + (h * h if head == "masked" else 0))

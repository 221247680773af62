"""Supervised rows of a task, random or of given tokens, and the padded or packed batches made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
TOKEN_TASKS = ("masked-lm", "causal-lm", "token-classification", "pretraining")

Draw = Callable[[int, int], list[int]]  # (high, count) -> that many random numbers from 0 to below high


@dataclass
class Row:
    """One sequence.

    Attributes:
        input_ids: its tokens.
        token_type_ids: as long as input_ids, or empty for a model without token types.
        labels: as the task has them; for multiple choice only the first row of each example has one.
        decoder_ids: the decoder's input, where it is made neither of the labels nor of the input.
        pair_label: the input that holds the second label of pretraining on pairs.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    labels: Any = None
    decoder_ids: list[int] | None = None
    pair_label: str = "next_sentence_label"


def make_rows(
    task: str,
    *,
    vocab_size: int,
    num_labels: int,
    type_vocab_size: int = 0,
    lengths: Sequence[int] = (7, 3, 11, 5, 2, 8),
    choices: int = 3,
    seed: int = 0,
    ids: Sequence[Sequence[int]] | None = None,
    decodes: bool = False,
    end: int | None = None,
    replaced: bool = False,
    pair_label: str = "next_sentence_label",
) -> list[Row]:
    """Random supervised rows for a task.

    Args:
        lengths: of the rows, in tokens. Token 0 is never drawn: many models treat it as padding.
        choices: rows of one multiple-choice example.
        ids: the tokens of the rows, which are drawn if None.
        decodes: the model is an encoder-decoder, whose decoder has rows of other lengths.
        end: the token that ends each row, and occurs nowhere else in it.
        replaced: labels of pretraining say of each token whether it was replaced. pair_label: see Row.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int, low: int = 0) -> list[int]:
        return torch.randint(low, high, (count,), generator=rng).tolist()

    tokens = [list(x) for x in ids] if ids is not None else [draw(vocab_size, n, 1) for n in lengths]
    if end is not None:
        inner = [row[:-1] if ids is None else row for row in tokens]
        tokens = [[*(t if t != end else vocab_size - 1 for t in row), end] for row in inner]
    if task == "multiple-choice":
        tokens = tokens[: len(tokens) // choices * choices]
    rows = []
    for i, sequence in enumerate(tokens):
        if task == "pretraining" and replaced:
            labels = draw(2, len(sequence))
        else:
            labels = _draw_labels(task, sequence, i, draw, vocab_size, num_labels, choices)
        decoder_ids = draw(vocab_size, _target_length(i)) if task == "base" and decodes else None
        types = draw(type_vocab_size, len(sequence)) if type_vocab_size else []
        rows.append(Row(sequence, types, labels, decoder_ids, pair_label))
    return rows


def _target_length(i: int) -> int:
    """Tokens of the decoder in row `i`."""
    return 1 + (3 * i + 1) % 7


def _draw_labels(task: str, ids: list[int], i: int, draw: Draw, vocab_size: int, num_labels: int, choices: int) -> Any:
    """Labels of row `i`, whose tokens are `ids`; in those of tokens some are ignored, and at least one is not."""
    n = len(ids)
    if task in ("masked-lm", "pretraining", "token-classification"):
        classes = num_labels if task == "token-classification" else vocab_size
        supervised = draw(3, n)
        labels = [y if kept else IGNORE for y, kept in zip(draw(classes, n), supervised, strict=True)]
        labels[i % n] = draw(classes, 1)[0]
        return (labels, draw(2, 1)[0]) if task == "pretraining" else labels
    if task == "causal-lm":
        labels = [y if kept else IGNORE for y, kept in zip(ids, draw(3, n), strict=True)]
        labels[-1] = ids[-1]
        return labels
    if task == "seq2seq-lm":
        length = _target_length(i)
        labels = [y if kept else IGNORE for y, kept in zip(draw(vocab_size, length), draw(4, length), strict=True)]
        labels[-1] = draw(vocab_size, 1)[0]
        return labels
    if task == "sequence-classification":
        return draw(num_labels, 1)[0]
    if task == "next-sentence-prediction":
        return draw(2, 1)[0]
    if task == "question-answering":
        start = draw(n, 1)[0]
        return start, start + draw(n - start, 1)[0]
    if task == "multiple-choice" and i % choices == 0:
        return draw(choices, 1)[0]
    return None


def rows_for(task: str, config: Any, **how: Any) -> list[Row]:
    """`make_rows` for a model of this config."""
    end = config.eos_token_id if config.is_encoder_decoder else None
    return make_rows(
        task,
        vocab_size=config.vocab_size,
        num_labels=config.num_labels,
        type_vocab_size=getattr(config, "type_vocab_size", 0),
        decodes=config.is_encoder_decoder,
        end=end[0] if isinstance(end, list) else end,
        replaced=getattr(config, "detects_replaced", False),
        pair_label=getattr(config, "pair_label", "next_sentence_label"),
        **how,
    )


def pad_rows(task: str, rows: Sequence[Row], side: str = "right", choices: int = 3) -> dict[str, Tensor]:
    """A padded batch with attention_mask, in transformers' shapes; side: "right" or "left"."""
    longest = max(len(row.input_ids) for row in rows)

    def pad(values: list[int], fill: int, length: int = longest) -> list[int]:
        extra = [fill] * (length - len(values))
        return extra + values if side == "left" else values + extra

    batch = {
        "input_ids": torch.tensor([pad(row.input_ids, 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row.input_ids), 0) for row in rows]),
    }
    if rows[0].token_type_ids:
        batch["token_type_ids"] = torch.tensor([pad(row.token_type_ids, 0) for row in rows])
    token_labels = None
    if task in TOKEN_TASKS:
        token_labels = [pad(_token_labels(row), IGNORE) for row in rows]
    if (targets := decoder_rows(task, rows)) is not None:
        most = max(map(len, targets))
        if task == "seq2seq-lm":
            token_labels = [pad(row, IGNORE, most) for row in targets]
        else:
            batch["decoder_input_ids"] = torch.tensor([pad(row, 0, most) for row in targets])
        if side == "left" or task != "seq2seq-lm":
            batch["decoder_attention_mask"] = torch.tensor([pad([1] * len(row), 0, most) for row in targets])
    batch |= _labels(task, rows, token_labels)
    if task == "question-answering":
        for i, name in enumerate(("start_positions", "end_positions")):
            shift = [longest - len(row.input_ids) if side == "left" else 0 for row in rows]
            batch[name] = torch.tensor([row.labels[i] + s for row, s in zip(rows, shift, strict=True)])
    if task == "multiple-choice":
        for name in {"input_ids", "token_type_ids", "attention_mask"} & batch.keys():
            batch[name] = batch[name].unflatten(0, (-1, choices))
    return batch


def pack_rows(task: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The same rows as one packed batch with cu_seqlens."""
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[t for row in rows for t in row.input_ids]]),
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        "max_seqlen": int(lengths.max()),
    }
    if rows[0].token_type_ids:
        batch["token_type_ids"] = torch.tensor([[t for row in rows for t in row.token_type_ids]])
    token_labels = None
    if task in TOKEN_TASKS:
        token_labels = [[t for row in rows for t in _token_labels(row)]]
    if (targets := decoder_rows(task, rows)) is not None:
        ends = torch.tensor([len(row) for row in targets]).cumsum(0)
        batch["decoder_cu_seqlens"] = torch.nn.functional.pad(ends, (1, 0)).int()
        batch["decoder_max_seqlen"] = max(map(len, targets))
        flat = [[t for row in targets for t in row]]
        if task == "seq2seq-lm":
            token_labels = flat
        else:
            batch["decoder_input_ids"] = torch.tensor(flat)
    batch |= _labels(task, rows, token_labels)
    if task == "question-answering":
        batch["start_positions"] = torch.tensor([row.labels[0] for row in rows])
        batch["end_positions"] = torch.tensor([row.labels[1] for row in rows])
    return batch


def decoder_rows(task: str, rows: Sequence[Row]) -> list[list[int]] | None:
    """The decoder's side of the rows: labels or inputs; None where the batch has nothing for a decoder."""
    if task == "seq2seq-lm":
        return [row.labels for row in rows]
    return None if rows[0].decoder_ids is None else [row.decoder_ids or [] for row in rows]


def _token_labels(row: Row) -> list[int]:
    return row.labels[0] if isinstance(row.labels, tuple) else row.labels


def _labels(task: str, rows: Sequence[Row], token_labels: list[list[int]] | None) -> dict[str, Tensor]:
    """Labels of a batch; `token_labels` are those of its tokens, padded or packed already."""
    extra: dict[str, Tensor] = {}
    if token_labels is not None:
        extra["labels"] = torch.tensor(token_labels)
    if task == "pretraining" and isinstance(rows[0].labels, tuple):
        extra[rows[0].pair_label] = torch.tensor([row.labels[1] for row in rows])
    elif task in ("sequence-classification", "multiple-choice", "next-sentence-prediction"):
        extra["labels"] = torch.tensor([row.labels for row in rows if row.labels is not None])
    return extra

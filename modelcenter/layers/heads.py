"""Task heads over the hidden states of a packed batch.

A head has `forward(x, ctx, batch, counts, ...)` -> dict of outputs, with `loss` when the batch has labels, and
`counts(batch)` -> {term: supervised items}, from labels alone. Each term of a loss is a sum divided by counts[term].
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.loss import IGNORE_INDEX, cross_entropy, linear_cross_entropy, linear_log_probs, vocabulary_logits
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed

Batch = Mapping[str, Any]
Counts = Mapping[str, Any]


def count_labels(labels: Tensor | None) -> int:
    """Labels that are not -100. Reads the device once when the labels are on a GPU."""
    return 0 if labels is None else int((labels != IGNORE_INDEX).sum())


def check_labels(labels: Tensor, classes: int, name: str = "labels", sequences: int | None = None) -> None:
    """Raise one clear error for labels that are no class numbers, not one for each of the `sequences`, or outside the
    head, before an error deep in a kernel.

    The numbers are read on the host only: on a GPU that would wait for the device, and data loaders check there too.
    """
    if labels.dtype not in (torch.long, torch.uint8):
        raise ValueError(f"{name}: got {labels.dtype}, expected numbers of classes as torch.int64; convert by .long()")
    if sequences is not None and labels.numel() != sequences:
        raise ValueError(
            f"{name}: got shape {tuple(labels.shape)}, expected {(sequences,)}: one for each example of the batch"
        )
    if labels.device.type != "cpu" or not labels.numel():
        return
    low, high = int(labels.min()), int(labels.max())
    if high >= classes or (low < 0 and bool(((labels < 0) & (labels != IGNORE_INDEX)).any())):
        raise ValueError(
            f"{name}: got {high if high >= classes else low}, expected 0 to {classes - 1} (or -100: no label); this "
            f"head has {classes} classes, set by num_labels for a classification head"
        )


def of_tokens(batch: Batch, prefix: str = "") -> Tensor:
    """The labels of a batch that has some, one for each place of its `{prefix}input_ids`, where it has these.

    Raises:
        ValueError: they are of another shape.
    """
    labels, name = batch["labels"], f"{prefix}input_ids"
    given = batch.get(name) if batch.get(name) is not None else batch.get(f"{prefix}inputs_embeds")
    if labels.dim() != 2 or (given is not None and labels.shape != given.shape[:2]):
        wanted = "(batch, seq)" if given is None else f"{tuple(given.shape[:2])}, as {name}"
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {wanted}: a label or -100 for each token")
    return labels


class Smoothing:
    """A head whose loss in training can take a share of each label's weight and spread it over all classes."""

    label_smoothing: float = 0.0
    training: bool

    @property
    def smoothing(self) -> float:
        """The share now: evaluation judges by the labels alone."""
        return self.label_smoothing if self.training else 0.0


class SequenceClassifier(Smoothing, Linear):
    """One vector per sequence -> (n, num_labels); regression, one label or several, as transformers' problem_type."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float, problem_type: str | None, bias: bool = True):
        super().__init__(hidden_size, num_labels, bias)
        self.dropout, self.problem_type = Dropout(dropout), problem_type

    def kind(self, labels: Tensor) -> str:
        if self.problem_type is not None:
            return self.problem_type
        if self.out_features == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = batch.get("labels")
        if labels is None:
            return {"loss": 0}
        single = self.kind(labels) == "single_label_classification"
        return {"loss": count_labels(labels) if single else labels.shape[0]}

    def empty_labels(self, device: torch.device) -> Tensor:
        """Labels of no example, of the kind this head expects."""
        if self.problem_type == "multi_label_classification":
            return torch.zeros(0, self.out_features, device=device)
        regression = self.problem_type == "regression" or (self.problem_type is None and self.out_features == 1)
        return torch.zeros(0, dtype=torch.float32 if regression else torch.long, device=device)

    def forward(self, pooled: Tensor, batch: Batch, counts: Counts, ctx: Packed | None = None) -> dict[str, Tensor]:
        logits = super().forward(self.dropout(pooled, ctx, pooled=True))
        labels = batch.get("labels")
        if labels is None:
            return {"logits": logits}
        kind = self.kind(labels)
        if kind == "single_label_classification":
            check_labels(labels, self.out_features, sequences=logits.shape[0])
            loss = cross_entropy(logits, labels.reshape(-1), counts["loss"], label_smoothing=self.smoothing)
        else:
            if labels.numel() != logits.numel():
                raise ValueError(
                    f"labels: got shape {tuple(labels.shape)} for {kind}, expected {tuple(logits.shape)} (num_labels "
                    f"is {self.out_features})"
                )
            labels = labels.reshape(logits.shape).to(logits.dtype)
            loss_fn = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
            loss = loss_fn(logits, labels, reduction="sum") / (max(counts["loss"], 1) * self.out_features)
        return {"loss": loss, "logits": logits}


class DenseClassifier(SequenceClassifier):
    """As SequenceClassifier, after a dense layer with tanh."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float, problem_type: str | None):
        super().__init__(hidden_size, num_labels, dropout, problem_type)
        self.dense = Linear(hidden_size, hidden_size)
        self.dense_dropout = Dropout(dropout)

    def forward(self, pooled: Tensor, batch: Batch, counts: Counts, ctx: Packed | None = None) -> dict[str, Tensor]:
        pooled = torch.tanh(self.dense(self.dense_dropout(pooled, ctx, pooled=True)))
        return super().forward(pooled, batch, counts, ctx)


class MultipleChoice(Smoothing, Linear):
    """One vector per choice -> (batch, choices); the choices of an example are consecutive sequences."""

    def __init__(self, hidden_size: int, dropout: float):
        super().__init__(hidden_size, 1)
        self.dropout = Dropout(dropout)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": count_labels(batch.get("labels"))}

    def forward(
        self, pooled: Tensor, batch: Batch, counts: Counts, choices: Tensor | int, ctx: Packed | None = None
    ) -> dict[str, Tensor]:
        """choices: of every example, or (batch,) those of each: logits of choices that an example lacks are the
        lowest number."""
        logits = super().forward(self.dropout(pooled, ctx, pooled=True))
        logits = logits.view(-1, choices) if isinstance(choices, int) else _row_by_row(logits.flatten(), choices)
        labels = batch.get("labels")
        if labels is None:
            return {"logits": logits}
        check_labels(labels, logits.shape[1], sequences=logits.shape[0])
        loss = cross_entropy(logits, labels.reshape(-1), counts["loss"], label_smoothing=self.smoothing)
        return {"loss": loss, "logits": logits}


def _row_by_row(scores: Tensor, counts: Tensor) -> Tensor:
    """(rows, most): the scores of each row, and behind them the lowest number, whose probability is 0."""
    there = torch.arange(int(counts.max()), device=scores.device) < counts[:, None]
    return torch.full_like(there, torch.finfo(scores.dtype).min, dtype=scores.dtype).masked_scatter(there, scores)


class TokenClassifier(Smoothing, Linear):
    """Each token -> (batch, seq, num_labels)."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float, bias: bool = True):
        super().__init__(hidden_size, num_labels, bias)
        self.dropout = Dropout(dropout)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": count_labels(batch.get("labels"))}

    def forward(self, x: Tensor, ctx: Packed, batch: Batch, counts: Counts) -> dict[str, Tensor]:
        logits = super().forward(self.dropout(x, ctx))
        out = {"logits": ctx.repad(logits)}
        if batch.get("labels") is not None:
            labels = ctx.unpad(of_tokens(batch), IGNORE_INDEX)
            check_labels(labels, self.out_features)
            loss = cross_entropy(logits, labels, counts["loss"], label_smoothing=self.smoothing)
            out["loss"] = ctx.sum_over_ranks(loss)
        return out


class ExtractiveQA(Linear):
    """Start and end of the answer: a softmax over the tokens of each sequence, never over padding.

    Positions are columns of the padded input, or offsets in the sequence when packed; those outside it are ignored
    (transformers instead lets padding take part in the softmax).
    """

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 2)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {
            name: 0 if batch.get(f"{name}_positions") is None else int(self._valid(f"{name}_positions", batch)[1].sum())
            for name in ("start", "end")
        }

    @staticmethod
    def _valid(name: str, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n,) the positions that the batch has as `name`, and which of them lie on a token.

        Raises:
            ValueError: not one whole number for each sequence.
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

    def forward(self, x: Tensor, ctx: Packed, batch: Batch, counts: Counts) -> dict[str, Tensor]:
        both = super().forward(x)
        lowest = torch.finfo(both.dtype).min  # so that an argmax over columns never falls on padding
        padded = ctx.repad(both, lowest)
        out = {"start_logits": padded[..., 0], "end_logits": padded[..., 1], "logits": padded}
        if batch.get("start_positions") is None or batch.get("end_positions") is None:
            return out
        loss = x.new_zeros((), dtype=torch.float32)
        for i, name in enumerate(("start", "end")):
            at, valid = self._valid(f"{name}_positions", batch)
            rows = ctx.pad_by_sequence(both[:, i], lowest) if ctx.layout.packed else padded[..., i]
            targets = torch.where(valid, at, IGNORE_INDEX)
            loss = loss + cross_entropy(rows, targets, counts[name])
        return {"loss": loss / 2, **out}


def _places(name: str, given: Tensor, sequences: int) -> Tensor:
    """(n,) places in the sequences, one in each, as the caller gave them; -1 is the first token, as in transformers."""
    if given.numel() != sequences or given.is_floating_point():
        raise ValueError(
            f"{name}: got shape {tuple(given.shape)} of {given.dtype}, expected {(sequences,)} of torch.int64: a "
            "place in each sequence"
        )
    return given.reshape(-1).long().clamp(min=0)


class VocabularyHead(Smoothing, nn.Module):
    """Hidden states -> the vocabulary, for labelled positions only in the loss, chunk by chunk.

    It owns no output matrix while embeddings are tied: it is called with the table.
    """

    bias: Tensor | None
    weight: Tensor | None

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": count_labels(self.targets(batch))}

    def transform(self, x: Tensor) -> Tensor:
        """What comes before the output matrix."""
        return x

    def targets(self, batch: Batch) -> Tensor | None:
        """Labels shaped as the input, each at the token that is to predict it.

        Raises:
            ValueError: as `of_tokens`.
        """
        return None if batch.get("labels") is None else of_tokens(batch)

    def labelled(self, ctx: Packed, batch: Batch) -> tuple[Tensor, Tensor]:
        """(T,) the labels of a batch that has some, at the tokens that predict them, and (m,) numbers of these."""
        if ctx.labelled is None:
            ctx.labelled = self._find_labelled(ctx, batch)
        return ctx.labelled

    def _find_labelled(self, ctx: Packed, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = ctx.unpad(self.targets(batch), IGNORE_INDEX)  # type: ignore[arg-type]
        if host_copy(batch["labels"]) is batch["labels"] or not ctx.in_input_order:
            return labels, (labels != IGNORE_INDEX).nonzero().flatten()
        known = self.targets({name: host_copy(value) for name, value in batch.items()})
        where = (known.flatten() != IGNORE_INDEX).nonzero().flatten()  # type: ignore[union-attr]
        return labels, ctx.layout.token_numbers(to_device(where, labels.device))

    def reads(self, ctx: Packed, batch: Batch, want_logits: bool | str) -> Tensor | None:
        """(m,) numbers of the tokens whose hidden states `forward` uses; None: all."""
        if want_logits is True and not batch.get("logits_to_keep"):
            return None
        if batch.get("labels") is not None:
            return None if want_logits is True else self.labelled(ctx, batch)[1]
        return ctx.last_tokens() if want_logits is True else None

    def forward(
        self, x: Tensor, ctx: Packed, batch: Batch, count: Tensor | int, table: Tensor, want_logits: bool | str
    ) -> dict[str, Tensor]:
        """Loss where there are labels, logits where wanted, of last tokens only with `logits_to_keep`.

        want_logits: "labelled": (labels, vocabulary), of the tokens that have one, in their order.
        """
        weight, given = table if self.weight is None else self.weight, batch.get("labels") is not None
        out = {}
        if want_logits == "labelled" and given and ctx.split is not None:
            whole = ctx.repad(vocabulary_logits(self.transform(x), weight, self.bias))
            out["logits"], want_logits = whole[self.targets(batch) != IGNORE_INDEX], False
        if given:
            labels, labelled = self.labelled(ctx, batch)
            check_labels(labels, weight.shape[0])
            hidden = self.transform(x.index_select(0, labelled))
            targets = labels.index_select(0, labelled)
            smoothing = self.smoothing
            loss = linear_cross_entropy(
                hidden, weight, self.bias, targets, count, label_smoothing=smoothing, all_labelled=True
            )
            out["loss"] = ctx.sum_over_ranks(loss)
            if want_logits == "labelled":
                out["logits"], want_logits = vocabulary_logits(hidden, weight, self.bias), False
        if want_logits and batch.get("logits_to_keep"):
            out["logits"] = vocabulary_logits(self.transform(ctx.select(x, ctx.last_tokens())), weight, self.bias)[
                :, None
            ]
        elif want_logits:
            out["logits"] = ctx.repad(vocabulary_logits(self.transform(x), weight, self.bias))
        return out


class MaskedLM(VocabularyHead):
    """BERT's masked-language-model head: dense, activation, norm, then the vocabulary."""

    def __init__(self, hidden_size: int, vocab_size: int, activation: str, norm_eps: float, tied: bool):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.dense = Linear(hidden_size, hidden_size)
        self.norm = LayerNorm(hidden_size, norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size).normal_(std=0.02))

    def transform(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class NextToken(VocabularyHead):
    """The next token: labels are the input's tokens, and token t is to predict label t + 1 of its sequence."""

    def targets(self, batch: Batch) -> Tensor | None:
        return next_labels(batch)

    def reads(self, ctx: Packed, batch: Batch, want_logits: bool | str) -> Tensor | None:
        return super().reads(ctx, batch, want_logits and not batch.get("output_log_probs"))

    def forward(
        self, x: Tensor, ctx: Packed, batch: Batch, count: Tensor | int, table: Tensor, want_logits: bool | str
    ) -> dict[str, Tensor]:
        if batch.get("output_log_probs"):
            return {"log_probs": self.log_probs(x, ctx, batch, table)}
        return super().forward(x, ctx, batch, count, table, want_logits)

    def log_probs(self, x: Tensor, ctx: Packed, batch: Batch, table: Tensor) -> Tensor:
        """(n,) fp32: the log-probability of all labels of each sequence.

        Raises:
            ValueError: there are no labels.
        """
        if batch.get("labels") is None:
            raise ValueError("output_log_probs: of which tokens? Pass labels, -100 where there is none")
        labels, labelled = self.labelled(ctx, batch)
        weight = table if self.weight is None else self.weight
        check_labels(labels, weight.shape[0])
        hidden = self.transform(x.index_select(0, labelled))
        return ctx.sum_by_sequence(
            linear_log_probs(hidden, weight, self.bias, labels.index_select(0, labelled)), labelled
        )


class CausalLM(NextToken):
    """The next token, from the hidden states as they are."""

    def __init__(self, hidden_size: int, vocab_size: int, tied: bool, bias: bool = False, scale: float = 1.0):
        """`scale` multiplies the hidden states before the output matrix."""
        super().__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size).normal_(std=0.02))

    def transform(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class DenseCausalLM(NextToken, MaskedLM):
    """The next token, with the layers and tensors of a masked language model: an encoder that is a decoder."""


class OfDecoder(VocabularyHead):
    """The next token of a decoder, whose labels stand at the token before it already."""

    def targets(self, batch: Batch) -> Tensor | None:
        if batch.get("labels") is None:
            return None
        labels, mask = of_tokens(batch, "decoder_"), batch.get("decoder_attention_mask")
        # Where there is no token, nothing is predicted.
        return labels if mask is None else labels.masked_fill(mask == 0, IGNORE_INDEX)


class Seq2SeqLM(OfDecoder, CausalLM):
    """The next token of a decoder, from the hidden states as they are."""


class DenseSeq2SeqLM(OfDecoder, DenseCausalLM):
    """The next token of a decoder that was an encoder."""


def next_labels(batch: Batch) -> Tensor | None:
    """labels moved one place to the left: at each token the label of the next one of its sequence, -100 at its last.

    A token that the attention mask leaves out predicts nothing, as nothing that precedes the text can.
    """
    if batch.get("labels") is None:
        return None
    labels = of_tokens(batch)
    if not labels.shape[1]:
        return labels
    if (ends := batch.get("cu_seqlens")) is not None:
        # One column before the first, where sequences of no token end that begin the batch.
        moved = F.pad(labels[:, 1:], (1, 1), value=IGNORE_INDEX)
        moved[0, ends.long()] = IGNORE_INDEX
        return moved[:, 1:]
    moved = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if (mask := batch.get("attention_mask")) is not None:
        moved = moved.masked_fill(mask[:, -moved.shape[1] :] == 0, IGNORE_INDEX)
    return moved

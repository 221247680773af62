"""Classification heads for sequences, choices and tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loss import IGNORE_INDEX, at_least_one, cross_entropy
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.heads.labels import (
    Batch,
    Counts,
    Smoothing,
    check_labels,
    count_labels,
    supervised_labels,
)
from modelcenter.layers.heads.transform import HeadTransform
from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.linear import Linear, activated
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed, in_rows


class SequenceClassifier(Smoothing, Linear):
    """One vector per sequence -> (n, num_labels): regression, single-label or multi-label, as transformers'
    problem_type."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float, problem_type: str | None, bias: bool = True):
        super().__init__(hidden_size, num_labels, bias)
        self.dropout, self.problem_type = Dropout(dropout), problem_type

    def kind(self, labels: Tensor) -> str:
        """The problem_type, or the one inferred from the labels, as in transformers."""
        if self.problem_type is not None:
            return self.problem_type
        if self.out_features == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def label_width(self, labels: Tensor) -> int:
        """The number of values in the label of an example."""
        return 1 if self.kind(labels) == "single_label_classification" else self.out_features

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = batch.get("labels")
        if labels is None:
            return {"loss": 0}
        single = self.kind(labels) == "single_label_classification"
        return {"loss": count_labels(labels) if single else labels.shape[0]}

    def empty_labels(self, device: torch.device) -> Tensor:
        """Labels for zero examples, in the form that this head expects."""
        if self.problem_type == "multi_label_classification":
            return torch.zeros(0, self.out_features, device=device)
        regression = self.problem_type == "regression" or (self.problem_type is None and self.out_features == 1)
        return torch.zeros(0, dtype=torch.float32 if regression else torch.long, device=device)

    def forward(  # type: ignore[override]
        self, pooled: Tensor, batch: Batch, counts: Counts, ctx: Packed | None = None
    ) -> dict[str, Tensor]:
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
            # Never in 16 bits: bf16 rounds a target of 2023 to 2024, and the square of 300 overflows fp16.
            wide = torch.promote_types(logits.dtype, torch.float32)
            loss_fn = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
            total = loss_fn(logits.to(wide), labels.reshape(logits.shape).to(wide), reduction="sum")
            loss = total / (at_least_one(counts["loss"]) * self.out_features)
        return {"loss": loss, "logits": logits}


class DenseClassifier(SequenceClassifier):
    """As SequenceClassifier, after a dense layer with an activation.

    dense_dropout: before the dense layer; None: `dropout`, which also follows it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        dropout: float,
        problem_type: str | None,
        activation: str = "tanh",
        dense_dropout: float | None = None,
    ):
        super().__init__(hidden_size, num_labels, dropout, problem_type)
        self.dense, self.activation = Linear(hidden_size, hidden_size), ACTIVATIONS[activation]
        self.dense_dropout = Dropout(dropout if dense_dropout is None else dense_dropout)

    def forward(  # type: ignore[override]
        self, pooled: Tensor, batch: Batch, counts: Counts, ctx: Packed | None = None
    ) -> dict[str, Tensor]:
        pooled = self.activation(self.dense(self.dense_dropout(pooled, ctx, pooled=True)))
        return super().forward(pooled, batch, counts, ctx)


class LateClassifier(DenseClassifier):
    """The mean over a sequence's tokens of the logits of a DenseClassifier without dropout. The last layer is linear
    and therefore applied to the mean of its inputs. x: (T, hidden_size), the states of all tokens."""

    def forward(  # type: ignore[override]
        self, x: Tensor, batch: Batch, counts: Counts, ctx: Packed
    ) -> dict[str, Tensor]:
        read = activated(x, self.dense, self.activation)
        return SequenceClassifier.forward(self, ctx.mean_by_sequence(read), batch, counts, ctx)


class TransformedClassifier(SequenceClassifier):
    """As SequenceClassifier, after a HeadTransform. bias: of both linear layers. norm_bias: of the norm between."""

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        dropout: float,
        problem_type: str | None,
        activation: str,
        norm_eps: float,
        *,
        bias: bool,
        norm_bias: bool,
    ):
        super().__init__(hidden_size, num_labels, dropout, problem_type, bias)
        self.transform = HeadTransform(hidden_size, activation, norm_eps, bias=bias, norm_bias=norm_bias)

    def forward(  # type: ignore[override]
        self, pooled: Tensor, batch: Batch, counts: Counts, ctx: Packed | None = None
    ) -> dict[str, Tensor]:
        return super().forward(self.transform(pooled), batch, counts, ctx)


class MultipleChoice(Smoothing, Linear):
    """One vector per choice -> (batch, choices); the choices of an example are consecutive sequences."""

    def __init__(self, hidden_size: int, dropout: float):
        super().__init__(hidden_size, 1)
        self.dropout = Dropout(dropout)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": count_labels(batch.get("labels"))}

    def forward(  # type: ignore[override]
        self, pooled: Tensor, batch: Batch, counts: Counts, choices: Tensor | int, ctx: Packed | None = None
    ) -> dict[str, Tensor]:
        """choices: the number of choices of all examples, or (batch,) of each; missing choices have the lowest finite
        logit."""
        logits = super().forward(self.dropout(pooled, ctx, pooled=True))
        logits = logits.view(-1, choices) if isinstance(choices, int) else _pad_choices(logits.flatten(), choices)
        labels = batch.get("labels")
        if labels is None:
            return {"logits": logits}
        check_labels(labels, logits.shape[1], sequences=logits.shape[0])
        loss = cross_entropy(logits, labels.reshape(-1), counts["loss"], label_smoothing=self.smoothing)
        return {"loss": loss, "logits": logits}


class DenseMultipleChoice(MultipleChoice):
    """As MultipleChoice, after a dense layer with an activation. dense_dropout: before that layer."""

    def __init__(self, hidden_size: int, dropout: float, activation: str, dense_dropout: float = 0.0):
        super().__init__(hidden_size, dropout)
        self.dense, self.activation = Linear(hidden_size, hidden_size), ACTIVATIONS[activation]
        self.dense_dropout = Dropout(dense_dropout)

    def forward(  # type: ignore[override]
        self, pooled: Tensor, batch: Batch, counts: Counts, choices: Tensor | int, ctx: Packed | None = None
    ) -> dict[str, Tensor]:
        pooled = self.activation(self.dense(self.dense_dropout(pooled, ctx, pooled=True)))
        return super().forward(pooled, batch, counts, choices, ctx)


def _pad_choices(scores: Tensor, counts: Tensor) -> Tensor:
    """(rows, most): the scores of each row, padded with the lowest finite number, whose probability is 0."""
    return in_rows(scores, counts.long(), int(host_copy(counts).max()), torch.finfo(scores.dtype).min)


class TokenClassifier(Smoothing, Linear):
    """Each token -> (batch, seq, num_labels)."""

    def __init__(self, hidden_size: int, num_labels: int, dropout: float):
        super().__init__(hidden_size, num_labels)
        self.dropout = Dropout(dropout)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": 0 if batch.get("labels") is None else count_labels(supervised_labels(batch))}

    def forward(  # type: ignore[override]
        self, x: Tensor, ctx: Packed, batch: Batch, counts: Counts
    ) -> dict[str, Tensor]:
        logits = super().forward(self.dropout(x, ctx))
        out = {"logits": ctx.repad(logits)}
        if batch.get("labels") is not None:
            labels = ctx.unpad(supervised_labels(batch), IGNORE_INDEX)
            check_labels(labels, self.out_features)
            loss = cross_entropy(logits, labels, counts["loss"], label_smoothing=self.smoothing)
            out["loss"] = ctx.sum_over_ranks(loss)
        return out


class ReplacedTokens(Linear):
    """Each token -> (batch, seq): the logit that it was replaced, from a dense layer with an activation and a linear
    layer. Labels: 1 for replaced tokens, 0 for others."""

    def __init__(self, hidden_size: int, activation: str):
        super().__init__(hidden_size, 1)
        self.dense, self.activation = Linear(hidden_size, hidden_size), ACTIVATIONS[activation]

    def transform(self, x: Tensor, ctx: Packed) -> Tensor:
        """(T, hidden_size): the inputs of the last layer."""
        return self.activation(self.dense(x))

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": 0 if batch.get("labels") is None else count_labels(supervised_labels(batch))}

    def forward(  # type: ignore[override]
        self, x: Tensor, ctx: Packed, batch: Batch, counts: Counts
    ) -> dict[str, Tensor]:
        logits = super().forward(self.transform(x, ctx)).squeeze(-1)
        out = {"logits": ctx.repad(logits)}
        if batch.get("labels") is not None:
            labels = ctx.unpad(supervised_labels(batch), IGNORE_INDEX)
            check_labels(labels, 2)
            given = (labels != IGNORE_INDEX).float()
            total = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), given, reduction="sum")
            out["loss"] = ctx.sum_over_ranks(total / at_least_one(counts["loss"]))
        return out


class ReplacedTokensInContext(ReplacedTokens):
    """ReplacedTokens after adding the state of the sequence's first token to each state, and a norm, as in DeBERTa-v3's
    pretraining (LMMaskPredictionHead of its authors' code)."""

    def __init__(self, hidden_size: int, activation: str, norm_eps: float):
        super().__init__(hidden_size, activation)
        self.norm = LayerNorm(hidden_size, norm_eps)

    def transform(self, x: Tensor, ctx: Packed) -> Tensor:
        first = ctx.select(x, ctx.first_tokens())
        first = F.pad(first, (0, 0, 0, 1))  # dummy tokens belong to no sequence
        return super().transform(self.norm(x + first.index_select(0, ctx.sequence_of())), ctx)

"""Heads over the vocabulary: for masked tokens, the next token and the tokens of a decoder."""

import torch
from torch import Tensor, nn

from engine.loss import (
    IGNORE_INDEX,
    ExtendedVocabulary,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    sample_classes,
    vocabulary_logits,
)
from modelcenter.layers.heads.labels import (
    Batch,
    Smoothing,
    check_labels,
    count_labels,
    next_labels,
    supervised_labels,
)
from modelcenter.layers.host_copies import host_copy, to_device
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed

Table = Tensor | ExtendedVocabulary


class VocabularyHead(Smoothing, nn.Module):
    """Hidden states -> logits over the vocabulary; the loss computes those of labelled positions only, in chunks.

    With tied embeddings the head has no output matrix of its own, and is called with the table.

    Attributes:
        gives_label_states: for a teacher: return, instead of loss and logits, label_states (labels, width): the inputs
            of the output matrix for the tokens with a label.
        cap: a logit x becomes cap tanh(x / cap); None: no cap.
    """

    bias: Tensor | None
    weight: Tensor | None
    gives_label_states: bool = False
    cap: float | None = None

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": 0 if batch.get("labels") is None else count_labels(self.targets(batch))}

    def transform(self, x: Tensor) -> Tensor:
        """The inputs of the output matrix, from hidden states."""
        return x

    def targets(self, batch: Batch) -> Tensor:
        """The labels of a batch, which must have some, in the shape of the input, each at the token that predicts it.

        Raises:
            ValueError: as `token_labels`.
        """
        return supervised_labels(batch)

    def labelled(self, ctx: Packed, batch: Batch) -> tuple[Tensor, Tensor]:
        """(T,) the labels of a batch, which must have some, at the tokens that predict them, and (m,) their indices."""
        if ctx.labelled is None:
            ctx.labelled = self._find_labelled(ctx, batch)
        return ctx.labelled

    def _find_labelled(self, ctx: Packed, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = ctx.unpad(self.targets(batch), IGNORE_INDEX)
        if host_copy(batch["labels"]) is batch["labels"] or not ctx.in_input_order:
            return labels, (labels != IGNORE_INDEX).nonzero().flatten()
        # The host has a copy of the labels, so finding the indices does not synchronise.
        known = self.targets({name: host_copy(value) for name, value in batch.items()})
        where = ctx.of_this_rank((known.flatten() != IGNORE_INDEX).nonzero().flatten())
        return labels, ctx.layout.token_indices(to_device(where, labels.device))

    def reads(self, ctx: Packed, batch: Batch, want_logits: bool | str) -> Tensor | None:
        """(m,) indices of the tokens whose hidden states `forward` uses; None: all."""
        if want_logits is True and not batch.get("logits_to_keep"):
            return None
        if batch.get("labels") is not None:
            return None if want_logits is True else self.labelled(ctx, batch)[1]
        return ctx.last_tokens() if want_logits is True else None

    def forward(
        self, x: Tensor, ctx: Packed, batch: Batch, count: Tensor | int, table: Table, want_logits: bool | str
    ) -> dict[str, Tensor]:
        """The loss if there are labels, and the logits if wanted, with `logits_to_keep` of last tokens only.

        With `soft_targets` the loss is linear_distillation's, and its parts are label_loss and teacher_loss. With
        `draws`, in the shape of the input (engine.loss.sample_classes), a token is sampled for each one with a label:
        "sampled", in the shape of the input, -100 elsewhere.

        want_logits: "labelled": (labels, vocabulary), those of the tokens with a label, in order.
        """
        weight, given = table if self.weight is None else self.weight, batch.get("labels") is not None
        out = {}
        if self.gives_label_states:
            return {"label_states": self.transform(x.index_select(0, self.labelled(ctx, batch)[1]))}
        if want_logits == "labelled" and given and ctx.split is not None:
            whole = ctx.repad(self.logits_of(x, weight))
            out["logits"], want_logits = whole[self.targets(batch) != IGNORE_INDEX], False
        if given:
            labels, labelled = self.labelled(ctx, batch)
            check_labels(labels, weight.shape[0])
            hidden = self.transform(x.index_select(0, labelled))
            targets = labels.index_select(0, labelled)
            smoothing, soft = self.smoothing, batch.get("soft_targets")
            if soft is None:
                loss = linear_cross_entropy(
                    hidden, weight, self.bias, targets, count,
                    label_smoothing=smoothing, all_labelled=True, cap=self.cap,
                )  # fmt: skip
            else:
                loss, means = linear_distillation(
                    hidden, weight, self.bias, targets, count, soft, label_smoothing=smoothing, cap=self.cap
                )
                out["label_loss"], out["teacher_loss"] = ctx.sum_over_ranks(means).unbind()
            out["loss"] = ctx.sum_over_ranks(loss)
            if (draws := batch.get("draws")) is not None:
                own = ctx.unpad(draws, name="draws").index_select(0, labelled)
                drawn = labels.new_full(labels.shape, IGNORE_INDEX)
                drawn.index_copy_(0, labelled, sample_classes(hidden, weight, self.bias, own, cap=self.cap))
                out["sampled"] = ctx.repad(drawn, IGNORE_INDEX)
            if want_logits == "labelled":
                out["logits"] = vocabulary_logits(hidden, weight, self.bias, cap=self.cap)
                want_logits = False
        if want_logits and batch.get("logits_to_keep"):
            out["logits"] = self.logits_of(ctx.select(x, ctx.last_tokens()), weight)[:, None]
        elif want_logits:
            out["logits"] = ctx.repad(self.logits_of(x, weight))
        return out

    def logits_of(self, x: Tensor, weight: Table) -> Tensor:
        """The logits of hidden states (n, hidden_size), by the output matrix."""
        return vocabulary_logits(self.transform(x), weight, self.bias, cap=self.cap)


class MaskedLM(VocabularyHead):
    """BERT's masked-language-model head: dense, activation, norm, then the vocabulary.

    table_width: the input width of the output matrix; None: hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        activation: str,
        norm_eps: float,
        tied: bool,
        table_width: int | None = None,
        *,
        dense_bias: bool = True,
        norm_bias: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        width = table_width or hidden_size
        self.activation = ACTIVATIONS[activation]
        self.dense = Linear(hidden_size, width, dense_bias)
        self.norm = LayerNorm(width, norm_eps, bias=norm_bias)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width).normal_(std=0.02))

    def transform(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class LinearMaskedLM(VocabularyHead):
    """A masked-language-model head that is only an output matrix."""

    def __init__(self, hidden_size: int, vocab_size: int, tied: bool, bias: bool = False, scale: float = 1.0):
        """`scale` multiplies the hidden states before the output matrix."""
        super().__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size).normal_(std=0.02))

    def transform(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class NextTokenHead(VocabularyHead):
    """Next-token prediction: labels are the input's tokens, and token t predicts label t + 1 of its sequence."""

    def targets(self, batch: Batch) -> Tensor:
        return next_labels(batch)

    def reads(self, ctx: Packed, batch: Batch, want_logits: bool | str) -> Tensor | None:
        return super().reads(ctx, batch, want_logits and not batch.get("output_log_probs"))

    def forward(
        self, x: Tensor, ctx: Packed, batch: Batch, count: Tensor | int, table: Table, want_logits: bool | str
    ) -> dict[str, Tensor]:
        if batch.get("output_log_probs"):
            return {"log_probs": self.log_probs(x, ctx, batch, table)}
        return super().forward(x, ctx, batch, count, table, want_logits)

    def log_probs(self, x: Tensor, ctx: Packed, batch: Batch, table: Table) -> Tensor:
        """(n,) fp32: the log-probability of all labels of each sequence together.

        Raises:
            ValueError: there are no labels.
        """
        if batch.get("labels") is None:
            raise ValueError("output_log_probs: of which tokens? Pass labels, -100 where there is none")
        labels, labelled = self.labelled(ctx, batch)
        weight = table if self.weight is None else self.weight
        check_labels(labels, weight.shape[0])
        hidden = self.transform(x.index_select(0, labelled))
        targets = labels.index_select(0, labelled)
        log_probs = linear_log_probs(hidden, weight, self.bias, targets, cap=self.cap)
        return ctx.sum_by_sequence(log_probs, labelled)


class CausalLM(NextTokenHead, LinearMaskedLM):
    """Next-token prediction directly from the hidden states."""


class DenseCausalLM(NextTokenHead, MaskedLM):
    """Next-token prediction by the head of a masked language model, for an encoder that is used as a decoder."""


class DecoderLabels(VocabularyHead):
    """Next-token prediction of a decoder whose labels are already shifted to the token before."""

    def targets(self, batch: Batch) -> Tensor:
        return supervised_labels(batch, "decoder_")


class Seq2SeqLM(DecoderLabels, CausalLM):
    """Next-token prediction of a decoder, directly from the hidden states."""


class DenseSeq2SeqLM(DecoderLabels, DenseCausalLM):
    """Next-token prediction of a decoder that was pretrained as an encoder."""

"""Longformer (Beltagy et al. 2020, arXiv:2004.05150), after transformers' LongformerModel and its heads: RoBERTa with
attention in a window, and global tokens, which attend to all tokens and which all tokens attend to.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.global_attention import GlobalAttention
from modelcenter.layers.mlp import MLP
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder import READING_TASKS
from modelcenter.models.global_tokens import (
    WindowFields,
    ends_of_sequences,
    marked_tokens,
    on_host,
    set_globals,
)
from modelcenter.models.inputs import GLOBAL_MASK, Batch
from modelcenter.models.roberta import Roberta, RobertaStyleConfig


@dataclass(kw_only=True)
class LongformerConfig(WindowFields, RobertaStyleConfig):
    """Fields of Longformer.

    sep_token_id: the token after a question, by which the heads for question answering and multiple choice know the
    global tokens.
    """

    model_type: ClassVar[str] = "longformer"

    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    sep_token_id: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        pad = self.pad_token_id
        known = pad is not None and 0 <= pad < min(self.max_positions, self.vocab_size)
        self.require(known, "pad_token_id", "an id below vocab_size and max_positions: positions count on from it")


class Longformer(Roberta):
    """Longformer with the head of `task`.

    Global are the tokens where `global_attention_mask` is 1. Without it, as in transformers: for sequence
    classification the first token; for question answering those before the first sep_token_id; for multiple choice
    those from the second after it on; else none.
    """

    config_class = LongformerConfig
    tasks = READING_TASKS
    refuses_prompts = "has global tokens, which transformers cannot find in given embeddings"
    marks_global = True

    config: LongformerConfig

    def make_layers(self) -> nn.ModuleList:
        c, width = self.config, self.config.hidden_size
        return nn.ModuleList(
            PostNormBlock(
                GlobalAttention(width, c.num_heads, c.attention_dropout, window=reach),
                MLP(width, c.intermediate_size, c.hidden_act),
                width,
                c.norm_eps,
                c.dropout,
            )
            for reach in c.reaches()
        )

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        set_globals(ctx, self.global_tokens(batch, ctx))
        if ctx.globals is not None and ctx.attended is not None:
            raise ValueError(
                f"{GLOBAL_MASK}: not beside tokens that no token attends to; expand queries by mask tokens that are "
                "attended to (expansion_attended)"
            )
        return x, ctx

    def global_tokens(self, batch: Batch, ctx: Packed) -> Tensor | None:
        """(g,) ascending indices of the global tokens among all tokens, on the host; None: there are none.

        Raises:
            ValueError: the mask does not fit the tokens, or the tokens do not show which ones are global.
        """
        if (marked := marked_tokens(batch, ctx)) is not None:
            return marked
        ends = ends_of_sequences(ctx)
        if self.task == "sequence-classification":
            ctx.first_tokens()  # which raises the error of a row without tokens
            return ends[:-1]
        if self.task in ("question-answering", "multiple-choice") and batch.get("input_ids") is not None:
            return self._tokens_beside_separator(on_host(batch["input_ids"], ctx, "input_ids"), ends)
        return None

    def _tokens_beside_separator(self, ids: Tensor, ends: Tensor) -> Tensor:
        """The tokens before the first separator of each sequence or, for multiple choice, from the second after it on.

        ids: (T,) of all tokens. ends: (n + 1,) offsets of the sequences.
        """
        separator = self.config.sep_token_id
        count = torch.nn.functional.pad(ids.eq(-1 if separator is None else separator).cumsum(0), (1, 0))
        in_sequence = count[ends[1:]] - count[ends[:-1]]
        if not bool((in_sequence > 0).all()):
            raise ValueError(
                f"input_ids: sequence {int((in_sequence == 0).nonzero()[0])} has no token {separator} (sep_token_id), "
                f"which ends a question; pass {GLOBAL_MASK}, 1 at the tokens with global attention"
            )
        number = torch.searchsorted(ends[1:], torch.arange(ids.numel()), right=True)
        seen = count[1:] - count[ends[:-1]][number]  # separators up to and including the token
        if self.task == "question-answering":
            return (seen == 0).nonzero().flatten()
        first = torch.searchsorted(count, count[ends[:-1]] + 1)  # one after the separator
        return (torch.arange(ids.numel()) > first[number]).nonzero().flatten()

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {f"layers.*.attn.{x}_global": "colwise" for x in "qkv"}

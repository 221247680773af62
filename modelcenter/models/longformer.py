"""Longformer (Beltagy et al. 2020, arXiv:2004.05150), after transformers' LongformerModel and its heads: RoBERTa with
attention in a window, and global tokens, which attend to all tokens and which all tokens attend to.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.global_attention import GlobalAttention
from modelcenter.layers.global_tokens import GlobalTokens
from modelcenter.layers.host_copies import host_copy
from modelcenter.layers.mlp import MLP
from modelcenter.layers.packing import Packed
from modelcenter.models.encoder import READING_TASKS
from modelcenter.models.inputs import Batch
from modelcenter.models.roberta import Roberta, RobertaStyleConfig

GLOBAL_MASK = "global_attention_mask"


@dataclass(kw_only=True)
class LongformerConfig(RobertaStyleConfig):
    """Fields of Longformer.

    attention_window: distance between the farthest tokens on both sides of a window, one for all layers or one for
    each; even.
    sep_token_id: the token after a question, by which the heads for question answering and multiple choice know the
    global tokens.
    """

    model_type: ClassVar[str] = "longformer"

    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    attention_window: int | list[int] = 512
    sep_token_id: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        pad = self.pad_token_id
        known = pad is not None and 0 <= pad < min(self.max_positions, self.vocab_size)
        self.require(known, "pad_token_id", "an id below vocab_size and max_positions: positions count on from it")
        windows = self.windows()
        even = len(windows) == self.num_layers and all(width > 0 and width % 2 == 0 for width in windows)
        self.require(even, "attention_window", f"an even number above 0, or {self.num_layers} of them, one per layer")

    def windows(self) -> list[int]:
        """attention_window of each layer."""
        given = self.attention_window
        return list(given) if isinstance(given, list) else [given] * self.num_layers


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
                GlobalAttention(width, c.num_heads, c.attention_dropout, window=window // 2 + 1),
                MLP(width, c.intermediate_size, c.hidden_act),
                width,
                c.norm_eps,
                c.dropout,
            )
            for window in c.windows()
        )

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        tokens = self.global_tokens(batch, ctx)
        if tokens is not None and tokens.numel():
            if ctx.attended is not None:
                raise ValueError(
                    f"{GLOBAL_MASK}: not beside tokens that no token attends to; expand queries by mask tokens that "
                    "are attended to (expansion_attended)"
                )
            ctx.globals = GlobalTokens(tokens, ctx.sequences)
        return x, ctx

    def global_tokens(self, batch: Batch, ctx: Packed) -> Tensor | None:
        """(g,) ascending indices of the global tokens among all tokens, on the host; None: there are none.

        Raises:
            ValueError: the mask does not fit the tokens, or the tokens do not show which ones are global.
        """
        if (mask := batch.get(GLOBAL_MASK)) is not None:
            chosen = _on_host(mask, ctx, GLOBAL_MASK)
            if not bool(((chosen == 0) | (chosen == 1)).all()):
                raise ValueError(
                    f"{GLOBAL_MASK}: got values from {chosen.min().item()} to {chosen.max().item()}, expected only 1 "
                    "(global) and 0 (attention within the window)"
                )
            return chosen.nonzero().flatten()
        ends = torch.tensor(ctx.sequences.starts()[: ctx.num_sequences + 1])
        if self.task == "sequence-classification":
            ctx.first_tokens()  # which raises the error of a row without tokens
            return ends[:-1]
        if self.task in ("question-answering", "multiple-choice") and batch.get("input_ids") is not None:
            return self._tokens_beside_separator(_on_host(batch["input_ids"], ctx, "input_ids"), ends)
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


def _on_host(x: Tensor, ctx: Packed, name: str) -> Tensor:
    """(T,) on the host: x (batch, seq) or packed (1, T), without padding. A GPU is waited for only if x has no copy."""
    known = host_copy(x)
    unpadded: Any = ctx.layout.unpad(known if ctx.layout.indices is None else x, name=name)
    return unpadded.cpu()

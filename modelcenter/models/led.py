"""LED (Beltagy et al. 2020, arXiv:2004.05150), after transformers' LEDModel and its heads: BART whose encoder has
Longformer's windows and global tokens, so that it reads long texts. PRIMERA (Xiao et al. 2021, arXiv:2110.08499) is an
LED.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.global_attention import GlobalAttention
from modelcenter.layers.packing import Packed
from modelcenter.models.bart import Bart, BartConfig
from modelcenter.models.bart_style import BlockSpec
from modelcenter.models.global_tokens import WindowFields, ends_of_sequences, marked_tokens, on_host, set_globals
from modelcenter.models.inputs import GLOBAL_MASK, Batch


@dataclass(kw_only=True)
class LedConfig(WindowFields, BartConfig):
    """BART's fields, of which embeddings are never scaled, and windows of the encoder.

    Attributes:
        max_positions: of the encoder. max_decoder_positions: of the decoder.
        global_first_token, global_token_ids: in batches without a mask of global tokens, the first token of each text
            is global, and so are tokens with these ids. None: none are, as always in transformers, which ignores both
            fields; fine-tuning sets them.
    """

    model_type: ClassVar[str] = "led"

    num_labels: int = 2
    max_positions: int = 16384
    max_decoder_positions: int = 1024
    global_first_token: bool | None = None
    global_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(not self.scale_embedding, "scale_embedding", "false: this family never scales embeddings")
        given = self.global_token_ids
        known = given is None or (isinstance(given, list) and all(0 <= token < self.vocab_size for token in given))
        self.require(known, "global_token_ids", f"a list of some of {self.vocab_size} tokens")

    @property
    def max_written_tokens(self) -> int:
        return self.max_decoder_positions


class Led(Bart):
    """LED with the head of `task`. Parameter names in the body do not depend on the task.

    Global are the tokens where `global_attention_mask` is 1; without it, those that the config names.
    """

    config_class = LedConfig
    tasks = ("base", "seq2seq-lm", "question-answering")
    reads_input_again = tasks
    offset = 0
    refuses_prompts = "has global tokens, which transformers cannot find in given embeddings"
    marks_global = True

    config: LedConfig

    def positions_field(self, decodes: bool) -> str:
        return "max_decoder_positions" if decodes else "max_positions"

    def attention(self, spec: BlockSpec) -> SelfAttention:
        c = self.config
        if spec.decodes:
            return super().attention(spec)
        window = c.reaches()[spec.layer]
        return GlobalAttention(c.hidden_size, spec.num_heads, c.attention_dropout, window=window)

    def pack_encoder(self, batch: Batch) -> Packed:
        ctx = super().pack_encoder(batch)
        if batch.get("encoder_outputs") is None:
            set_globals(ctx, self.global_tokens(batch, ctx))
        return ctx

    def global_tokens(self, batch: Batch, ctx: Packed) -> Tensor:
        """(g,) ascending indices of the global tokens among all tokens of the encoder, on the host.

        Raises:
            ValueError: the mask does not fit the tokens, or the config names tokens and only embeddings are given.
        """
        if (marked := marked_tokens(batch, ctx)) is not None:
            return marked
        ends = ends_of_sequences(ctx)
        first = ends[:-1][ends.diff() > 0] if self.config.global_first_token else ends[:0]
        if not (named := self.config.global_token_ids):
            return first
        if batch.get("input_ids") is None:
            raise ValueError(
                f"inputs_embeds: the config names global tokens (global_token_ids), which embeddings do not show; pass "
                f"{GLOBAL_MASK}, 1 at the tokens with global attention"
            )
        chosen = torch.isin(on_host(batch["input_ids"], ctx, "input_ids"), torch.tensor(named))
        chosen[first] = True
        return chosen.nonzero().flatten()

    def tp_plan(self) -> dict[str, str]:
        return super().tp_plan() | {f"encoder.layers.*.attn.{x}_global": "colwise" for x in "qkv"}

"""ESM-2 (Lin et al. 2023, doi:10.1126/science.ade2574) and ESM-1b (Rives et al. 2021, doi:10.1073/pnas.2016239118),
protein language models, after transformers' EsmModel and its heads: pre-norm blocks, rotary positions or RoBERTa's
learned ones, and embeddings scaled by the share of masked tokens in a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.ops import Embedding
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PreNormBlock
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import MLP
from modelcenter.layers.norm import LayerNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import StoredRotary
from modelcenter.models.encoder import CLASSIFYING_TASKS
from modelcenter.models.inputs import Batch
from modelcenter.models.roberta import Roberta, RobertaStyleConfig

ROTARY = "rotary"
# In ESM's training 15% of the tokens were selected, of which 80% were masked.
MASKED_IN_TRAINING = 0.15 * 0.8


@dataclass(kw_only=True)
class EsmConfig(RobertaStyleConfig):
    """Fields of ESM.

    position_type: "rotary" (ESM-2), or "absolute" (ESM-1b), a table whose first pad_token_id + 1 rows are not used for
    tokens. Rotary models have no table; max_positions is the number that they were trained with. norm_embeddings: a
    norm before the first layer. token_dropout: the embeddings of masked tokens are 0, and all are scaled as by dropout,
    so that inputs without masks have the scale of those in training.
    """

    model_type: ClassVar[str] = "esm"

    max_positions: int = 1026
    norm_eps: float = 1e-12
    position_type: str = "absolute"
    rope_theta: float = 10000.0
    norm_embeddings: bool | None = None
    token_dropout: bool | None = False
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.hidden_act == "gelu", "hidden_act", "'gelu', which transformers computes whatever it says")
        self.require_one_of("position_type", ("absolute", ROTARY))
        pad = self.pad_token_id
        self.require(pad is not None and pad >= 0, "pad_token_id", f"a token below vocab_size={self.vocab_size}")
        if self.is_rotary:
            self.require(self.hidden_size // self.num_heads % 2 == 0, "num_heads", "heads of an even width: pairs turn")
        else:
            rows = f"more than {self.first_position}: the first rows of the position table hold no token"
            self.require(self.max_positions > self.first_position, "max_positions", rows)
        self.require_token("mask_token_id", self.vocab_size)
        known = self.mask_token_id is not None or not self.token_dropout
        self.require(known, "mask_token_id", "the number of the mask token: token_dropout counts it")

    @property
    def is_rotary(self) -> bool:
        return self.position_type == ROTARY

    @property
    def first_position(self) -> int:
        return 0 if self.is_rotary else super().first_position

    @property
    def max_tokens(self) -> int:
        return self.max_positions - self.padding_id - 1  # also the number that rotary models were trained with


class Esm(Roberta):
    """ESM-2 or ESM-1b with the head of `task`. It takes no token_type_ids."""

    config_class = EsmConfig
    tasks = CLASSIFYING_TASKS
    pooled_tasks = ("base", "embedding", "multi-vector")
    tells_types = False
    # transformers predicts contacts with the last two, from the attention of all layers; they are kept for export.
    constants = frozenset(("rotary.frequencies", "contacts.weight", "contacts.bias"))

    config: EsmConfig

    def make_body(self) -> None:
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size, padding_idx=c.pad_token_id)
        self.position = None if c.is_rotary else Embedding(c.max_positions, c.hidden_size)
        self.rotary = StoredRotary(c.hidden_size // c.num_heads, c.rope_theta) if c.is_rotary else None
        self.embed_norm = self._norm() if c.norm_embeddings else nn.Identity()
        self.layers = self.make_layers()
        self.final_norm = self._norm()
        self.contacts = Linear(c.num_layers * c.num_heads, 1).requires_grad_(False)
        if not c.is_rotary:
            self.refuses_prompts = "has learnt positions, which transformers adds to no given embeddings"

    def _norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_size, self.config.norm_eps)

    def make_block(self) -> nn.Module:
        c, width = self.config, self.config.hidden_size
        return PreNormBlock(
            SelfAttention(width, c.num_heads, c.attention_dropout),
            MLP(width, c.intermediate_size, c.hidden_act),
            self._norm,
            c.dropout,
        )

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        ctx = self.pack(batch if self.position is None else self.with_position_ids(batch))
        x = self.embedded(batch, ctx, self.embed)
        if self.rotary is not None:
            ctx.rotary = self.rotary(ctx.positions, x.dtype)
        if self.position is not None:
            self.check_positions(batch, ctx, self.config.max_positions)
            x = x + self.look_up(self.position, ctx.positions, ctx.positions, "position_ids", "max_positions")
        return self.embed_norm(x), ctx

    def embedded(self, batch: Batch, ctx: Packed, table: nn.Module, prefix: str = "") -> Tensor:
        """As in other models; embeddings of tokens are scaled by `token_dropout`, but not after a tuned prompt, because
        peft then passes transformers embeddings instead of tokens."""
        x = super().embedded(batch, ctx, table, prefix)
        ids, mask = batch.get("input_ids"), self.config.mask_token_id
        if not self.config.token_dropout or mask is None or ids is None or self.tuned_prompt is not None:
            return x
        masked = ctx.unpad(ids, self.config.padding_id).eq(mask)
        lengths = (ctx.cu_seqlens[1:] - ctx.cu_seqlens[:-1])[: ctx.num_sequences]
        seen = 1 - ctx.sum_by_sequence(masked.float()) / lengths  # share of each sequence that is not masked
        scale = (1 - MASKED_IN_TRAINING) / nn.functional.pad(seen, (0, 1), value=1.0)  # the last: dummy tokens
        scale = scale.index_select(0, ctx.sequence_of()).masked_fill(masked, 0.0)
        return (x * scale[:, None]).to(x.dtype)

    def finish(self, x: Tensor) -> Tensor:
        return self.final_norm(x)

    def stage_homes(self) -> dict[str, Sequence[int]]:
        homes = super().stage_homes()
        return homes if self.rotary is None else homes | {"rotary": range(len(self.units))}

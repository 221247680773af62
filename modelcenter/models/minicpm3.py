"""MiniCPM3, after transformers' MiniCPM3Model: MiniCPM with multi-head latent attention (arXiv:2405.04434)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops import rotate
from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.linear import Linear, inner
from modelcenter.layers.mlp import GatedMLP
from modelcenter.layers.norm import RMSNorm
from modelcenter.layers.packing import Packed
from modelcenter.layers.rotary import mscale
from modelcenter.models.minicpm import ScaledBody, ScaledConfig

# Epsilon of the norms of latents, whatever norm_eps is.
LATENT_EPS = 1e-6


@dataclass(kw_only=True)
class MiniCPM3Config(ScaledConfig):
    """Fields of MiniCPM3.

    Queries are projected from a latent of width q_lora_rank (None: from the hidden states), keys and values from one of
    width kv_lora_rank. A head of q and k has qk_rope_head_dim rotated and qk_nope_head_dim other channels. v_head_dim:
    channels of a head of v; None: hidden_size / num_heads. head_dim and qk_head_dim are derived. attention_bias: the
    projections to latents and out have biases; mlp_bias: gate, up and down have biases.
    """

    model_type: ClassVar[str] = "minicpm3"

    max_positions: int = 32768
    norm_eps: float = 1e-5
    initializer_range: float = 0.1
    scale_emb: float = 12
    scale_depth: float = 1.4
    dim_model_base: int = 256
    q_lora_rank: int | None = 768
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        self.head_dim = self.qk_rope_head_dim
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.v_head_dim is None:
            self.v_head_dim = self.hidden_size // self.num_heads
        super().__post_init__()
        self.require(self.num_kv_heads == self.num_heads, "num_kv_heads", f"num_heads={self.num_heads}")
        self.require(self.v_head_dim <= self.qk_head_dim, "v_head_dim", f"at most {self.qk_head_dim}, the width of q")

    @property
    def score_scale(self) -> float:
        """Factor of the scores. mscale_all_dim applies to all channels of a head, including those not rotated."""
        assert self.qk_head_dim is not None
        scaling = self.rope_scaling or {}
        by, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
        return self.qk_head_dim**-0.5 * (mscale(factor, by) ** 2 if by and factor else 1.0)


class LatentAttention(SelfAttention):
    """Attention whose queries, keys and values are projected from narrow latents. x: (T, hidden_size) -> the same."""

    def __init__(self, c: MiniCPM3Config):
        nn.Module.__init__(self)
        assert c.qk_head_dim is not None and c.v_head_dim is not None
        self.num_heads = self.num_kv_heads = c.num_heads
        self.head_dim, self.turning, self.value_dim = c.qk_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.dropout, self.causal, self.window, self.scale = c.attention_dropout, True, None, c.score_scale
        inner, latent = c.num_heads * c.qk_head_dim, c.kv_lora_rank
        self.latent = c.q_lora_rank is not None
        if c.q_lora_rank is not None:
            self.q_down = Linear(c.hidden_size, c.q_lora_rank, c.attention_bias)
            self.q_norm = RMSNorm(c.q_lora_rank, LATENT_EPS)
            self.q_up = Linear(c.q_lora_rank, inner, False)
        else:
            self.q = Linear(c.hidden_size, inner, False)
        # The last rows compute the rotated channels of the key, which all heads share.
        self.kv_down = Linear(c.hidden_size, latent + self.turning, c.attention_bias)
        self.kv_norm = RMSNorm(latent, LATENT_EPS)
        self.kv_up = Linear(latent, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), False)
        self.out = Linear(c.num_heads * c.v_head_dim, c.hidden_size, c.attention_bias)

    @property
    def queries(self) -> nn.Module:
        return self.q_up if self.latent else self.q

    def project(self, x: Tensor, ctx: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (T, heads * head_dim): v has zeros after its value_dim channels."""
        assert ctx.rotary is not None
        still = self.head_dim - self.turning
        q = self.q_up(self.q_norm(self.q_down(x))) if self.latent else self.q(x)
        kv, shared = self.kv_down(x).split((self.kv_down.out_features - self.turning, self.turning), 1)
        kv = self.kv_up(self.kv_norm(kv)).unflatten(1, (-1, still + self.value_dim))
        if (split := getattr(inner(self.kv_up), "tp_group", None)) is not None:  # the heads of every rank read it
            shared = split.whole_input(shared)
        q_still, q_turning = q.unflatten(1, (-1, self.head_dim)).split((still, self.turning), 2)
        turned, shared = rotate(q_turning.flatten(1), shared, *ctx.rotary, self.turning)
        k_still, v = kv.split((still, self.value_dim), 2)
        k = torch.cat((k_still, shared[:, None].expand(-1, kv.shape[1], -1)), 2)
        v = F.pad(v, (0, self.head_dim - self.value_dim))
        return torch.cat((q_still, turned.view(q_turning.shape)), 2).flatten(1), k.flatten(1), v.flatten(1)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        mixed = ctx.narrow(self.mix(*self.project(x, ctx), ctx)).unflatten(1, (-1, self.head_dim))
        return self.out(ctx.scaled(mixed[..., : self.value_dim].flatten(1)))


class MiniCPM3(ScaledBody):
    """MiniCPM3 with the head of `task`."""

    config_class = MiniCPM3Config
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification")

    config: MiniCPM3Config

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return LatentAttention(self.config)

    def mlp(self, layer: int) -> nn.Module:
        c = self.config
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, c.mlp_bias)

    def tp_plan(self) -> dict[str, str]:
        # All ranks compute the latents; each projects them to its own heads.
        plan = {name: style for name, style in super().tp_plan().items() if ".attn." not in name}
        queries = "q" if self.config.q_lora_rank is None else "q_up"
        return plan | {
            f"layers.*.attn.{queries}": "colwise",
            "layers.*.attn.kv_up": "colwise",
            "layers.*.attn.out": "rowwise",
        }

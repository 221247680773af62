"""Qwen's models with mixtures of experts: Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671) and Qwen3-MoE
(arXiv:2505.09388), after transformers' Qwen2MoeModel and Qwen3MoeModel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.layers.experts import SparseMLP
from modelcenter.models.layer_types import FULL, SLIDING, LayerTypesFields
from modelcenter.models.mixture import MixtureBody, MixtureConfig
from modelcenter.models.qwen import HeadNormBody


@dataclass(kw_only=True)
class QwenMoeConfig(MixtureConfig):
    """Fields that both versions have.

    intermediate_size: of the layers with one network. expert_intermediate_size: of each expert. A layer has a mixture
    if its number, from 1, is a multiple of sparse_step, and its number from 0 is not in dense_layers.
    sliding_window: how many tokens a token attends to in layers with a window; only with use_sliding_window.
    """

    max_positions: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    normalize_experts: bool = False
    expert_intermediate_size: int
    sparse_step: int = 1
    dense_layers: list[int] | None = None

    def __post_init__(self) -> None:
        given = self.dense_layers  # checked here, as the base rounds numbers
        known = given is None or (isinstance(given, list) and all(type(number) is int for number in given))
        self.require(known, "dense_layers", "a list of numbers of layers, from 0")
        super().__post_init__()
        if not self.use_sliding_window:
            self.sliding_window = None  # transformers writes 0
        self.require(self.sliding_window is None or self.sliding_window > 0, "sliding_window", "at least 1, or None")
        self.require(self.sparse_step > 0, "sparse_step", "at least 1")
        self.require(self.expert_intermediate_size > 0, "expert_intermediate_size", "at least 1")
        self.dense_layers = self.dense_layers or []

    def expert_size(self) -> int:
        return self.expert_intermediate_size

    def is_sparse(self, layer: int) -> bool:
        assert self.dense_layers is not None
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        dense = [place for place, number in enumerate(numbers) if not self.is_sparse(number)]
        changes = {"sparse_step": 1, "dense_layers": dense}
        return super().fields_of_kept_layers(numbers, of_decoder) | changes


@dataclass(kw_only=True)
class Qwen2MoeConfig(QwenMoeConfig, LayerTypesFields):
    """Fields of Qwen2-MoE.

    shared_intermediate_size: of the network that all tokens pass through besides their experts. qkv_bias: q, k and v
    have biases. layer_types: None: with use_sliding_window, every other one of the first max_window_layers has a
    window, from the first on.
    """

    model_type: ClassVar[str] = "qwen2_moe"

    num_experts: int = 60
    experts_per_token: int = 4
    expert_intermediate_size: int = 1408
    shared_intermediate_size: int = 5632
    qkv_bias: bool = True
    max_window_layers: int = 28

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.shared_intermediate_size > 0, "shared_intermediate_size", "at least 1")
        if self.layer_types is None:
            slides = 0 if self.sliding_window is None else self.max_window_layers
            self.layer_types = [SLIDING if i < slides and i % 2 == 0 else FULL for i in range(self.num_layers)]
        self.require(
            self.sliding_window is not None or SLIDING not in self.layer_types,
            "layer_types",
            f"no {SLIDING} without use_sliding_window and a sliding_window",
        )

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token of layer 0, 1, ... attends to; None: all."""
        return self.sliding_window if self.slides(layer) else None


@dataclass(kw_only=True)
class Qwen3MoeConfig(QwenMoeConfig):
    """Fields of Qwen3-MoE. attention_bias: q, k, v and out have biases. With use_sliding_window all layers have a
    window."""

    model_type: ClassVar[str] = "qwen3_moe"

    num_kv_heads: int | None = 4
    num_experts: int = 128
    experts_per_token: int = 8
    expert_intermediate_size: int = 768
    attention_bias: bool = False

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token of layer 0, 1, ... attends to; None: all."""
        return self.sliding_window


class Qwen2Moe(MixtureBody):
    """Qwen2-MoE with the head of `task`."""

    config_class = Qwen2MoeConfig

    config: Qwen2MoeConfig

    def attention(self, layer: int, **options: Any) -> nn.Module:
        c = self.config
        return super().attention(layer, bias=c.qkv_bias, out_bias=False, window=c.window(layer))

    def mixture(self, shared_size: int | None = None) -> SparseMLP:
        return super().mixture(self.config.shared_intermediate_size)


class Qwen3Moe(MixtureBody, HeadNormBody):
    """Qwen3-MoE with the head of `task`."""

    config_class = Qwen3MoeConfig

    config: Qwen3MoeConfig

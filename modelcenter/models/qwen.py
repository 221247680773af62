"""Qwen2 and 2.5 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388), after transformers' Qwen2Model and Qwen3Model."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.layer_types import FULL, SLIDING, LayerTypesFields
from modelcenter.models.llama import LlamaBody, LlamaBodyConfig


@dataclass(kw_only=True)
class Qwen2Config(LlamaBodyConfig, LayerTypesFields):
    """Fields of Qwen2.

    sliding_window: how many tokens a token attends to in a "sliding_attention" layer of `layer_types`; if these are
    None, the layers from max_window_layers on have a window, and only with use_sliding_window.
    """

    model_type: ClassVar[str] = "qwen2"

    max_positions: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            slide = self.sliding_window is not None
            full = self.max_window_layers if slide else self.num_layers
            self.layer_types = [FULL if i < full else SLIDING for i in range(self.num_layers)]

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token of layer 0, 1, ... attends to; None: all."""
        return self.sliding_window if self.slides(layer) else None


@dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    """Fields of Qwen3; head_dim defaults to 128. attention_bias: q, k, v and out have biases."""

    model_type: ClassVar[str] = "qwen3"

    head_dim: int | None = 128
    attention_bias: bool = False


class Qwen2(LlamaBody):
    """Qwen2 with the head of `task`: q, k and v have biases."""

    config_class = Qwen2Config

    config: Qwen2Config

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=True, out_bias=False, window=self.config.window(layer))


class HeadNormBody(LlamaBody):
    """LlamaBody whose heads of q and k are normalised before the rotation, and whose config has `attention_bias` and a
    `window` for each layer."""

    config: Any

    def attention(self, layer: int, **options: Any) -> nn.Module:
        c = self.config
        return super().attention(layer, bias=c.attention_bias, window=c.window(layer), head_norm=self.norm)

    def tp_plan(self) -> dict[str, str]:
        # Each rank normalises its own heads.
        return super().tp_plan() | {"layers.*.attn.q_norm": "partial", "layers.*.attn.k_norm": "partial"}


class Qwen3(HeadNormBody):
    """Qwen3 with the head of `task`."""

    config_class = Qwen3Config

    config: Qwen3Config

"""SmolLM3 (Hugging Face 2025), after transformers' SmolLM3Model and its heads: Llama with layers in which queries and
keys are not rotated (arXiv:2501.18795), and windows in such layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.packing import Packed
from modelcenter.models.layer_types import FULL, SLIDING, LayerTypesFields
from modelcenter.models.llama import Llama, LlamaConfig


@dataclass(kw_only=True)
class SmolLM3Config(LlamaConfig, LayerTypesFields):
    """Fields of SmolLM3; the biases are Llama's.

    no_rope_layers: for each layer 1 if its queries and keys are rotated, and 0 if they are not, despite the name, which
    is that of transformers; numbers after the last layer's are not read. None: no rotation in every
    `no_rope_layer_interval`-th layer.
    sliding_window: how many tokens a token attends to in a "sliding_attention" layer of `layer_types`; if these are
    None, with use_sliding_window the layers without rotation have a window.
    """

    model_type: ClassVar[str] = "smollm3"

    num_kv_heads: int | None = 4
    max_positions: int = 32768
    rope_theta: float = 2000000.0
    pad_token_id: int | None = 128004
    tie_embeddings: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.no_rope_layers is None:
            self.require(self.no_rope_layer_interval > 0, "no_rope_layer_interval", "at least 1")
            self.no_rope_layers = [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.num_layers)]
        given = self.no_rope_layers  # checked here, as the base rounds numbers
        known = isinstance(given, list) and len(given) >= self.num_layers and all(turned in (0, 1) for turned in given)
        self.require(known, "no_rope_layers", f"a list of at least {self.num_layers} (num_layers), each 0 or 1")
        super().__post_init__()
        self.require(self.sliding_window is None or self.sliding_window > 0, "sliding_window", "at least 1, or None")
        windows = self.use_sliding_window and self.sliding_window is not None
        if self.layer_types is None:
            self.layer_types = [FULL if self.rotates(i) or not windows else SLIDING for i in range(self.num_layers)]
        # In transformers, it would then depend on the implementation of attention whether there is a window.
        self.require(
            windows or SLIDING not in self.layer_types,
            "layer_types",
            f"no {SLIDING} without use_sliding_window and a sliding_window",
        )

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        turned = [int(self.rotates(number)) for number in numbers]
        return super().fields_of_kept_layers(numbers, of_decoder) | {"no_rope_layers": turned}

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of layer 0, 1, ... are rotated."""
        assert self.no_rope_layers is not None
        return self.no_rope_layers[layer] == 1

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token of layer 0, 1, ... attends to; None: all."""
        return self.sliding_window if self.slides(layer) else None


class UnrotatedAttention(SelfAttention):
    """SelfAttention that leaves queries and keys as they are: a token knows the order of others by the mask alone."""

    def rotated(self, q: Tensor, k: Tensor, ctx: Packed) -> tuple[Tensor, Tensor]:
        return q, k


class SmolLM3(Llama):
    """SmolLM3 with the head of `task`."""

    config_class = SmolLM3Config

    config: SmolLM3Config

    def attention(self, layer: int, **options: Any) -> nn.Module:
        c = self.config
        kind = SelfAttention if c.rotates(layer) else UnrotatedAttention
        return super().attention(layer, kind=kind, window=c.window(layer), **options)

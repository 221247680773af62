"""MiniCPM-1B, 2B and the dense path of MiniCPM4 (Hu et al. 2024, arXiv:2404.06395; arXiv:2506.07900), after the code
published with openbmb/MiniCPM-2B: Llama with scaled embeddings, branches and outputs (muP).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.models.llama import LlamaBody, LlamaBodyConfig


@dataclass(kw_only=True)
class ScaledConfig(LlamaBodyConfig):
    """Fields of all MiniCPM models.

    scale_emb: factor of the embeddings. scale_depth / sqrt(num_layers): factor of what each branch adds.
    dim_model_base / hidden_size: factor of the hidden states that enter the vocabulary projection.
    """

    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: int = 1
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.dim_model_base > 0, "dim_model_base", "at least 1")

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        """Each layer adds the same as before."""
        scale = self.scale_depth * (len(numbers) / self.num_layers) ** 0.5
        return super().fields_of_kept_layers(numbers, of_decoder) | {"scale_depth": scale}


@dataclass(kw_only=True)
class MiniCPMConfig(ScaledConfig):
    """Fields of MiniCPM. attention_bias: q, k, v and out have biases.

    sparse_config: of MiniCPM4's sparse attention, which is used from dense_len tokens on; shorter sequences are dense.
    """

    model_type: ClassVar[str] = "minicpm"

    attention_bias: bool = False
    sparse_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.head_dim == self.hidden_size // self.num_heads
        self.require(whole, "head_dim", "hidden_size / num_heads: the config.json of MiniCPM cannot say otherwise")

    @property
    def dense_tokens(self) -> int | None:
        """The number of tokens in the longest sequence with dense attention; None: unlimited."""
        return None if self.sparse_config is None else self.sparse_config.get("dense_len", 8192)


class ScaledBody(LlamaBody):
    """Llama's body with MiniCPM's scales."""

    config: ScaledConfig

    @property
    def embedding_scale(self) -> float:
        return self.config.scale_emb

    @property
    def branch_scale(self) -> float:
        return self.config.scale_depth / self.config.num_layers**0.5

    @property
    def logit_scale(self) -> float:
        return self.config.dim_model_base / self.config.hidden_size


class MiniCPM(ScaledBody):
    """MiniCPM with the head of `task`."""

    config_class = MiniCPMConfig
    tasks = ("base", "embedding", "multi-vector", "causal-lm", "sequence-classification")

    config: MiniCPMConfig

    def attention(self, layer: int, **options: Any) -> nn.Module:
        return super().attention(layer, bias=self.config.attention_bias)

    def check_length(self, longest: int) -> None:
        dense = self.config.dense_tokens
        if dense is not None and longest > dense:
            raise ValueError(
                f"input_ids: a sequence has {longest} tokens, but beyond {dense} (sparse_config.dense_len) its "
                "attention would be sparse, which is not supported; truncate to that, or load with sparse_config=None"
            )

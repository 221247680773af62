"""NomicBERT with mixtures of experts (Nussbaum and Duderstadt 2025, arXiv:2502.07972), after the code of its authors:
NomicBERT with biases, and no gates in its feed-forward networks. In every second layer a token passes through a few of
several such networks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modelcenter.layers.attention import SelfAttention
from modelcenter.layers.block import PostNormBlock
from modelcenter.layers.experts import SparseMLP
from modelcenter.layers.mlp import MLP
from modelcenter.models.nomic_bert import NomicBert, NomicBertConfig


@dataclass(kw_only=True)
class NomicBertMoeConfig(NomicBertConfig):
    """Fields of NomicBERT, and of its mixtures of experts. What the authors' code cannot build is refused.

    num_experts: networks of a mixture; 0: no layer has one. experts_per_token: how many of them each token passes
    through. expert_interval: layers 1, 1 + expert_interval, 1 + 2 expert_interval, ... have a mixture, counted from 0.
    intermediate_size: of each expert, too. classifier_dropout: None: dropout. rope_scaling: None or "dynamic", see
    NomicBertConfig.
    """

    model_type: ClassVar[str] = "nomic_bert_moe"

    hidden_act: str = "gelu"
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = 0.1
    pad_token_id: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_interval: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classifier_dropout is None:
            self.classifier_dropout = self.dropout
        self.require_one_of("hidden_act", ("gelu",))
        self.require(self.type_vocab_size > 0, "type_vocab_size", "at least 1")
        whole = self.hidden_size // self.num_heads
        self.require(self.head_dim == whole, "head_dim", f"{whole}, hidden_size / num_heads: there is no field for it")
        self.require(self.tie_embeddings, "tie_embeddings", "True: the head over the vocabulary is the embedding table")
        scaling = self.rope_scaling
        factor: Any = (scaling or {}).get("factor")
        known = type(factor) in (int, float) and factor > 0 and scaling == {"rope_type": "dynamic", "factor": factor}
        expected = "None or {'rope_type': 'dynamic', 'factor': a number above 0}"
        self.require(scaling is None or known, "rope_scaling", expected)
        self.require(self.num_experts >= 0, "num_experts", "at least 0")
        if self.num_experts:
            known = 0 < self.experts_per_token <= self.num_experts
            self.require(known, "experts_per_token", f"1 to {self.num_experts} (num_experts)")
            self.require(self.expert_interval > 1, "expert_interval", "at least 2, or num_experts=0 for no mixtures")
        else:
            self.experts_per_token = self.expert_interval = 1  # the authors' code divides numbers of layers by this

    def is_sparse(self, layer: int) -> bool:
        """Whether layer 0, 1, ... has a mixture of experts, and not one network."""
        return self.num_experts > 0 and layer % self.expert_interval == 1


class NomicBertMoe(NomicBert):
    """NomicBERT with mixtures of experts, with the head of `task`.

    Training adds no loss for the balance of the experts: the published code defines none for these models.
    """

    config_class = NomicBertMoeConfig

    config: NomicBertMoeConfig

    def make_layers(self) -> nn.ModuleList:
        c, width = self.config, self.config.hidden_size
        return nn.ModuleList(
            PostNormBlock(
                SelfAttention(width, c.num_heads, c.attention_dropout),
                self.mixture() if c.is_sparse(layer) else MLP(width, c.intermediate_size, c.hidden_act),
                width,
                c.norm_eps,
                c.dropout,
            )
            for layer in range(c.num_layers)
        )

    def mixture(self) -> SparseMLP:
        c = self.config
        experts = c.num_experts, c.experts_per_token
        return SparseMLP(
            c.hidden_size, c.intermediate_size, *experts, c.hidden_act, normalized=False, gated=False, bias=True
        )

    def tp_plan(self) -> dict[str, str]:
        sparse = any(map(self.config.is_sparse, range(self.config.num_layers)))
        return super().tp_plan() | ({"layers.*.mlp.experts": "experts"} if sparse else {})

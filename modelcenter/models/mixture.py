"""Llama's body with mixtures of experts in place of feed-forward networks, which Mixtral, OLMoE and Qwen's models with
mixtures share.
"""

from dataclasses import dataclass

from torch import nn

from modelcenter.layers.experts import SparseMLP
from modelcenter.models.llama import LlamaBody, LlamaBodyConfig


@dataclass(kw_only=True)
class MixtureConfig(LlamaBodyConfig):
    """Fields of Llama's body and of its mixtures of experts.

    intermediate_size: of each expert, unless there is an expert_intermediate_size. experts_per_token: how many of the
    num_experts each token passes through. normalize_experts: whether their probabilities are divided by their sum.
    output_router_logits: training adds router_aux_loss_coef times a loss for the balance of the experts
    (layers.experts.Balance); the name is that of transformers.
    """

    num_experts: int
    experts_per_token: int
    normalize_experts: bool = True
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.num_experts > 0, "num_experts", "at least 1")
        known = 0 < self.experts_per_token <= self.num_experts
        self.require(known, "experts_per_token", f"1 to {self.num_experts} (num_experts)")

    def expert_size(self) -> int:
        """The intermediate size of an expert."""
        return self.intermediate_size

    def is_sparse(self, layer: int) -> bool:
        """Whether layer 0, 1, ... has a mixture of experts, and not one network."""
        return True


class MixtureBody(LlamaBody):
    """LlamaBody with a mixture of experts in the layers for which the config says so."""

    config: MixtureConfig

    def mlp(self, layer: int) -> nn.Module:
        return self.mixture() if self.config.is_sparse(layer) else super().mlp(layer)

    def mixture(self, shared_size: int | None = None) -> SparseMLP:
        """A mixture of experts. shared_size: see SparseMLP."""
        c = self.config
        return SparseMLP(
            c.hidden_size,
            c.expert_size(),
            c.num_experts,
            c.experts_per_token,
            c.hidden_act,
            c.normalize_experts,
            shared_size,
        )

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        styles = {name: plan.pop(f"layers.*.mlp.{name}", "colwise") for name in ("gate", "up", "down")}
        networks = {f"layers.*.mlp.{inner}{name}": style for inner in ("", "shared.") for name, style in styles.items()}
        networks["layers.*.mlp.experts"] = "experts"
        found = {f"layers.*.{name.split('.', 2)[2]}" for name, _ in self.named_modules() if name.count(".") > 2}
        return plan | {name: style for name, style in networks.items() if name in found}

"""Llama's body with mixtures of experts in place of feed-forward networks, which Mixtral, OLMoE, GraniteMoE and Qwen's
models with mixtures share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from modelcenter.layers.experts import BALANCE, Balance, SparseMLP
from modelcenter.layers.packing import Packed
from modelcenter.models.inputs import Batch
from modelcenter.models.llama import LlamaBody, LlamaBodyConfig
from modelcenter.models.outputs import ModelOutput


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
    """LlamaBody with a mixture of experts in the layers for which the config says so.

    In training with `output_router_logits`, the loss of a language model has a second term, for the balance of the
    experts, as in transformers, whose evaluation has it too. Its value for a global batch depends on how often all
    tokens of it choose each expert: see `expert_totals`.
    """

    config: MixtureConfig
    # (experts,) how often a batch chooses each expert -> the same of its global batch. None: they are the same. Set
    # where a global batch consists of several (modelcenter.training.expert_balance).
    expert_totals: Callable[[Tensor], Tensor] | None = None

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
            shared_size=shared_size,
        )

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        styles = {name: plan.pop(f"layers.*.mlp.{name}", "colwise") for name in ("gate", "up", "down")}
        networks = {f"layers.*.mlp.{inner}{name}": style for inner in ("", "shared.") for name, style in styles.items()}
        networks["layers.*.mlp.experts"] = "experts"
        found = {f"layers.*.{name.split('.', 2)[2]}" for name, _ in self.named_modules() if name.count(".") > 2}
        return plan | {name: style for name, style in networks.items() if name in found}

    # -- the balance of the experts ------------------------------------------------------------------------------------

    @property
    def balances_experts(self) -> bool:
        """Whether the loss has a term for the balance of the experts now."""
        wanted = self.config.output_router_logits and self.task == "causal-lm" and self.training
        return wanted and any(map(self.config.is_sparse, range(self.config.num_layers)))

    def _balances(self, batch: Batch) -> bool:
        return self.balances_experts and batch.get("labels") is not None and not batch.get("output_log_probs")

    def begin(self, batch: Batch) -> tuple[Tensor, Packed]:
        x, ctx = super().begin(batch)
        return x, replace(ctx, balance=Balance(ctx)) if self._balances(batch) else ctx

    def without_unneeded(self, ctx: Packed, batch: Batch) -> Packed:
        return ctx if self._balances(batch) else super().without_unneeded(ctx, batch)

    def reads(self, ctx: Packed, batch: Batch) -> Tensor | None:
        return None if self._balances(batch) else super().reads(ctx, batch)

    def loss_counts(self, batch: Batch) -> dict[str, int]:
        counts = super().loss_counts(batch)
        return counts | {BALANCE: self._count_tokens(batch)} if self.balances_experts else counts

    def _count_tokens(self, batch: Batch) -> int:
        """The number of tokens that pass through the layers, which is known on the host if the batch is there."""
        if (cu := batch.get("cu_seqlens")) is not None:
            return int(cu[-1]) + self.prefix_tokens * (len(cu) - 1)
        rows, columns = batch["labels"].shape
        mask = batch.get("attention_mask")
        return (rows * columns if mask is None else int((mask != 0).sum())) + self.prefix_tokens * rows

    def end(self, x: Tensor, ctx: Packed, batch: Batch) -> ModelOutput:
        out = super().end(x, ctx, batch)
        if ctx.balance is None:
            return out
        chosen, probabilities, layers = ctx.balance.sums()
        totals = chosen if self.expert_totals is None else self.expert_totals(chosen)
        rows = max(self.counts(batch)[BALANCE], 1) * layers
        term = (totals * probabilities).sum() * (self.config.num_experts / rows**2)
        out["loss"] = out["loss"] + self.config.router_aux_loss_coef * term
        out[BALANCE], out["expert_counts"] = term.detach(), chosen
        return out

    def stage_homes(self) -> dict[str, Sequence[int]]:
        if self.config.output_router_logits and self.task == "causal-lm":
            raise ValueError(
                "output_router_logits: with pipeline stages (pp_size) no rank sees all layers, whose experts are "
                "balanced together; load the model with output_router_logits=False, or use pp_size=1"
            )
        return super().stage_homes()

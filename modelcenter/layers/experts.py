"""Feed-forward networks with a mixture of experts."""

import torch
from torch import Tensor, nn

from engine.ops import Experts, eager, linear
from modelcenter.layers.linear import Linear
from modelcenter.layers.mlp import ACTIVATIONS, GatedMLP
from modelcenter.layers.packing import Packed

BALANCE = "aux_loss"  # the term of a loss for the balance of experts, by transformers' name of the output


class Router(nn.Module):
    """x (T, hidden_size) -> the logits (T, num_experts) by which each token's experts are chosen."""

    def __init__(self, hidden_size: int, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Balance:
    """How often the tokens of a batch choose each expert, and how probable each is, over all layers with a mixture.

    Their product is smallest if all experts are used equally (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).
    The chosen numbers have no gradient, so only the probabilities pull.
    """

    def __init__(self, ctx: Packed):
        self.split, self._real = ctx.split, None
        if ctx.sequences.dummy:
            tokens = ctx.num_tokens * ctx.split.size  # of all ranks, with the dummy sequence
            real = torch.arange(tokens, device=ctx.positions.device) < tokens - ctx.sequences.dummy
            self._real = ctx.split.of_units(ctx.split.local(real)).unsqueeze(1)
        self._chosen: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._open = True

    @eager
    def add(self, logits: Tensor, experts_per_token: int) -> None:
        """Add one layer. logits: (T, experts), of this rank's tokens."""
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.detach().topk(experts_per_token).indices, 1)
        if self._real is not None:
            probabilities, chosen = probabilities * self._real, chosen * self._real
        chosen, probabilities = chosen.sum(0), probabilities.sum(0)
        if self._open:  # not when backward recomputes the layer: they would keep its activations
            self._chosen.append(chosen)
            self._probabilities.append(probabilities)

    def sums(self) -> tuple[Tensor, Tensor, int]:
        """(experts,) how often all tokens of the batch have chosen each expert; (experts,) the sums of their
        probabilities, differentiable; the number of layers. Ends the collection."""
        self._open = False
        pair = torch.stack([torch.stack(sums).sum(0) for sums in (self._chosen, self._probabilities)])
        chosen, probabilities = pair if self.split is None else self.split.sum_of_units(pair)
        return chosen.detach(), probabilities, len(self._chosen)


class SparseMLP(nn.Module):
    """Each token passes through `experts_per_token` of `num_experts` networks. x: (T, hidden_size) -> the same."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        activation: str,
        normalized: bool = True,
        *,
        gated: bool = True,
        bias: bool = False,
        shared_size: int | None = None,
    ):
        """
        Args:
            normalized: whether the probabilities of a token's experts are divided by their sum.
            gated: as GatedMLP, not as MLP. bias: what is added to the sum of a token's experts (NomicBERT).
            shared_size: intermediate size of one more network, which all tokens pass through, with a gate of its own
                (Qwen2-MoE); None: there is none.
        """
        super().__init__()
        self.router = Router(hidden_size, num_experts)
        self.experts = Experts(
            hidden_size, intermediate_size, num_experts, experts_per_token, ACTIVATIONS[activation], normalized, gated
        )
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.shared: GatedMLP | None = None
        if shared_size is not None:
            self.shared = GatedMLP(hidden_size, shared_size, activation)
            self.shared_gate = Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor, ctx: Packed) -> Tensor:
        logits = self.router(x)
        if ctx.balance is not None:
            ctx.balance.add(logits, self.experts.experts_per_token)
        out: Tensor = self.experts(x, logits)
        if self.bias is not None:
            out = out + self.bias
        if self.shared is not None:
            out = out + self.shared_gate(x).sigmoid() * self.shared(x, ctx)
        return out

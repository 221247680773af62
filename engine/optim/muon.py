"""Muon on sharded matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from engine.optim.states import (
    check_gradients,
    check_group,
    check_states,
    is_number,
    placed_as,
    placed_gradient,
    undone_on_error,
)
from engine.tensors import cut_dims, is_shard, local_tensor, part_of, with_local

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al., "Muon", 2024): torch.optim.Muon on sharded matrices.

    Momentum and parameters stay sharded. Each matrix is orthogonalised as a whole by one rank, its owner: all-to-all
    sends the parts to the owner and back, so that ranks share the work, with the same bits as in a single process. A
    matrix that is not cut along its rows by one dimension of the mesh is gathered and orthogonalised on every rank.

    It is meant for hidden matrices; embeddings, heads, norms and biases belong in a separate ``AdamOptimizer`` (an
    ``OptimManager`` steps both).

    Args:
        params: fp32 matrices or groups of them, of a model that is already sharded; the same on every rank.
        lr, weight_decay, momentum, nesterov: as in torch.optim.Muon; weight decay is decoupled.
        ns_steps: Newton-Schulz iterations, in bf16.
        adjust_lr: "original": lr is multiplied by sqrt(max(1, rows / columns)); "match_rms_adamw": by
            0.2 * sqrt(max(rows, columns)), so that AdamW's lr and weight decay can be reused (Liu et al. 2025,
            arXiv:2502.16982).

    Raises:
        ValueError: a value is out of its range, or a parameter is not an fp32 matrix or is on meta.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "original",
    ) -> None:
        if not isinstance(ns_steps, int) or ns_steps < 1:
            raise ValueError(f"ns_steps is {ns_steps!r}, expected a whole number of at least 1")
        if adjust_lr not in ("original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr is {adjust_lr!r}, expected original or match_rms_adamw")
        self._ns_steps, self._adjust = ns_steps, adjust_lr
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own has only the state and the groups; copies and pickles need the settings too.
        return {**super().__getstate__(), "_ns_steps": self._ns_steps, "_adjust": self._adjust}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; whole states are cut to this rank's shards.

        Raises ValueError for states that do not fit, and for those of torch's Muon with other ns_steps or adjust_lr.
        """
        check_states(self, state_dict, lambda p: {"momentum_buffer": tuple(p.shape)})
        for number, group in enumerate(state_dict["param_groups"]):
            if "ns_steps" in group:  # written by torch's Muon, which keeps them in its groups
                saved = group["ns_steps"], group.get("adjust_lr_fn") or "original"
                if saved != (self._ns_steps, self._adjust):
                    raise ValueError(
                        f"group {number} of the state has ns_steps {saved[0]} and adjust_lr_fn {saved[1]!r}, but this "
                        f"Muon has ns_steps={self._ns_steps} and adjust_lr={self._adjust!r}: build it with those of "
                        "the state"
                    )
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if "momentum_buffer" in state:
                state["momentum_buffer"] = placed_as(state["momentum_buffer"], parameter)

    @undone_on_error
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks the group's values and parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group)
        if not (is_number(group["momentum"]) and 0 <= group["momentum"] < 1):
            raise ValueError(f"momentum is {group['momentum']!r}, expected at least 0 and below 1")
        for parameter in group["params"]:
            if parameter.ndim != 2 or parameter.dtype != torch.float32:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} is not an fp32 matrix: give "
                    "it to an AdamOptimizer next to this one"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """One step. Collective: the same parameters must have gradients on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self.param_groups)
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            updates = [self._momentum(parameter, group) for parameter in used]
            for parameter, update in zip(used, self._orthogonal(used, updates), strict=True):
                rows, columns = parameter.shape
                ratio = math.sqrt(max(1, rows / columns))
                if self._adjust == "match_rms_adamw":
                    ratio = 0.2 * math.sqrt(max(rows, columns))
                shard = local_tensor(parameter)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(update, alpha=-group["lr"] * ratio)
        return loss

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum, and return this rank's part of the matrix to orthogonalise."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, buffer = local_tensor(placed_gradient(parameter)), local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _orthogonal(self, parameters: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        # {group of ranks: indices of the matrices whose rows it shares}, which go through one all-to-all together.
        shared: dict[dist.ProcessGroup, list[int]] = {}
        for index, parameter in enumerate(parameters):
            group = _rows_over(parameter)
            if group is not None:
                shared.setdefault(group, []).append(index)
                continue
            whole = with_local(parameter, updates[index])
            if is_shard(whole):
                result = self._newton_schulz(whole.full_tensor())
                found[index] = part_of(result, whole.device_mesh, whole.placements)  # a view would keep the result
            else:
                found[index] = self._newton_schulz(whole)
        for group, members in shared.items():
            ranks = dist.get_world_size(group)
            # Sorted by size, so that the matrices of a turn, one per rank, cost about the same.
            members.sort(key=lambda index: (-parameters[index].numel(), index))
            for first in range(0, len(members), ranks):
                turn = members[first : first + ranks]
                shapes = [tuple(parameters[index].shape) for index in turn]
                parts = self._through_owners([updates[index] for index in turn], shapes, group)
                found.update(zip(turn, parts, strict=True))
        return [found[index] for index in range(len(parameters))]

    def _through_owners(
        self, parts: list[torch.Tensor], shapes: list[tuple[int, ...]], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        """Send matrix i to rank i of the group, which orthogonalises it and sends the parts back."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        mine = [part.numel() for part in parts] + [0] * (ranks - len(parts))
        own = shapes[rank] if rank < len(shapes) else (0, 0)
        theirs = [_rows(own[0], ranks, other) * own[1] for other in range(ranks)]
        sent = torch.cat([part.reshape(-1) for part in parts])
        whole = sent.new_empty(sum(theirs))
        dist.all_to_all_single(whole, sent, theirs, mine, group=group)
        if whole.numel():
            whole = self._newton_schulz(whole.view(own)).reshape(-1)
        back = torch.empty_like(sent)
        dist.all_to_all_single(back, whole, mine, theirs, group=group)
        return [flat.view(part.shape) for flat, part in zip(back.split(mine[: len(parts)]), parts, strict=True)]

    def _newton_schulz(self, x: torch.Tensor) -> torch.Tensor:
        """Roughly the orthogonal matrix nearest to ``x``: singular values are between about 0.7 and 1.2."""
        a, b, c = _COEFFICIENTS
        y = x.bfloat16()
        if tall := y.size(0) > y.size(1):
            y = y.T
        y = y / y.norm().clamp(min=_EPS)
        for _ in range(self._ns_steps):
            gram = y @ y.T
            y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        return (y.T if tall else y).to(x.dtype)


def _rows_over(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """The group of ranks over which the rows of a matrix are cut; None: it is whole, or cut in another way."""
    if not is_shard(parameter):
        return None
    cut = cut_dims(parameter)
    if len(cut) != 1:
        return None
    from torch.distributed.tensor import Shard  # imported already, since there is a shard

    placement = parameter.placements[cut[0]]
    if type(placement) is not Shard or placement.dim != 0:
        return None
    return parameter.device_mesh.get_group(cut[0])


def _rows(total: int, ranks: int, rank: int) -> int:
    """The number of rows, out of ``total``, that DTensor gives to a rank."""
    each = -(-total // ranks)
    return max(0, min(each, total - each * rank))

"""AdamW on local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from engine.optim.rounding import rounding_key, stochastic_round_
from engine.torch_compat import local_tensor

_CHUNK = 1 << 24  # elements of 16-bit gradients that are raised to fp32 at a time

# What a kernel works on: this rank's shard of a parameter, of its gradient, and the parameter's state.
_Entry = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class AdamOptimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) by torch's fused kernel.

    The kernel works on the shard of each parameter that this rank holds, so nothing is dispatched through DTensor; the
    states (``exp_avg``, ``exp_avg_sq``, and ``master``, an fp32 copy, for 16-bit parameters) are placed as their
    parameter is, so that checkpoints reshard them. Weight decay is decoupled for every dtype (BMTrain's class
    couples it for fp32 parameters). Moments are fp32.

    Args:
        params: parameters or groups, as in torch; from a model that is already sharded.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW, weight_decay 0 by default.
        hold_steps: the first steps gather moments and change no parameter.

    Raises:
        ValueError: a value is out of its range, or a parameter is on meta.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        if not isinstance(hold_steps, int) or hold_steps < 0:
            raise ValueError(f"hold_steps is {hold_steps!r}, expected a whole number of at least 0")
        self._hold_steps = hold_steps
        super().__init__(params, defaults)

    @property
    def scale(self) -> float:
        """The loss scale of the OptimManager that has this optimizer, 1 without one. Reads the device."""
        manager = getattr(self, "_engine_manager", None)
        return 1.0 if manager is None or manager() is None else manager().loss_scale

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; checks the group's values and parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]!r}, expected at least 0")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas is {group['betas']!r}, expected two numbers of at least 0 and below 1")
        if any(p.is_meta for p in group["params"]):
            raise ValueError("a parameter is on the meta device: call engine.materialize(model) before the optimizer")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """One step, without a host synchronisation.

        Args:
            closure: recomputes the loss, as in torch.
            grad_scale: 0-d fp32; gradients are divided by it, inside the kernel (clipping and loss scaling).
            found_inf: 0-d fp32; where it is 1 the step changes nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used: list[_Entry] = []
            at_random: list[tuple[torch.Tensor, int, _Entry]] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter] or self._init_state(parameter)
                    used.append((local_tensor(parameter), local_tensor(parameter.grad), state))
                    if (key := rounding_key(parameter)) is not None:
                        at_random.append((parameter, key, used[-1]))
            if not used:
                continue
            steps = [state["step"] for _, _, state in used]
            if self._hold_steps and steps[0].item() < self._hold_steps:
                group = {**group, "lr": 0.0}
            torch._foreach_add_(steps, 1)
            kinds: dict[tuple[torch.device, torch.dtype], list[_Entry]] = {}
            rounded = {id(entry) for _, _, entry in at_random}
            for entry in used:
                if entry[0].numel() and id(entry) not in rounded:  # kernels need not like empty shards
                    kinds.setdefault((entry[0].device, entry[0].dtype), []).append(entry)
            for (device, dtype), entries in kinds.items():
                scale = None if grad_scale is None else grad_scale.to(device, non_blocking=True)
                skip = None if found_inf is None else found_inf.to(device, non_blocking=True)
                update = _update if dtype == torch.float32 else _update_masters
                update(group, entries, scale, skip)
            for parameter, key, (shard, gradient, state) in at_random:
                if shard.numel():
                    values = shard.float()
                    scale = None if grad_scale is None else grad_scale.to(shard.device, non_blocking=True)
                    skip = None if found_inf is None else found_inf.to(shard.device, non_blocking=True)
                    _update(group, [(values, gradient.float(), state)], scale, skip)
                    stochastic_round_(parameter, values, key, state["step"])  # exact where the step was skipped
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf.to(step.device, non_blocking=True) for step in steps])
        return loss

    def _init_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.dtype != torch.float32 and rounding_key(parameter) is None:
            state["master"] = parameter.detach().to(torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but states keep fp32 for 16-bit parameters, which torch would round."""
        super().load_state_dict(state_dict)
        ours = [p for group in self.param_groups for p in group["params"]]
        theirs = [index for group in state_dict["param_groups"] for index in group["params"]]
        for parameter, index in zip(ours, theirs, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and parameter.dtype != torch.float32 and name != "step":
                    keep = value.detach().to(dtype=torch.float32, copy=True)
                    self.state[parameter][name] = keep if isinstance(keep, DTensor) else keep.to(parameter.device)
            if "step" in self.state.get(parameter, {}):
                self.state[parameter]["step"] = self.state[parameter]["step"].to(parameter.device, torch.float32)


def _update(
    group: dict[str, Any], entries: list[_Entry], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
) -> None:
    torch._fused_adamw_(
        [shard for shard, _, _ in entries],
        [gradient for _, gradient, _ in entries],
        [local_tensor(state["exp_avg"]) for _, _, state in entries],
        [local_tensor(state["exp_avg_sq"]) for _, _, state in entries],
        [],
        [state["step"] for _, _, state in entries],
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def _update_masters(
    group: dict[str, Any], entries: list[_Entry], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
) -> None:
    """Step on the fp32 masters, then round them into the parameters; a chunk at a time, to bound the memory."""
    chunk: list[_Entry] = []
    elements = 0
    for index, (shard, gradient, state) in enumerate(entries):
        chunk.append((local_tensor(state["master"]), gradient.float(), state))
        elements += shard.numel()
        if elements >= _CHUNK or index == len(entries) - 1:
            _update(group, chunk, grad_scale, found_inf)
            targets = [target for target, _, _ in entries[index + 1 - len(chunk) : index + 1]]
            torch._foreach_copy_(targets, [master for master, _, _ in chunk])
            chunk, elements = [], 0

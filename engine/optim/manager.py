"""``OptimManager``, one object for a training step: loss scale, clipping, finite check, optimizers and schedules."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from engine import runtime
from engine.optim.base import FusedOptimizer
from engine.optim.batch import same_objects
from engine.optim.checks import check_optimizer
from engine.optim.clip import clip_coefficient, grad_norm, scale_gradients_
from engine.optim.states import whole_states, with_parts, with_placed_states


class OptimManager:
    """Steps several optimizers together, as in BMTrain.

    ::

        manager = OptimManager(loss_scale=2**16)            # fp16; leave out for fp32 and bf16
        manager.add_optimizer(optimizer, lr_scheduler)
        for batch in batches:
            manager.zero_grad()
            manager.backward(model(batch))
            norm = manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()

    A step whose gradients are not finite on some rank is skipped on all ranks; learning-rate schedules count it all the
    same. ``AdamOptimizer``, ``AdamW8bit`` and ``Lion`` skip it on the device; for other optimizers, the host waits for
    the device. With a loss scale, the scale is then divided by ``loss_scale_factor``, and multiplied by it again after
    ``loss_scale_steps`` good steps, within its bounds.

    Args:
        loss_scale: the initial loss scale; None: no scaling.
        loss_scale_factor: above 1.
        loss_scale_steps: number of consecutive good steps after which the scale grows.
        min_loss_scale, max_loss_scale: bounds of the scale.
        grad_scale: gradients are the sum over ranks divided by this; None: the average.
        abort_after: raise FloatingPointError after this many skipped steps in a row (steps that only lower the loss
            scale do not count); None: never. On a GPU it is noticed one step late.
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float = 2.0,
        loss_scale_steps: int = 1024,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float("inf"),
        grad_scale: float | None = None,
        abort_after: int | None = 16,
    ) -> None:
        _check_loss_scale(loss_scale, loss_scale_factor, loss_scale_steps, min_loss_scale, max_loss_scale)
        if grad_scale is not None and not (_is_number(grad_scale) and 0 < grad_scale < math.inf):
            raise ValueError(f"grad_scale is {grad_scale!r}, expected a number above 0 and finite, or None")
        if abort_after is not None and not (_is_number(abort_after) and abort_after >= 1):
            raise ValueError(f"abort_after is {abort_after!r}, expected a number of steps of at least 1, or None")
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[Any] = []
        self._first_scale = loss_scale
        self._factor, self._interval = float(loss_scale_factor), int(loss_scale_steps)
        self.grad_scale = grad_scale
        self._bounds = (float(min_loss_scale), float(max_loss_scale))
        self._abort_after = abort_after
        # On the parameters' device, once there are some: scale, good steps, and (skipped in all, skipped in a row).
        self._scale: torch.Tensor | None = None
        self._good: torch.Tensor | None = None
        self._skipped: torch.Tensor | None = None
        self._seen: tuple[torch.Tensor, Any] | None = None
        self._norms: dict[int, torch.Tensor] = {}
        self._deferred: dict[int, torch.Tensor] = {}

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Add an optimizer, and a schedule to step after it (anything with ``step()``).

        Raises ValueError if it is not an optimizer, holds parameters from before ``engine.shard`` or of another one,
        or has a ``step`` that needs a closure; or if the schedule has no ``step``, needs a metric or was added before.
        """
        self._check_new(optimizer, lr_scheduler)
        self.optimizers.append(optimizer)
        if isinstance(optimizer, FusedOptimizer):
            optimizer.manager = weakref.ref(self)
        self.lr_schedulers.append(lr_scheduler)
        if self._skipped is None:
            device = next((p.device for g in optimizer.param_groups for p in g["params"]), runtime.device())
            self._skipped = torch.zeros(2, dtype=torch.int64, device=device)
            if self._first_scale is not None:
                self._scale = torch.tensor(float(self._first_scale), dtype=torch.float32, device=device)
                self._good = torch.zeros((), dtype=torch.int32, device=device)

    def _check_new(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"add_optimizer got a {type(optimizer).__name__}, expected an optimizer of torch's kind")
        check_optimizer(optimizer)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{type(optimizer).__name__} needs a closure that recomputes the loss, which step() does not have: "
                "leave it out of add_optimizer and call its step(closure)"
            )
        taken = {id(p): o for o in self.optimizers for p in _parameters(o.param_groups)}
        for parameter in _parameters(optimizer.param_groups):
            if (other := taken.get(id(parameter))) is not None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is in {type(other).__name__} and in "
                    f"{type(optimizer).__name__}, which would both step it: give each parameter to one optimizer"
                )
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a metric, which step() does not have: leave it out of add_optimizer and call "
                "its step(metric) after each evaluation"
            )
        if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
            raise ValueError(f"lr_scheduler is {lr_scheduler!r}, expected a schedule, which has step(), or None")
        if lr_scheduler is not None and any(known is lr_scheduler for known in self.lr_schedulers):
            raise ValueError(
                f"this {type(lr_scheduler).__name__} was added with an earlier optimizer, and would count each step "
                "twice: give each optimizer a schedule of its own"
            )

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without scaling. Reads the device."""
        if self._scale is None:
            return float(self._first_scale or 1.0)
        return self._scale.item()

    @property
    def skipped(self) -> int:
        """Steps skipped so far. Reads the device."""
        return 0 if self._skipped is None else int(self._skipped[0].item())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale (and, with ``grad_scale``, the number of ranks over it)."""
        if self.grad_scale is not None:
            loss = loss * (runtime.world_size() / self.grad_scale)  # because backward averages
        if self._first_scale is None:
            return loss
        if self._scale is None:
            raise ValueError("the loss scale needs an optimizer first: call add_optimizer before backward")
        return loss * self._scale.to(loss.device)

    def backward(self, loss: torch.Tensor) -> None:
        """``backward`` of the scaled loss."""
        self.scale_loss(loss).backward()

    def zero_grad(self) -> None:
        """Drop the gradients of every optimizer."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._norms.clear()
        self._deferred.clear()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        param_groups: Iterable[Any],
        max_norm: float,
        norm_type: float = 2.0,
        eps: float = 1e-6,
        scale: float | None = None,
        defer: bool = False,
    ) -> torch.Tensor:
        """Clip the gradients of ``param_groups`` (groups, parameters or one of either) to ``max_norm`` together.

        Returns the norm before clipping, without the loss scale: 0-d, on the device, equal on all ranks.

        Args:
            scale: ignored; older versions of BMTrain required it, but the loss scale is known here.
            defer: leave the gradients as they are, and let ``step`` scale them inside its kernel, which saves a pass
                over them. Works for the optimizers of this package whose parameters are all in ``param_groups``.
        """
        parameters = _parameters(param_groups)
        norm = grad_norm(parameters, norm_type)
        if self._scale is not None:
            norm = norm / self._scale
        coefficient = clip_coefficient(norm, max_norm, eps)
        left = parameters  # those to be scaled here
        inside: set[int] = set()
        for index, optimizer in enumerate(self.optimizers):
            own = _parameters(optimizer.param_groups)
            if not same_objects(own, parameters):
                # Made only if needed: with many small parameters, the set costs as much as their norm.
                inside = inside or set(map(id, parameters))
                if not inside.issuperset(map(id, own)):
                    continue
            self._norms[index] = norm
            if defer and isinstance(optimizer, FusedOptimizer):
                self._deferred[index] = coefficient
                left = _without(left, own)
        if left:
            scale_gradients_(left, coefficient)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Step every optimizer and schedule; skip the optimizers if a gradient is not finite.

        Raises FloatingPointError after ``abort_after`` skipped steps in a row.
        """
        if self._skipped is None:
            raise ValueError("step needs an optimizer: call add_optimizer first")
        self._check_abort()
        found = self._found_inf()
        for index, optimizer in enumerate(self.optimizers):
            coefficient = self._deferred.get(index)
            if isinstance(optimizer, FusedOptimizer):
                divisor = self._scale
                if coefficient is not None:
                    divisor = (1.0 if divisor is None else divisor) / coefficient
                optimizer.step(grad_scale=divisor, found_inf=found)
            elif not found.item():  # a foreign optimizer cannot skip the step on the device
                if self._scale is not None:
                    scale_gradients_(_parameters(optimizer.param_groups), 1.0 / self._scale)
                optimizer.step()
        for scheduler in self.lr_schedulers:
            if scheduler is not None:
                scheduler.step()
        self._count(found)
        self._norms.clear()
        self._deferred.clear()

    def _found_inf(self) -> torch.Tensor:
        """1 if a gradient is not finite, else 0: 0-d, fp32, equal on all ranks."""
        assert self._skipped is not None
        others = [o for i, o in enumerate(self.optimizers) if i not in self._norms]
        rest = [p for optimizer in others for p in _parameters(optimizer.param_groups)]
        norms = list(self._norms.values())
        # All stages of a pipeline take part in this norm, because a stage without parameters of an optimizer cannot
        # tell whether they were clipped.
        if others or runtime.stages() > 1:
            norms.append(grad_norm(rest))
        finite = torch.stack([norm.to(self._skipped.device) for norm in norms]).isfinite().all()
        return 1.0 - finite.float()

    def _count(self, found: torch.Tensor) -> None:
        assert self._skipped is not None
        skip = found.long()
        counts = skip
        if self._scale is not None and self._good is not None:
            counts = skip * (self._scale <= self._bounds[0]).long()
            torch._amp_update_scale_(self._scale, self._good, found, self._factor, 1.0 / self._factor, self._interval)
            self._scale.clamp_(*self._bounds)
        self._skipped[0] += skip
        # A skipped step that only lowered the loss scale neither extends nor ends a sequence of skipped steps.
        self._skipped[1] = (self._skipped[1] + counts) * torch.where(skip > 0, 1, 0)
        if self._abort_after is None:
            return
        if self._skipped.device.type == "cuda":
            copy = torch.empty(2, dtype=torch.int64, pin_memory=True)
            copy.copy_(self._skipped, non_blocking=True)
            # Recorded on the device that copies, which need not be the current one.
            self._seen = (copy, torch.cuda.current_stream(self._skipped.device).record_event())
        else:
            self._seen = (self._skipped, None)
            self._check_abort()

    def _check_abort(self) -> None:
        if self._seen is None or self._abort_after is None:
            return
        counts, event = self._seen
        if event is not None:
            event.synchronize()  # the previous step's: the device still has all of this step to work on
        in_all, in_a_row = counts.tolist()
        if in_a_row >= self._abort_after:
            raise FloatingPointError(
                f"gradients were not finite in {in_a_row} steps in a row ({in_all} in all): lower the learning rate, "
                "check the data of these steps, or use bf16 or fp32 instead of fp16"
            )

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """Loss scale, counts, and the states of optimizers and schedules, in torch's format.

        Args:
            gather_opt: make states whole, on the CPU of every rank, so that they load on any number of ranks
                (collective); otherwise they are this rank's shards.
        """
        complete = whole_states if gather_opt else with_parts
        optimizers = [complete(optimizer.state_dict()) for optimizer in self.optimizers]
        return {
            "loss_scale": None if self._first_scale is None else self.loss_scale,
            "good_steps": 0 if self._good is None else int(self._good.item()),
            "skipped": [0, 0] if self._skipped is None else self._skipped.tolist(),
            "optimizers": optimizers,
            "lr_schedulers": [None if s is None else s.state_dict() for s in self.lr_schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of ``state_dict``; takes BMTrain's, too.

        Raises ValueError if it is not a manager's, if optimizers or schedules do not match in number, or if one of the
        two managers has no loss scale.
        """
        scale = self._check_state(state)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            cuts = isinstance(optimizer, FusedOptimizer)  # it takes its shards of whole states itself
            optimizer.load_state_dict(saved if cuts else with_placed_states(optimizer, saved))
        for i, (scheduler, saved) in enumerate(zip(self.lr_schedulers, state["lr_schedulers"], strict=True)):
            if scheduler is not None and saved is not None:
                scheduler.load_state_dict(saved)
            elif saved is not None and runtime.rank() == 0:
                rates = ", ".join(f"{group['lr']:g}" for group in self.optimizers[i].param_groups)
                warnings.warn(
                    f"optimizer {i} was saved with a learning rate schedule but has none here: its rates stay at "
                    f"{rates}. To continue the schedule, pass it to add_optimizer",
                    stacklevel=2,
                )
        if self._skipped is not None:
            self._skipped.copy_(torch.tensor(state.get("skipped", [0, 0])))
        self._seen = None  # on a GPU, it is a copy of the earlier counts
        if self._scale is not None and self._good is not None:
            self._scale.fill_(scale)
            self._good.fill_(state.get("good_steps", 0))

    def _check_state(self, state: Any) -> Any:
        """The loss scale in a manager's state. Raises ValueError if the state does not fit this manager."""
        if not isinstance(state, Mapping):
            raise ValueError(
                f"the state of an OptimManager is a {type(state).__name__}, expected the dict that its state_dict() "
                "returned"
            )
        if lacking := sorted({"optimizers", "lr_schedulers", "loss_scale"} - set(state)):
            raise ValueError(
                f"the state of an OptimManager has no {', '.join(lacking)}, but "
                f"{', '.join(map(str, state)) or 'nothing'}: pass the result of its state_dict(), and an optimizer's "
                "own state to that optimizer"
            )
        for name, here in (("optimizers", self.optimizers), ("lr_schedulers", self.lr_schedulers)):
            if len(state[name]) != len(here):
                raise ValueError(
                    f"the state has {len(state[name])} {name}, but this manager has {len(here)}: call add_optimizer as "
                    "before the save"
                )
        scale = state["loss_scale"] if state.get("loss_scale_enabled", True) else None  # which BMTrain writes
        if (scale is None) != (self._first_scale is None):
            raise ValueError(
                f"the state has loss_scale {scale}, but this manager has {self._first_scale}: give OptimManager a "
                "loss_scale if the saved one had one, else None"
            )
        return scale


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_loss_scale(first: float | None, factor: float, steps: int, least: float, most: float) -> None:
    """Raise ValueError for invalid settings of the loss scale."""
    if first is not None and not (_is_number(first) and math.isfinite(first)):
        raise ValueError(f"loss_scale is {first!r}, expected the initial scale, such as 2**16, or None")
    for name, value in (("min_loss_scale", least), ("max_loss_scale", most)):
        if not _is_number(value):
            raise ValueError(f"{name} is {value!r}, expected a number")
    if not least > 0:
        raise ValueError(f"min_loss_scale is {least}, expected above 0")
    if first is not None and not least <= first <= most:
        raise ValueError(f"loss_scale is {first}, expected {least} to {most} (min_loss_scale and max_loss_scale)")
    if not (_is_number(factor) and 1 < factor < math.inf):
        raise ValueError(f"loss_scale_factor is {factor!r}, expected a number above 1 and finite")
    if not (_is_number(steps) and 1 <= steps < math.inf and steps == int(steps)):
        raise ValueError(f"loss_scale_steps is {steps!r}, expected a whole number of at least 1")


def _parameters(param_groups: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []  # a list, since nested generators would resume twice for each parameter
    for group in [param_groups] if isinstance(param_groups, torch.Tensor | dict) else param_groups:
        given = group["params"] if isinstance(group, dict) else group
        found += [given] if isinstance(given, torch.Tensor) else given
    return found


def _without(these: list[torch.Tensor], those: list[torch.Tensor]) -> list[torch.Tensor]:
    if same_objects(these, those):
        return []
    out = set(map(id, those))
    return [p for p in these if id(p) not in out]

"""Learning-rate schedules under BMTrain's names. They count steps: ``num_iter`` is the number of steps taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any


def _check(name: str, value: Any, least: float = 0.0) -> None:
    """Raise ValueError unless a setting is a finite number of at least ``least``."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and least <= value < math.inf):
        raise ValueError(f"{name} is {value!r}, expected a number of at least {least:g}")


class WarmupLRScheduler:
    """Base of the schedules: ``get_lr_warmup`` for the first ``warmup_iter`` steps, then ``get_lr_decay``.

    Sets the learning rate of step 0 when it is created. Groups with different learning rates keep their ratios (BMTrain
    sets all groups alike): each group's ``lr_scale`` is its learning rate divided by the optimizer's own ``lr``, or by
    the largest group's if no group uses that. A group may also give its ``lr_scale``. The same holds for groups that
    are added later.

    Args:
        optimizer: anything with ``param_groups``.
        start_lr: the peak learning rate, reached at the end of the warm-up.
        warmup_iter: number of warm-up steps; may be 0.
        end_iter: total number of steps; anything for schedules that do not end.
        num_iter: number of steps already taken.

    Raises:
        ValueError: a setting is not a number, below 0 or not finite, or optimizer has no ``param_groups``.
    """

    def __init__(self, optimizer: Any, start_lr: float, warmup_iter: int, end_iter: int, num_iter: int = 0) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"optimizer is a {type(optimizer).__name__}, expected one with param_groups")
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.optimizer = optimizer
        self.num_iter = num_iter
        self.check_settings(vars(self))
        self._current_lr = 0.0
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups if "lr_scale" not in group]
        own = getattr(optimizer, "defaults", {}).get("lr")
        self._reference = own if own in rates or not rates else max(rates)
        self._scales: list[float] = []
        self.step(num_iter)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if one of ``settings``, by name, is invalid, which later would give no rate."""
        for name in ("start_lr", "warmup_iter", "num_iter"):
            _check(name, settings[name])

    def get_lr_warmup(self, num_iter: int) -> float:
        """Learning rate before ``warmup_iter``: linear from 0."""
        return self.start_lr * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Learning rate from ``warmup_iter`` on: constant."""
        return self.start_lr

    def get_lr(self) -> float:
        """Learning rate of the next step, for a group with ``lr_scale`` 1."""
        decide = self.get_lr_warmup if self.num_iter < self.warmup_iter else self.get_lr_decay
        return decide(self.num_iter)

    @property
    def current_lr(self) -> float:
        """The learning rate set last."""
        return self._current_lr

    def step(self, num_iter: int | None = None) -> None:
        """Count a step, or go to ``num_iter`` steps, and set the learning rate of each group.

        Raises ValueError for a ``num_iter`` below 0.
        """
        if num_iter is not None:
            _check("num_iter", num_iter)
        self.num_iter = self.num_iter + 1 if num_iter is None else num_iter
        self._current_lr = self.get_lr()
        for number, group in enumerate(self.optimizer.param_groups):
            if "lr_scale" not in group:  # a new group, or the optimizer has loaded a state without it
                ratio = group["lr"] / self._reference if self._reference else 1.0
                group["lr_scale"] = self._scales[number] if number < len(self._scales) else ratio
            group["lr"] = self._current_lr * group["lr_scale"]
        self._scales = [group["lr_scale"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The settings and counts, without the optimizer."""
        return {
            "start_lr": self.start_lr,
            "warmup_iter": self.warmup_iter,
            "end_iter": self.end_iter,
            "num_iter": self.num_iter,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``. BMTrain's has only the counts; all other settings then stay as they are.

        Raises ValueError if a count is missing or a setting is invalid, and leaves the schedule unchanged.
        """
        if missing := [name for name in WarmupLRScheduler.state_dict(self) if name not in state_dict]:
            raise ValueError(
                f"the state of {type(self).__name__} has no {', '.join(missing)} (it has "
                f"{', '.join(state_dict) or 'nothing'}): pass the result of state_dict() of such a schedule"
            )
        given = {name: state_dict[name] for name in self.state_dict() if name in state_dict}
        self.check_settings({**vars(self), **given})
        vars(self).update(given)
        self.step(self.num_iter)

    def _progress(self, num_iter: int) -> float:
        """From 0 at the end of the warm-up to 1 at ``end_iter`` and after it."""
        return min(1.0, (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter))


class NoDecay(WarmupLRScheduler):
    """Linear warm-up, then constant."""


class Constant(NoDecay):
    """Constant from the first step on, unless given a warm-up."""

    def __init__(
        self, optimizer: Any, start_lr: float, warmup_iter: int = 0, end_iter: int = 0, num_iter: int = 0
    ) -> None:
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)


class Noam(WarmupLRScheduler):
    """``start_lr / sqrt(max(num_iter, warmup_iter))``, times the fraction of the warm-up that is done."""

    def get_lr_warmup(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(max(1, num_iter))


class _Decay(WarmupLRScheduler):
    """Linear warm-up, then from ``start_lr`` down to ``end_lr``, by the fraction of the decay that is left.

    Raises ValueError, too, if ``end_lr`` is below 0 or above ``start_lr``, or ``end_iter`` is no number of at least 0.
    BMTrain's schedules end at 0.
    """

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
        end_lr: float = 0.0,
    ) -> None:
        self.end_lr = end_lr
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        super().check_settings(settings)
        _check("end_iter", settings["end_iter"])
        end_lr, start_lr = settings["end_lr"], settings["start_lr"]
        number = isinstance(end_lr, Real)
        if not (number and 0 <= end_lr <= start_lr):
            raise ValueError(f"end_lr: got {end_lr!r}, expected 0 to start_lr, {start_lr}")

    def get_lr_decay(self, num_iter: int) -> float:
        return self.end_lr + (self.start_lr - self.end_lr) * self._left(num_iter)

    def _left(self, num_iter: int) -> float:
        """The fraction of the decay that is left, from 1 to 0."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "end_lr": self.end_lr}


class Linear(_Decay):
    """Linear warm-up, then linearly to ``end_lr`` at ``end_iter``."""

    def _left(self, num_iter: int) -> float:
        return 1.0 - self._progress(num_iter)


class Cosine(_Decay):
    """Linear warm-up, then half a cosine to ``end_lr`` at ``end_iter``."""

    def _left(self, num_iter: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self._progress(num_iter)))


class Exponential(WarmupLRScheduler):
    """Linear warm-up, then multiplied by ``gamma``, at least 0, at each step."""

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        super().check_settings(settings)
        _check("gamma", settings["gamma"])

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gamma": self.gamma}


class WSD(_Decay):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395): constant after the warm-up, then linearly to
    ``end_lr`` over the last ``decay_iter`` steps; None: a tenth of all steps."""

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
        decay_iter: int | None = None,
        end_lr: float = 0.0,
    ) -> None:
        _check("end_iter", end_iter)
        self.decay_iter = math.ceil(end_iter / 10) if decay_iter is None else decay_iter
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter, end_lr)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        super().check_settings(settings)
        _check("decay_iter", settings["decay_iter"])

    def _left(self, num_iter: int) -> float:
        return min(1.0, max(0, self.end_iter - num_iter) / max(1, self.decay_iter))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "decay_iter": self.decay_iter}

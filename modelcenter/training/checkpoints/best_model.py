"""Which evaluation of a run is the best, and when those that are not have been enough."""

import difflib
import math
from collections.abc import Callable
from typing import Any

from modelcenter.data.examples import Examples
from modelcenter.training.config import TrainConfig
from modelcenter.training.metrics import SMALLER_IS_BETTER


def check_judge(cfg: TrainConfig, task: Any, eval_set: Examples | None) -> None:
    """Raise ValueError, before the first step, where no evaluation could tell which model is best. Collective."""
    for name in ("best_metric", "early_stopping"):
        if getattr(cfg, name) is not None and eval_set is None:
            raise ValueError(f"{name}: there are no rows to evaluate on; give eval_data or eval_fraction")
    if cfg.best_metric is None:
        return
    known, name = task.metric_names(eval_set), cfg.best_metric.removeprefix("eval_")
    if name not in known:
        close = [n for n in known if n.startswith(name)] or difflib.get_close_matches(name, known, 1, cutoff=0.85)
        meant = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"best_metric: got {name!r}, expected one of {', '.join(known)}{meant}")


class Selection:
    """The evaluations of a run by the metric that decides between them.

    An evaluation is kept as {"metric": its name in a row, "value", "step"}; {} is none.

    Attributes:
        metric: its name in a row, with eval_.
        newest: the last evaluation. best: of all. linked: of those whose model is on the disk: what checkpoints/best
            names.
        worse: evaluations in a row that were not the best.
    """

    def __init__(self, metric: str, patience: int | None):
        """metric: with or without eval_. patience: how many evaluations may be worse in a row; None: any number."""
        self.metric = f"eval_{metric.removeprefix('eval_')}"
        self.patience = patience
        self.newest: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self.linked: dict[str, Any] = {}
        self.worse = 0
        self._being_linked: dict[str, Any] = {}  # `linked`, once the checkpoint that is being written is on the disk

    @property
    def smaller_is_better(self) -> bool:
        return self.metric.removeprefix("eval_") in SMALLER_IS_BETTER

    @property
    def patience_is_over(self) -> bool:
        return self.patience is not None and self.worse >= self.patience

    def judge(self, row: dict[str, Any]) -> bool:
        """Take note of an evaluation, a row of metrics.jsonl; whether it is the best so far.

        Raises:
            ValueError: it does not have the metric.
        """
        if self.metric not in row:
            known = ", ".join(key.removeprefix("eval_") for key in row if key.startswith("eval_"))
            raise ValueError(f"best_metric: got {self.metric.removeprefix('eval_')!r}, the evaluation gives {known}")
        self.newest = {"metric": self.metric, "value": row[self.metric], "step": row["step"]}
        better = self._is_better_than(self.best)
        if better:
            self.best = self.newest
        self.worse = 0 if better else self.worse + 1
        return better

    def _is_better_than(self, other: dict[str, Any]) -> bool:
        """Whether the newest evaluation is better than another; a number is better than none."""
        value, sign = self.newest["value"], -1 if self.smaller_is_better else 1
        if value is None or not math.isfinite(value):  # nothing is greater than NaN: it would stay the best
            return False
        return "value" not in other or sign * value > sign * other["value"]

    # -- the models of these evaluations on the disk -----------------------------------------------------------------

    def is_to_be_linked(self, step: int) -> bool:
        """Whether a checkpoint of this step would have the best model on the disk."""
        return self.newest.get("step") == step and self._is_better_than(self.linked)

    def state(self, links: bool) -> dict[str, Any]:
        """For a checkpoint. links: it is_to_be_linked."""
        return {"best": self.best, "linked": self.newest if links else self.linked, "bad_evaluations": self.worse}

    def writing(self, links: bool) -> None:
        """A checkpoint is being written. links: it is_to_be_linked."""
        self._being_linked = self.newest if links else self.linked

    def written(self, whole: bool) -> None:
        """The last checkpoint is on the disk, or could not be written."""
        if whole:
            self.linked = self._being_linked
        else:
            self._being_linked = self.linked

    def load(self, state: dict[str, Any], own: bool, counts: Callable[[dict[str, Any]], bool]) -> None:
        """Go on from a checkpoint.

        Args:
            state: what `state` gave. own: the checkpoint is of this run, and not of another folder. counts: whether an
                evaluation from before the stop still counts.
        """
        linked = state.get("linked", state["best"])
        if counts(state["best"]):
            self.best = state["best"]
            if own:  # patience that was over in another folder would let nothing be trained here
                self.linked, self.worse = linked, state["bad_evaluations"]
        elif own and linked.get("metric") == self.metric and counts(linked):
            self.best = self.linked = linked  # the checkpoint of a better one could not be written
        self._being_linked = self.linked

    def fall_back(self, step: int | None, rows: list[dict[str, Any]]) -> None:
        """The model of the best evaluation is not on the disk: take that of another step, if `rows` has its value."""
        judged = (row for row in reversed(rows) if row["step"] == step and row.get(self.metric) is not None)
        value = next((row[self.metric] for row in judged), None)
        self.best = {} if value is None else {"metric": self.metric, "value": value, "step": step}

"""Model selection: which evaluation of a run is best, where its model is, and when to stop early."""

import difflib
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
from engine.checkpoint import latest_checkpoint
from engine.collectives import from_rank_0
from modelcenter.data.examples import Examples
from modelcenter.training.checkpoints.fingerprints import identity
from modelcenter.training.config import TrainConfig
from modelcenter.training.metrics import SMALLER_IS_BETTER
from modelcenter.training.output.folder import CHECKPOINTS

# Flags, of all tasks, that change a model's scores. A resumed run may change some of them, and --resume PATH others.
_SCORE_FLAGS = (
    "language num_beams max_new_tokens length_penalty no_repeat_ngram_size prefix source_lang target_lang "
    "max_target_length form eval_fraction max_length too_long template train_on reference beta loss_type teacher "
    "teacher_weight teacher_temperature "
    "label_all_tokens doc_stride max_question_length no_answer null_threshold max_answer_length n_best scoring "
    "document packing mask_fraction whole_word word_segmenter next_sentence sentence_order noise_density mean_span "
    "masked_share discriminator_weight"
).split()

log = logging.getLogger(__name__)


def check_best_metric(cfg: TrainConfig, task: Any, eval_set: Examples | None) -> None:
    """Raise ValueError, before the first step, if no evaluation can tell which model is best. Collective."""
    for name in ("best_metric", "early_stopping"):
        if getattr(cfg, name) is not None and eval_set is None:
            raise ValueError(f"{name}: got no rows to evaluate on; give eval_data or eval_fraction")
    if cfg.best_metric is None:
        return
    known, name = [*task.metric_names(eval_set), *task.teacher_metric_names], cfg.best_metric.removeprefix("eval_")
    if name not in known:
        close = [n for n in known if n.startswith(name)] or difflib.get_close_matches(name, known, 1, cutoff=0.85)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"best_metric: got {name!r}, expected one of {', '.join(known)}{hint}")


class ModelSelection:
    """The evaluations of a run, compared by one metric.

    An evaluation is kept as {"metric": its name in a row, "value", "step"}; {} means none.

    Attributes:
        metric: its name in a row, with eval_.
        latest: the last evaluation. best: the best one. best_on_disk: the best one whose model is on disk, which
            checkpoints/best names.
        evaluations_since_best: number of evaluations since the best one.
    """

    def __init__(self, metric: str, patience: int | None):
        """metric: with or without eval_. patience: how many evaluations in a row may be worse; None: no limit."""
        self.metric = f"eval_{metric.removeprefix('eval_')}"
        self.patience = patience
        self.latest: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self.best_on_disk: dict[str, Any] = {}
        self.evaluations_since_best = 0
        self._best_once_written: dict[str, Any] = {}  # best_on_disk once the checkpoint in progress is complete

    @property
    def smaller_is_better(self) -> bool:
        return self.metric.removeprefix("eval_") in SMALLER_IS_BETTER

    @property
    def patience_is_over(self) -> bool:
        return self.patience is not None and self.evaluations_since_best >= self.patience

    def judge(self, row: dict[str, Any]) -> bool:
        """Record an evaluation, a row of metrics.jsonl. Returns whether it is the best so far.

        Raises:
            ValueError: the row lacks the metric.
        """
        if self.metric not in row:
            known = ", ".join(key.removeprefix("eval_") for key in row if key.startswith("eval_"))
            raise ValueError(
                f"best_metric: got {self.metric.removeprefix('eval_')!r}, but the evaluation reports {known}"
            )
        self.latest = {"metric": self.metric, "value": row[self.metric], "step": row["step"]}
        improved = self._latest_is_better_than(self.best)
        if improved:
            self.best = self.latest
        self.evaluations_since_best = 0 if improved else self.evaluations_since_best + 1
        return improved

    def _latest_is_better_than(self, other: dict[str, Any]) -> bool:
        """Whether the last evaluation is better than another; a number is better than none."""
        value, sign = self.latest["value"], -1 if self.smaller_is_better else 1
        if value is None or not math.isfinite(value):  # nothing compares greater than NaN, so it would stay the best
            return False
        return "value" not in other or sign * value > sign * other["value"]

    # -- the models of these evaluations on disk ---------------------------------------------------------------------

    def would_be_best_on_disk(self, step: int) -> bool:
        """Whether the model of this step, once saved, will be the best one on disk."""
        return self.latest.get("step") == step and self._latest_is_better_than(self.best_on_disk)

    def state(self, becomes_best: bool) -> dict[str, Any]:
        """The state for a checkpoint. becomes_best: the result of `would_be_best_on_disk`."""
        on_disk = self.latest if becomes_best else self.best_on_disk
        return {"best": self.best, "linked": on_disk, "bad_evaluations": self.evaluations_since_best}

    def checkpoint_started(self, becomes_best: bool) -> None:
        """Called when a checkpoint is being written. becomes_best: the result of `would_be_best_on_disk`."""
        self._best_once_written = self.latest if becomes_best else self.best_on_disk

    def checkpoint_ended(self, written: bool) -> None:
        """Called when the last checkpoint is on disk, or could not be written."""
        if written:
            self.best_on_disk = self._best_once_written
        else:
            self._best_once_written = self.best_on_disk

    def load(self, state: dict[str, Any], in_output_dir: bool, still_counts: Callable[[dict[str, Any]], bool]) -> None:
        """Resume from a checkpoint.

        Args:
            state: the result of `state`. in_output_dir: the checkpoint is this run's, and not in another folder.
            still_counts: tells whether an evaluation from before the stop still counts.
        """
        on_disk = state.get("linked", state["best"])
        if still_counts(state["best"]):
            self.best = state["best"]
            if in_output_dir:  # if patience ran out in another folder, nothing would be trained here
                self.best_on_disk, self.evaluations_since_best = on_disk, state["bad_evaluations"]
        elif in_output_dir and on_disk.get("metric") == self.metric and still_counts(on_disk):
            self.best = self.best_on_disk = on_disk  # the checkpoint of a better one could not be written
        self._best_once_written = self.best_on_disk

    def fall_back(self, step: int | None, rows: list[dict[str, Any]]) -> None:
        """Called if the best evaluation's model is not on disk: take that of another step, if `rows` has its value."""
        judged = (row for row in reversed(rows) if row["step"] == step and row.get(self.metric) is not None)
        value = next((row[self.metric] for row in judged), None)
        self.best = {} if value is None else {"metric": self.metric, "value": value, "step": step}


# -- evaluations from before a stop ----------------------------------------------------------------------------------


def evaluation_conditions(cfg: TrainConfig, eval_set: Examples | None) -> dict[str, Any]:
    """The data and flags that scores depend on; only scores with equal conditions compare. {}: no evaluation data."""
    if eval_set is None:
        return {}
    names = [*_SCORE_FLAGS, *(f"{role}_column" for role in cfg.roles)]
    if cfg.eval_fraction is not None:
        names.append("seed")  # it draws the rows that are held out
    if cfg.task == "dpo":
        names.append("label_smoothing")  # other tasks use it only in the training loss
    flags = {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
    return json.loads(json.dumps({"eval_data": identity(eval_set.fingerprint()), **flags}))


def changed_condition(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The flag that makes scores from before a stop incomparable with new ones; None: they compare. Collective.

    Args:
        before, now: evaluation_conditions; an older version's may lack some.
    """
    return from_rank_0(next((name for name in now if name in before and now[name] != before[name]), None))


def still_counts(cfg: TrainConfig, metric: str, best: dict[str, Any]) -> bool:
    """Whether the best evaluation before a stop is still the one to beat: its metric is the current one and, if its
    model may become the run's model, that is in output_dir. Collective."""
    if not best:
        return True
    reason = ""
    if best["metric"] != metric:
        reason = f"best_metric is now {metric.removeprefix('eval_')}"
    elif cfg.best_metric is not None:
        assert cfg.output_dir is not None
        kept = best_checkpoint(Path(cfg.output_dir) / CHECKPOINTS)
        if kept is None or kept.name != f"step-{best['step']:08d}":
            reason = "its checkpoint is damaged or not in output_dir"
    if reason:
        warn_best_dropped(best, reason)
    return not reason


def warn_best_dropped(best: dict[str, Any], reason: str) -> None:
    """Warn that the best evaluation from before a stop does not count."""
    if engine.rank() == 0:
        name = best["metric"].removeprefix("eval_")
        log.warning(
            "resume: the best so far, %s %.4g of step %d, does not count: %s", name, best["value"], best["step"], reason
        )


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that `best` names; None if there is none, or it is damaged, which is logged. Collective."""
    try:
        path = latest_checkpoint(checkpoints / "best")
    except ValueError as error:  # raised for a damaged checkpoint that is named; others would be skipped
        if engine.rank() == 0:
            log.warning("the best checkpoint is ignored: %s", error)
        return None
    return None if path is None else path.resolve()

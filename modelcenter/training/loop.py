"""The training loop. There is one, explicit, for every task and any number of ranks."""

import functools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import engine
from engine.collectives import from_rank_0, together
from engine.ops import dropout_key
from modelcenter.adapters import trainable_parameters
from modelcenter.command_line.errors import Stopped
from modelcenter.data.batching.prefetch import Prefetch
from modelcenter.data.examples import Examples
from modelcenter.hub.card import complete_card
from modelcenter.hub.files.names import RUN_FILE
from modelcenter.hub.save import write_texts
from modelcenter.training.accumulation import accumulate
from modelcenter.training.batch_sources import GlobalBatch, RowBatchSource, make_batch_source
from modelcenter.training.checkpoints import model_selection, resume
from modelcenter.training.checkpoints.final_model import push_final_model, save_final_model
from modelcenter.training.checkpoints.model_selection import ModelSelection, check_best_metric
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.checkpoints.writer import CheckpointWriter
from modelcenter.training.config import TrainConfig
from modelcenter.training.evaluation import EvaluationStopped, stoppable
from modelcenter.training.monitoring.clock import Clock
from modelcenter.training.monitoring.skipped_steps import SkippedSteps
from modelcenter.training.monitoring.throughput import Throughput
from modelcenter.training.output.folder import clear_output
from modelcenter.training.output.messages import end_message, next_start, start_message
from modelcenter.training.output.record import Record
from modelcenter.training.output.summary import summary_of
from modelcenter.training.setup.optimizer import make_optimizer
from modelcenter.training.setup.prepare import PreparedRun
from modelcenter.training.setup.rank_checks import check_data
from modelcenter.training.setup.resolve import resolve_automatic_batch_size, resolve_eval_batch_size
from modelcenter.training.stopping import Stopping


def train(cfg: TrainConfig, prepared: PreparedRun, began: float | None = None) -> dict[str, Any]:
    """Train, evaluate and save, or resume the run in output_dir. Every rank calls it.

    Args:
        cfg: the flags, resolved for the ranks and the model (see setup/resolve.py).
        prepared: see setup/prepare.py. Without a run to resume from, output_dir is cleared.
        began: when max_time starts to count, by time.monotonic(); None: now.

    Returns:
        The contents of summary.json. Its status is "stopped" after SIGTERM or once max_time has passed: the state is
        then in output_dir/checkpoints, and the same command resumes from it.

    Raises:
        FloatingPointError: losses or gradients were not finite in several steps in a row, or in all of them.
        OSError: the checkpoint of a stopped run could not be written.
        Stopped: SIGINT came. summary.json is written all the same, as it is after every error.
        ValueError: the checkpoint in output_dir belongs to another run, or the ranks have different data.
    """
    run = Run(cfg, prepared, began)
    output = run.output
    status, reason = "failed", None
    try:
        with run.stopping:
            if engine.rank() == 0 and output is not None:
                cfg.save(output / "config.yaml")
                run.record.report(start_message(run))
                if cfg.lora_rank is not None or cfg.freeze:
                    run.record.report(trainable_parameters(run.model))
            run.train()
            run.stopping.end_of_steps()
            if output is not None and run.stopping.reason is None:
                save_final_model(run, output / "model")  # a run that cannot write it has failed, but can be resumed
            status, reason = ("finished", None) if run.stopping.reason is None else ("stopped", run.stopping.reason)
    except Stopped as error:
        status, reason = "stopped", str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        summary = run.close(status, reason)
    if status == "finished" and output is not None and cfg.push_to_hub is not None:
        push_final_model(run, output, cfg.push_to_hub)
    if output is not None:
        run.record.report(end_message(run, output))  # rank 0 alone shows it, but all ranks look for the checkpoint
    engine.synchronize()  # a rank that left earlier could make its launcher end rank 0 while it writes
    run.stopping.raise_if_interrupted()
    return summary


class Run:
    """The state of a run: the model, its optimizer and its data, with counters and clocks."""

    def __init__(self, cfg: TrainConfig, prepared: PreparedRun, began: float | None = None):
        """Resolve the flags that depend on the rows, build the optimizer, load the checkpoint to resume from, and open
        the files of output_dir (a dry run opens none). See `train` for the arguments. Collective."""
        self.cfg = cfg
        self.task, self.model, self.tokenizer = prepared.task, prepared.model, prepared.tokenizer
        self.train_set, self.eval_set = prepared.train_set, prepared.eval_set
        continuation = prepared.continuation
        self.output = None if cfg.output_dir is None or cfg.dry_run else Path(cfg.output_dir)
        check_data(self.train_set, self.eval_set)  # before the first collective that depends on the data
        check_best_metric(cfg, self.task, self.eval_set)
        resolve_eval_batch_size(cfg, self.train_set, self.eval_set)
        resolve_automatic_batch_size(cfg, self.task, self.model, self.train_set)
        self.batch_source = make_batch_source(cfg, self.train_set)
        checkpoint = None if continuation is None else continuation.checkpoint
        self.task.precompute(self.model, self.train_set, self.eval_set, checkpoint, self._rows_needed)
        self.source_state: dict[str, Any] = {}
        self.manager, self.lr_schedule = make_optimizer(cfg, self.model, self.batch_source.steps)
        self.step = 0  # steps taken
        self.clock = Clock()
        self.throughput = Throughput(self.model, cfg.peak_flops)
        self.skipped_steps = SkippedSteps(self.manager, self.batch_source)
        self.selection = ModelSelection(cfg.best_metric or self.task.metrics().main, cfg.early_stopping)
        self.evaluation_conditions = model_selection.evaluation_conditions(cfg, self.eval_set)
        self.changed_condition: str | None = None  # the flag due to which scores from before a stop do not compare
        self.evaluation_pending = False  # the run ended before the evaluation that was due at this step
        self.stopping = Stopping(cfg.max_seconds, functools.partial(self.close, "stopped", inside_step=True), began)
        self.checkpoints: CheckpointWriter | None = None
        if self.output is not None:
            self.checkpoints = CheckpointWriter(self.output, cfg.keep, self.selection, self._report)
        if continuation is not None:
            self._load(continuation)
        self.record = self._open_record(continuation)

    def _rows_needed(self, examples: Examples) -> np.ndarray:
        """Row numbers of the examples (not a stream) that the run uses; in a dry run, those of one step."""
        if examples is self.train_set:
            assert isinstance(self.batch_source, RowBatchSource)
            return self.batch_source.rows_taken(1 if self.cfg.dry_run else self.batch_source.steps)
        return np.arange(0 if self.cfg.dry_run else len(examples))

    def _open_record(self, continuation: Continuation | None) -> Record:
        """Open the files of output_dir, which a new run clears first. Collective."""
        if self.output is not None and (continuation is None or not continuation.in_output_dir):
            with together(f"clearing {self.output}"):
                if engine.rank() == 0:
                    clear_output(self.output)
        with together(f"opening the files of {self.output}"):
            writer = engine.rank() == 0 and not self.cfg.dry_run
            record = Record(self.output, self.batch_source.steps, writer, self.step, self.cfg)
        if continuation is not None:  # they decide, for example, whether to evaluate, and all ranks must decide alike
            record.rows = from_rank_0(record.rows)
        return record

    def _report(self, text: str) -> None:
        self.record.report(text)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps, with the evaluations and checkpoints between them."""
        first = self.step
        self.task.on_train_begin(self.model, self.tokenizer)  # also if all steps are done and only model/ is missing
        is_over = first == self.batch_source.steps
        if self.evaluation_pending and self._evaluate_and_save(is_over, self._row_of_this_step()):
            is_over = True
        self.clock.pause()
        if is_over or self.selection.patience_is_over:
            return
        self.model.train()
        self.clock.start()
        with self._batches(first) as batches:
            self._steps(batches)
        self.clock.pause()
        if self.manager.skipped == self.step and self.stopping.reason is None:
            self._check_progress()

    def _check_progress(self) -> None:
        """Raise FloatingPointError for a run without a single good step. If the initial loss scales of fp16 were merely
        too large, as they may be for all the steps of a short run, only report it."""
        last: dict[str, Any] = next((row for row in reversed(self.record.rows) if "loss" in row), {})
        if self.manager.loss_scale > 1 and last.get("loss") is not None:
            self.record.report(
                "no step changed the weights: the loss scale of fp16 is still falling to where gradients are finite "
                f"(now {self.manager.loss_scale:g}); train for more steps, or with bf16 or fp32"
            )
            return
        raise FloatingPointError(
            "no step of the run had a finite loss and gradient, so none changed the weights: check the initial weights "
            "and the data of these steps, or use bf16 or fp32 instead of fp16. "
            f"{self.skipped_steps.rows_of_last_steps()}"
        )

    @contextmanager
    def _batches(self, first: int) -> Iterator[Iterable[GlobalBatch]]:
        """The batches from step `first` on, prepared ahead by a thread."""
        batches = self.batch_source.batches(first, self.source_state)
        if not self.cfg.prefetch:
            yield batches
            return
        with Prefetch(batches, self.cfg.prefetch) as prefetched:
            yield prefetched

    def _steps(self, batches: Iterable[GlobalBatch]) -> None:
        for batch in batches:
            last = batch.step + 1 == self.batch_source.steps
            loss, norm, lr = self.train_step(batch)
            self.step, self.source_state = batch.step + 1, batch.state
            if self.record.display is not None:
                self.record.display.step(self.step)
            if self.step % self.cfg.log_every == 0 or last or batch.step == 0:
                self._log(loss, norm, lr)
            if self._evaluate_and_save(last):
                break

    def _evaluate_and_save(self, last: bool, row: dict[str, Any] | None = None) -> bool:
        """Evaluate and save if due. Returns whether the run ends here. row: the evaluation, if it was made already."""
        improved = self.evaluation_pending = False
        if self.eval_set is not None and self._is_due(self.cfg.eval_every, last):
            with self.clock.paused():
                try:
                    improved = self.selection.judge(row or self.evaluate())
                except EvaluationStopped:  # made up for by the run that resumes from here
                    self.evaluation_pending = True
        patience_is_over = self.selection.patience_is_over
        stop = self.stopping.should_stop()
        keeps_best = self.cfg.best_metric is not None or self.cfg.early_stopping is not None
        if (improved and keeps_best) or stop or patience_is_over or self._save_is_due(last):
            with self.clock.paused():
                self.save(wait=stop)
        return stop or patience_is_over

    def _row_of_this_step(self) -> dict[str, Any] | None:
        """The evaluation of the step that a run resumes from, if its row was written before the run ended, under the
        same conditions and with the current metric."""
        if self.changed_condition is not None or not self.record.rows:
            return None
        newest = self.record.rows[-1]
        return newest if self.selection.metric in newest and newest["step"] == self.step else None

    def train_step(self, batch: GlobalBatch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One step on a global batch. Returns loss, gradient norm (both on the device) and the learning rate used."""
        lr = self.lr_schedule.current_lr
        self.manager.zero_grad()
        if self.task.distillation is not None:
            self.task.distillation.parts.clear()
        self.task.on_step(batch.step, self.batch_source.steps)
        with dropout_key(self.cfg.seed, batch.step):
            loss = accumulate(self.model, batch.microbatches, self.task.loss_fn, backward=self.manager.backward)
        limit = self.cfg.max_grad_norm or float("inf")
        groups = [group for optimizer in self.manager.optimizers for group in optimizer.param_groups]
        norm = self.manager.clip_grad_norm(groups, limit, defer=True)
        self.skipped_steps.add(self.step + 1, batch.rows, norm)
        try:
            self.manager.step()  # leaves the weights as they are if a gradient is not finite
        except FloatingPointError as error:
            rows = self.skipped_steps.rows_of_last_steps()
            raise FloatingPointError(f"step {self.step + 1}: {error}. {rows}") from None
        self.throughput.add(batch)
        return loss, norm, lr

    def evaluate(self) -> dict[str, Any]:
        """Evaluate, and log it as a row.

        Raises:
            EvaluationStopped: the run is to end, and does not wait for the last batch.
        """
        assert self.eval_set is not None and self.cfg.eval_batch_size is not None
        began = time.perf_counter()
        with stoppable(self.stopping.should_stop):
            scores = self.task.evaluate(self.model, self.eval_set, self.cfg.eval_batch_size)
        row = {"step": self.step, "epoch": self.epoch(), **{f"eval_{name}": value for name, value in scores.items()}}
        self.record.log({**row, "eval_seconds": round(time.perf_counter() - began, 3)})
        with stoppable(self.stopping.should_stop):
            samples = self.task.samples(self.model, self.tokenizer, self.eval_set)
        for sample in samples:
            self.record.log_sample({"step": self.step, **sample})
        return row

    def _is_due(self, every: str, last: bool) -> bool:
        """Whether an evaluation or a checkpoint is due, by its flag `every`; after the last step it always is."""
        per_epoch = self.batch_source.steps_per_epoch
        period = per_epoch if every == "epoch" else None if every == "never" else int(every)
        return last or (period is not None and self.step % period == 0)

    def epoch(self) -> float:
        """Passes over the data so far."""
        return round(self.batch_source.epochs_at(self.step, self.source_state), 4)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_is_due(self, last: bool) -> bool:
        if self.checkpoints is None:
            return False
        if self.cfg.save_every != "never" and self._is_due(self.cfg.save_every, last):
            return True
        if self.cfg.save_minutes is None:
            return False
        return self.stopping.any_rank(self.checkpoints.minutes_since_last > self.cfg.save_minutes)

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint in the background. Does nothing without output_dir. Collective.

        Args:
            wait: wait until it is on disk, because the run stops.

        Raises:
            OSError: on all ranks, with `wait`: it could not be written.
        """
        if self.output is None or self.checkpoints is None:
            return
        self._log_skipped_steps()
        state = {
            "step": self.step,
            "seconds": self.clock.seconds,
            "unjudged": self.evaluation_pending,
            "scored_on": self.evaluation_conditions,
            "feed": self.source_state,
            **self.throughput.state(),
        }
        adapter = self.model.adapter
        trained = None if adapter is None else adapter.trained
        run_file = resume.run_file_text(self.cfg, self.step, self.train_set.fingerprint(), trained)

        def write_extra(folder: Path) -> None:
            write_texts(self.model, folder, self.model.dtype, self.tokenizer, None)
            (folder / RUN_FILE).write_text(run_file, encoding="utf-8")
            self.task.write_extra(folder)

        try:
            self.checkpoints.write(self.step, self.model, self.manager, state, write_extra, wait)
        except OSError as error:
            raise OSError(f"{self.stopping.reason}, but {error}; {next_start(self, self.output)}") from error

    def _load(self, continuation: Continuation) -> None:
        """Resume from a checkpoint. Raises ValueError if it belongs to another run."""
        data = self.train_set.fingerprint()
        continuation.check(self.cfg, data)
        before = continuation.sums_of_other_base(self.cfg, self.model)
        state = resume.load_state(continuation.checkpoint, self.model, self.manager)
        continuation.check_base(self.cfg, self.model, before)
        self.step, self.clock = state["step"], Clock(state["seconds"])
        if self.step > self.batch_source.steps:
            name = "epochs" if self.cfg.max_steps is None else "max_steps"
            raise ValueError(
                f"{name}: the run has {self.batch_source.steps} steps, but {continuation.checkpoint} is already at "
                f"step {self.step}; give more"
            )
        self.throughput.load(state, self.clock.seconds)
        self.skipped_steps.start_from(self.step)
        if self.checkpoints is not None and continuation.in_output_dir:
            self.checkpoints.finish_last(self.step, state.get("linked", state["best"]).get("step"))
        self._load_selection(state, continuation.in_output_dir)
        changed = continuation.changed_stream_flag(self.cfg, data)
        if changed is None:
            self.source_state = state["feed"]
        elif state["feed"] and engine.rank() == 0:
            resume.log.warning("resume: the stream starts over, because %s differs from the checkpoint's run", changed)
        self.evaluation_pending = state.get("unjudged", False)

    def _load_selection(self, state: dict[str, Any], in_output_dir: bool) -> None:
        """Keep the best evaluation from before the stop, if later ones compare with it."""
        before = state.get("scored_on", {})
        self.changed_condition = model_selection.changed_condition(before, self.evaluation_conditions)
        if self.changed_condition is None:
            still_counts = functools.partial(model_selection.still_counts, self.cfg, self.selection.metric)
            self.selection.load(state, in_output_dir, still_counts)
        elif state["best"]:
            model_selection.warn_best_dropped(state["best"], f"{self.changed_condition} has changed")

    # -- logging ----------------------------------------------------------------------------------------------------

    def _log(self, loss: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        values = torch.stack([loss.float(), norm.float().to(loss.device)]).tolist()  # waits for the device, once
        seconds = self.clock.seconds
        row = {
            "step": self.step,
            "epoch": self.epoch(),
            "loss": values[0],
            **({} if self.task.distillation is None else self.task.distillation.parts.losses()),
            "lr": lr,
            "grad_norm": values[1],
            **self.throughput.row(seconds),
            "seconds": round(seconds, 4),
        }
        self._log_skipped_steps()
        if self.skipped_steps.count:
            row["skipped"] = self.skipped_steps.count
        self.record.log(row)

    def _log_skipped_steps(self) -> None:
        for row in self.skipped_steps.new_rows(self.step):
            self.record.log_skipped(row)

    def close(self, status: str, reason: str | None, inside_step: bool = False) -> dict[str, Any]:
        """Write summary.json and the curves, and return the summary. Collective only if the run has finished.

        Args:
            inside_step: the run is abandoned in the middle of a step, so do not wait for the device.
        """
        skipped = self.skipped_steps.count if inside_step else self.manager.skipped
        summary = summary_of(self, status, reason, skipped)
        # If rank 0 alone fails, the others must not wait for it in the next collective.
        with together("writing summary.json") if status == "finished" else nullcontext():
            self.record.close(summary, functools.partial(self._finish, summary) if status == "finished" else None)
        return summary

    def _finish(self, summary: dict[str, Any]) -> None:
        """Add the results in the summary to the model card. On rank 0."""
        assert self.output is not None
        if self.cfg.quantize is None:  # 4-bit weights leave no model
            complete_card(self.output, summary)

"""The training loop. There is one, explicit, for every task and any number of ranks."""

import functools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import engine
from engine.checkpoint import from_rank_0, load_model, save_checkpoint, together, wait_checkpoint
from engine.ops import dropout_key
from modelcenter.adapters import merge_lora, save_adapter, trainable_parameters
from modelcenter.command_line.errors import Stopped
from modelcenter.data.batching.prefetch import Prefetch
from modelcenter.hub.card import complete_card
from modelcenter.hub.files.names import RUN_FILE
from modelcenter.hub.remote.push import push_directory
from modelcenter.hub.save import write_texts
from modelcenter.models.base import Model
from modelcenter.training.accumulation import accumulate
from modelcenter.training.batch_sources import GlobalBatch
from modelcenter.training.checkpoints import resume
from modelcenter.training.checkpoints.best_model import Selection, check_judge
from modelcenter.training.checkpoints.resume import Continuation
from modelcenter.training.config import TrainConfig
from modelcenter.training.evaluation import EvaluationStopped, stoppable
from modelcenter.training.monitoring.clock import Clock
from modelcenter.training.monitoring.skipped_steps import Skipped
from modelcenter.training.monitoring.throughput import Meter
from modelcenter.training.output.folder import clear_output, room
from modelcenter.training.output.messages import card_of, first_line, last_line
from modelcenter.training.output.record import Record
from modelcenter.training.output.summary import summary_of
from modelcenter.training.setup.automatic_batch_size import fit_batch
from modelcenter.training.setup.model import fix_evaluation, make_feed, make_optimizer
from modelcenter.training.setup.rank_checks import check_data
from modelcenter.training.stopping import Stopping
from modelcenter.training.tasks.base import Examples


def train(
    cfg: TrainConfig,
    task: Any,
    model: Model,
    tokenizer: Any,
    train_set: Examples,
    eval_set: Examples | None,
    continuation: Continuation | None,
    began: float | None = None,
) -> dict[str, Any]:
    """Train, evaluate, save; or go on where the run in output_dir was stopped. Every rank calls it.

    Args:
        cfg: flags, as resolved by setup.start and setup.build_model. task: see tasks/base.py. continuation: what
            setup.start found; None starts anew, and clears output_dir. began: from when max_time counts, by
            time.monotonic(); None: now.

    Returns:
        What summary.json says. Its status is "stopped" where SIGTERM came or max_time passed: the state is in
        output_dir/checkpoints then, and the same command goes on.

    Raises:
        FloatingPointError: losses or gradients were not finite in several steps in a row, or in all.
        Stopped: SIGINT came. In all cases summary.json says so.
        ValueError: the checkpoint in output_dir is of another run; ranks have different data.
    """
    run = Run(cfg, task, model, tokenizer, train_set, eval_set)
    output = None if cfg.output_dir is None else Path(cfg.output_dir)
    if continuation is not None:
        run.load(continuation)
    if output is not None and (continuation is None or not continuation.own):
        with together(f"clearing {output}"):
            if engine.rank() == 0:
                clear_output(output)
    with together(f"opening the files of {output}"):
        run.record = Record(output, run.feed.steps, engine.rank() == 0, run.step, cfg)
    if continuation is not None:  # what the rows decide, such as whether to evaluate, all ranks must decide alike
        run.record.rows = from_rank_0(run.record.rows)
    status, reason = "failed", None
    try:
        with Stopping(cfg.max_seconds, functools.partial(run.leave, "stopped", inside=True), began) as run.stopping:
            if engine.rank() == 0 and output is not None:
                cfg.save(output / "config.yaml")
                run.record.say(first_line(run))
                if cfg.lora_rank is not None or cfg.freeze:
                    run.record.say(trainable_parameters(model))
            run.train()
            run.stopping.wait_for_the_end()
            if output is not None and run.stopping.reason is None:
                run.finish(output / "model")  # a run whose model could not be written has failed, and can go on
            status, reason = ("finished", None) if run.stopping.reason is None else ("stopped", run.stopping.reason)
    except Stopped as error:
        status, reason = "stopped", str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        summary = run.leave(status, reason)
    if status == "finished" and output is not None and cfg.quantize is None:  # 4-bit weights leave no model
        run.publish(output)
    if output is not None:
        run.record.say(last_line(run, output))  # rank 0 alone says it, but all ranks look for the checkpoint
    engine.synchronize()  # a rank that left earlier could make its launcher end rank 0 while it writes
    run.stopping.raise_if_interrupted()
    return summary


class Run:
    """The state of a run: counters and clocks beside the model, its optimizer and its data."""

    record: Record
    stopping: Stopping

    def __init__(
        self,
        cfg: TrainConfig,
        task: Any,
        model: Model,
        tokenizer: Any,
        train_set: Examples,
        eval_set: Examples | None,
    ):
        self.cfg, self.task, self.model, self.tokenizer = cfg, task, model, tokenizer
        self.train_set, self.eval_set = train_set, eval_set
        check_data(train_set, eval_set)  # before anything that all ranks work out together
        check_judge(cfg, task, eval_set)
        fix_evaluation(cfg, train_set, eval_set)
        task.before_training(model, train_set, eval_set)
        fit_batch(cfg, task, model, train_set)
        self.feed = make_feed(cfg, train_set)
        self.manager, self.rate = make_optimizer(cfg, model, self.feed.steps)
        self.step = 0  # steps taken
        self.clock = Clock()
        self.meter = Meter(model, cfg.peak_flops)
        self.skipped = Skipped(self.manager, self.feed)
        self.selection = Selection(cfg.best_metric or task.metrics().main, cfg.early_stopping)
        self.scored_on = resume.scored_on(cfg, eval_set)
        self.scored_otherwise: str | None = None  # before the stop that the run goes on from: by which flag
        self.unjudged = False  # the evaluation of this step was left, as the run was to end
        self.feed_state: dict[str, Any] = {}
        self._saved = (0, time.monotonic())  # step and time of the last checkpoint

    # -- the steps ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps, with the evaluations and checkpoints between them."""
        first = self.step
        self.task.prepare_model(self.model, self.tokenizer)  # also of a run that has only model/ to write yet
        over = self.unjudged and self._between_steps(first == self.feed.steps, self._row_of_this_step())
        self.clock.pause()
        if over or first == self.feed.steps or self.selection.patience_is_over:
            return
        self.model.train()
        self.clock.start()
        with self._batches(first) as batches:
            self._steps(batches, first)
        self.clock.pause()
        if self.manager.skipped == self.step and self.stopping.reason is None:
            self._check_progress()

    def _check_progress(self) -> None:
        """Raise FloatingPointError for a run without one good step, but say it where the first loss scales of fp16 were
        too large, as they may be, for all the steps of a short run."""
        last = next((row for row in reversed(self.record.rows) if "loss" in row), {})
        if self.manager.loss_scale > 1 and last.get("loss") is not None:
            self.record.say(
                "no step changed the weights: the loss scale of fp16 is still falling to where gradients are finite "
                f"(now {self.manager.loss_scale:g}); train for more steps, or with bf16 or fp32"
            )
            return
        raise FloatingPointError(f"no step of the run had a finite loss and gradient. {self.skipped.newest_rows()}")

    @contextmanager
    def _batches(self, first: int) -> Iterator[Iterable[GlobalBatch]]:
        """The batches from a step on, made ahead by a thread."""
        batches = self.feed.batches(first, self.feed_state)
        if not self.cfg.prefetch:
            yield batches
            return
        with Prefetch(batches, self.cfg.prefetch) as ahead:
            yield ahead

    def _steps(self, batches: Iterable[GlobalBatch], first: int) -> None:
        for batch in batches:
            last = batch.step + 1 == self.feed.steps
            loss, norm, lr = self.train_step(batch)
            self.step, self.feed_state = batch.step + 1, batch.state
            if self.record.show is not None:
                self.record.show.step(self.step)
            if self.step % self.cfg.log_every == 0 or last or batch.step == first:
                self._log(loss, norm, lr)
            if self._between_steps(last):
                break

    def _between_steps(self, last: bool, row: dict[str, Any] | None = None) -> bool:
        """Evaluate and save, where that is due; whether the run ends here. row: the evaluation, if there is one."""
        improved = self.unjudged = False
        if self._due(self.cfg.eval_every, last, self.eval_set is not None):
            with self.clock.paused():
                try:
                    improved = self.selection.judge(row or self.evaluate())
                except EvaluationStopped:  # who goes on from here makes up for it
                    self.unjudged = True
        enough = self.selection.patience_is_over
        stop = self.stopping.asked()
        wanted = improved and (self.cfg.best_metric is not None or self.cfg.early_stopping is not None)
        if wanted or stop or enough or self._save_due(last):
            with self.clock.paused():
                self.save(wait=stop)
        return stop or enough

    def _row_of_this_step(self) -> dict[str, Any] | None:
        """The evaluation of the step that a run goes on from, where one was written down before the run ended that
        says what is asked for now."""
        newest = self.record.rows[-2:] if self.scored_otherwise is None else []
        return next((row for row in newest if self.selection.metric in row and row["step"] == self.step), None)

    def train_step(self, batch: GlobalBatch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One step on a global batch. Returns loss, gradient norm (both on the device) and the learning rate used."""
        lr = self.rate.current_lr
        self.manager.zero_grad()
        with dropout_key(self.cfg.seed, batch.step):
            loss = accumulate(self.model, batch.microbatches, self.task.loss_fn, backward=self.manager.backward)
        limit = self.cfg.max_grad_norm or float("inf")
        groups = [group for optimizer in self.manager.optimizers for group in optimizer.param_groups]
        norm = self.manager.clip_grad_norm(groups, limit, defer=True)
        self.skipped.add(self.step + 1, batch.rows, norm)
        try:
            self.manager.step()  # leaves the weights alone where a gradient is not finite
        except FloatingPointError as error:
            raise FloatingPointError(f"step {self.step + 1}: {error}. {self.skipped.newest_rows()}") from None
        self.meter.add(batch)
        return loss, norm, lr

    def evaluate(self) -> dict[str, Any]:
        """Evaluate, and log it as a row.

        Raises:
            EvaluationStopped: the run shall end, and has not waited for the last batch.
        """
        assert self.eval_set is not None and self.cfg.eval_batch_size is not None
        began = time.perf_counter()
        with stoppable(self.stopping.asked):
            found = self.task.evaluate(self.model, self.eval_set, self.cfg.eval_batch_size)
        row = {"step": self.step, "epoch": self.epoch(), **{f"eval_{name}": value for name, value in found.items()}}
        self.record.log({**row, "eval_seconds": round(time.perf_counter() - began, 3)})
        with stoppable(self.stopping.asked):
            samples = self.task.samples(self.model, self.tokenizer, self.eval_set)
        for sample in samples:
            self.record.sample({"step": self.step, **sample})
        return row

    def _due(self, every: str, last: bool, possible: bool = True) -> bool:
        """Whether an evaluation or a checkpoint is due by its flag; also at the end, whatever the flag says."""
        if not possible:
            return False
        per_epoch = self.feed.steps_per_epoch
        period = per_epoch if every == "epoch" else None if every == "never" else int(every)
        return last or (period is not None and self.step % period == 0)

    def epoch(self) -> float:
        """Passes over the data so far."""
        return round(self.feed.epochs_at(self.step, self.feed_state), 4)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_due(self, last: bool) -> bool:
        if self.cfg.output_dir is None:
            return False
        if self.cfg.save_every != "never" and self._due(self.cfg.save_every, last):
            return True
        if self.cfg.save_minutes is None:
            return False
        return self.stopping.any_rank(time.monotonic() - self._saved[1] > 60 * self.cfg.save_minutes)

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint beside the training, which goes on; `wait`: until it is on the disk.

        One that cannot be written is said and costs nothing but itself: those before it stay.
        """
        if self.cfg.output_dir is None or self._saved[0] == self.step:
            return
        root = Path(self.cfg.output_dir) / resume.CHECKPOINTS
        self._wait_for_the_last(root.parent)
        self._note_skipped()
        best = self.selection.is_to_be_linked(self.step)
        state = {
            "step": self.step,
            "seconds": self.clock.seconds,
            "unjudged": self.unjudged,
            "scored_on": self.scored_on,
            "feed": self.feed_state,
            **self.meter.state(),
            **self.selection.state(best),
        }
        adapter = self.model.adapter
        trained = None if adapter is None else adapter.trained
        about = resume.about_run(self.cfg, self.step, self.train_set.fingerprint(), trained)

        def extra(place: Path) -> None:
            write_texts(self.model, place, self.model.dtype, self.tokenizer, None)
            (place / RUN_FILE).write_text(about, encoding="utf-8")

        options: dict[str, Any] = {"step": self.step, "keep": self.cfg.keep, "best": best, "extra": extra}
        self._saved = (self.step, time.monotonic())
        try:
            save_checkpoint(root, self.model, self.manager, state, asynchronous=not wait, **options)
            self.selection.writing(best)
        except (OSError, RuntimeError) as error:
            self.record.say(f"step {self.step}: the checkpoint could not be written: {error}; {room(root.parent)}")

    def _wait_for_the_last(self, output: Path) -> None:
        """Until the checkpoint that is being written is. One that could not be costs nothing that comes after it."""
        try:
            wait_checkpoint()
            self.selection.written(True)
        except (OSError, RuntimeError) as error:
            self.selection.written(False)
            self.record.say(f"the last checkpoint could not be written: {error}; {room(output)}")

    def load(self, continuation: Continuation) -> None:
        """Go on from a checkpoint. Raises ValueError: it is of another run."""
        continuation.check(self.cfg, self.train_set.fingerprint())
        state = resume.load_state(continuation.checkpoint, self.model, self.manager)
        self.step, self.clock = state["step"], Clock(state["seconds"])
        self.meter.load(state, self.clock.seconds)
        self.skipped.go_on_from(self.step)
        self.scored_otherwise = resume.scored_otherwise(state.get("scored_on", {}), self.scored_on)
        if self.scored_otherwise is None:
            counts = functools.partial(resume.best_counts, self.cfg, self.selection.metric)
            self.selection.load(state, continuation.own, counts)
        elif state["best"]:
            resume.say_it_does_not_count(state["best"], f"{self.scored_otherwise} is another now")
        if (why := continuation.another_stream(self.cfg, self.train_set.fingerprint())) is None:
            self.feed_state = state["feed"]
        elif state["feed"] and engine.rank() == 0:
            resume.log.warning("resume: the stream begins anew, as %s is not what the checkpoint's run had", why)
        self.unjudged = state.get("unjudged", False)
        self._saved = (-1 if self.unjudged else self.step, time.monotonic())  # it may be the best, and saved as such
        if self.step > self.feed.steps:
            raise ValueError(
                f"max_steps: the run has {self.feed.steps} steps, but {continuation.checkpoint} has done {self.step}"
            )

    def finish(self, target: Path) -> None:
        """The model, as a Hugging Face directory: the best one if best_metric says so."""
        self._wait_for_the_last(target.parent)
        best = self.selection.best if self.cfg.best_metric is not None else {}
        if best and best["step"] != self.step:
            self._take_best(target.parent / resume.CHECKPOINTS)
        if self.cfg.lora_rank is not None:
            save_adapter(self.model, target.parent / "adapter")
            if self.cfg.quantize is not None:
                self.record.say("the weights are in 4 bits, which take no updates: adapter/ is what was trained")
                return
            merge_lora(self.model)
        self.model.save_pretrained(target, tokenizer=self.tokenizer, card=card_of(self))

    def _take_best(self, checkpoints: Path) -> None:
        """The weights of the best evaluation; where they could not be written, those of the best before it, or the last
        ones, which is said."""
        path, wanted = resume.best_checkpoint(checkpoints), self.selection.best["step"]
        step = None if path is None else int(path.name.removeprefix("step-"))
        if step != wanted:
            self.selection.fall_back(step, self.record.rows)
            kept = f"that of step {step}" if self.selection.best else "the last one"
            self.record.say(f"{checkpoints}: the best model, of step {wanted}, is not there; {kept} takes its place")
        if self.selection.best:
            assert path is not None
            load_model(path, self.model)

    def publish(self, output: Path) -> None:
        """Let the model card say how the model was made, which the summary knows, and push it if --push_to_hub says so.

        Raises:
            ValueError: the Hub refuses, or cannot be reached; the model stays in output_dir.
        """
        with together(f"publishing {output / 'model'}"):
            if engine.rank() == 0:
                complete_card(output)
                if self.cfg.push_to_hub is not None:
                    self.record.say(f"pushed to {push_directory(output, self.cfg.push_to_hub).address}")

    # -- what is written down ----------------------------------------------------------------------------------------

    def _log(self, loss: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        values = torch.stack([loss.float(), norm.float().to(loss.device)]).tolist()  # the device is read here only
        seconds = self.clock.seconds
        row = {
            "step": self.step,
            "epoch": self.epoch(),
            "loss": values[0],
            "lr": lr,
            "grad_norm": values[1],
            **self.meter.row(seconds),
            "seconds": round(seconds, 4),
        }
        self._note_skipped()
        if self.skipped.count:
            row["skipped"] = self.skipped.count
        self.record.log(row)

    def _note_skipped(self) -> None:
        for row in self.skipped.found(self.step):
            self.record.skipped(row)

    def leave(self, status: str, reason: str | None, inside: bool = False) -> dict[str, Any]:
        """Write summary.json and the curves; returns the summary. Not collective, but for a run that finished.

        inside: from inside a step, for whose device nothing waits.
        """
        summary = summary_of(self, status, reason, self.skipped.count if inside else self.manager.skipped)
        # Where rank 0 alone fails, the others do not wait for it in what comes next.
        with together("writing summary.json") if status == "finished" else nullcontext():
            self.record.close(summary)
        return summary

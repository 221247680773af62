"""The training loop. There is one, explicit, for every task and any number of ranks."""

import functools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import engine
from engine.checkpoint import from_rank_0, load_model, save_checkpoint, together, wait_checkpoint
from engine.ops import dropout_key
from modelcenter.adapters import merge_lora, save_adapter, trainable_parameters
from modelcenter.data.prefetch import Prefetch
from modelcenter.hub.card import complete_card
from modelcenter.hub.push import push_directory
from modelcenter.hub.save import write_texts
from modelcenter.models.base import Model
from modelcenter.training import resume
from modelcenter.training.accumulation import accumulate
from modelcenter.training.agreement import check_data
from modelcenter.training.autobatch import fit_batch
from modelcenter.training.clock import Clock
from modelcenter.training.config import TrainConfig
from modelcenter.training.errors import Stopped
from modelcenter.training.evaluation import EvaluationStopped, stoppable
from modelcenter.training.feed import GlobalBatch
from modelcenter.training.flops import Utilisation
from modelcenter.training.metrics import SMALLER_IS_BETTER
from modelcenter.training.record import Record, clear_output, peak_memory, room, summarise
from modelcenter.training.resume import Continuation
from modelcenter.training.setup import check_judge, make_feed, make_optimizer
from modelcenter.training.stopping import Stopping
from modelcenter.training.tasks.base import Examples
from modelcenter.training.told import card_of, first_line, last_line


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
        check_judge(cfg, task, eval_set is not None)
        task.before_training(model, train_set, eval_set)
        fit_batch(cfg, task, model, train_set)
        self.feed = make_feed(cfg, train_set)
        self.manager, self.rate = make_optimizer(cfg, model, self.feed.steps)
        self.utilisation = Utilisation(model, cfg.peak_flops)
        self.step = 0  # steps taken
        self.tokens = 0  # real tokens trained on, over all ranks
        self.clock = Clock()
        self.slots = self.filled = 0  # of this rank's batches since the last row
        self.recent: list[tuple[int, Any, torch.Tensor]] = []  # steps since the last row: number, rows, norm
        self.judged: dict[str, Any] = {}  # the newest evaluation: metric, value, step
        self.best: dict[str, Any] = {}  # of the evaluations
        self.linked: dict[str, Any] = {}  # of those whose model was saved: what checkpoints/best names
        self._linking: dict[str, Any] = {}  # the same, once the checkpoint that is being written is on the disk
        self.bad_evaluations = 0  # in a row
        self.unjudged = False  # the evaluation of this step was left, as the run was to end
        self.skipped = 0  # steps without a finite gradient, as of the last row
        self._noted = 0  # the last step that was looked at for it
        self.feed_state: dict[str, Any] = {}
        self._logged: tuple[int, float] = (0, 0.0)  # tokens and seconds as of the last row
        self._saved = (0, time.monotonic())  # step and time of the last checkpoint

    # -- the steps ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All steps, with the evaluations and checkpoints between them."""
        first = self.step
        self.task.prepare_model(self.model, self.tokenizer)  # also of a run that has only model/ to write yet
        over = self.unjudged and self._between_steps(first == self.feed.steps, self._row_of_this_step())
        self.clock.pause()
        if over or first == self.feed.steps or self._patience_is_over():
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
        raise FloatingPointError(f"no step of the run had a finite loss and gradient. {self._offenders()}")

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
                    improved = self._judge(row or self.evaluate())
                except EvaluationStopped:  # who goes on from here makes up for it
                    self.unjudged = True
        enough = self._patience_is_over()
        stop = self.stopping.asked()
        wanted = improved and (self.cfg.best_metric is not None or self.cfg.early_stopping is not None)
        if wanted or stop or enough or self._save_due(last):
            with self.clock.paused():
                self.save(wait=stop)
        return stop or enough

    def _row_of_this_step(self) -> dict[str, Any] | None:
        """The evaluation of the step that a run goes on from, where one was written down before the run ended."""
        newest = self.record.rows[-2:]
        return next((row for row in newest if "eval_loss" in row and row["step"] == self.step), None)

    def train_step(self, batch: GlobalBatch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One step on a global batch. Returns loss, gradient norm (both on the device) and the learning rate used."""
        lr = self.rate.current_lr
        self.manager.zero_grad()
        with dropout_key(self.cfg.seed, batch.step):
            loss = accumulate(self.model, batch.microbatches, self.task.loss_fn, backward=self.manager.backward)
        limit = self.cfg.max_grad_norm or float("inf")
        groups = [group for optimizer in self.manager.optimizers for group in optimizer.param_groups]
        norm = self.manager.clip_grad_norm(groups, limit, defer=True)
        self.recent.append((self.step + 1, batch.rows, norm))
        try:
            self.manager.step()  # leaves the weights alone where a gradient is not finite
        except FloatingPointError as error:
            raise FloatingPointError(f"step {self.step + 1}: {error}. {self._offenders()}") from None
        self.tokens += batch.tokens
        for part in batch.microbatches:
            slots, filled = size_of(part)
            self.slots, self.filled = self.slots + slots, self.filled + filled
            self.utilisation.add(part)
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
        row = {"step": self.step, "epoch": self._epoch(), **{f"eval_{name}": value for name, value in found.items()}}
        self.record.log({**row, "eval_seconds": round(time.perf_counter() - began, 3)})
        with stoppable(self.stopping.asked):
            samples = self.task.samples(self.model, self.tokenizer, self.eval_set)
        for sample in samples:
            self.record.sample({"step": self.step, **sample})
        return row

    def _judge(self, row: dict[str, Any]) -> bool:
        """Whether an evaluation is the best so far."""
        metric = self._metric()
        name = f"eval_{metric}"
        if name not in row:
            known = ", ".join(key.removeprefix("eval_") for key in row if key.startswith("eval_"))
            raise ValueError(f"best_metric: got {metric!r}, the evaluation gives {known}")
        self.judged = {"metric": name, "value": row[name], "step": self.step}
        better = self._better_than(self.best)
        if better:
            self.best = self.judged
        self.bad_evaluations = 0 if better else self.bad_evaluations + 1
        return better

    def _better_than(self, other: dict[str, Any]) -> bool:
        """Whether the newest evaluation is better than another; a number is better than none."""
        value, sign = self.judged["value"], -1 if self._metric() in SMALLER_IS_BETTER else 1
        if value is None or not math.isfinite(value):  # nothing is greater than NaN: it would stay the best
            return False
        return "value" not in other or sign * value > sign * other["value"]

    def _patience_is_over(self) -> bool:
        return self.cfg.early_stopping is not None and self.bad_evaluations >= self.cfg.early_stopping

    def _metric(self) -> str:
        """The metric that says which evaluation is best, without the eval_ of its rows."""
        return (self.cfg.best_metric or self.task.metrics().main).removeprefix("eval_")

    def _due(self, every: str, last: bool, possible: bool = True) -> bool:
        """Whether an evaluation or a checkpoint is due by its flag; also at the end, whatever the flag says."""
        if not possible:
            return False
        per_epoch = self.feed.steps_per_epoch
        period = per_epoch if every == "epoch" else None if every == "never" else int(every)
        return last or (period is not None and self.step % period == 0)

    def _epoch(self) -> float:
        return round(self.feed.epochs_at(self.step), 4)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_due(self, last: bool) -> bool:
        if self.cfg.output_dir is None or self.cfg.save_every == "never":
            return False
        if self._due(self.cfg.save_every, last):
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
        best = self.judged.get("step") == self.step and self._better_than(self.linked)
        linked = self.judged if best else self.linked
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.clock.seconds,
            "best": self.best,
            "linked": linked,
            "unjudged": self.unjudged,
            "bad_evaluations": self.bad_evaluations,
            "feed": self.feed_state,
            "logged": list(self._logged),
        }
        adapter = self.model.adapter
        trained = None if adapter is None else adapter.trained
        about = resume.about_run(self.cfg, self.step, self.train_set.fingerprint(), trained)

        def extra(place: Path) -> None:
            write_texts(self.model, place, self.model.dtype, self.tokenizer, None)
            (place / resume.RUN_FILE).write_text(about, encoding="utf-8")

        options: dict[str, Any] = {"step": self.step, "keep": self.cfg.keep, "best": best, "extra": extra}
        self._saved = (self.step, time.monotonic())
        try:
            save_checkpoint(root, self.model, self.manager, state, asynchronous=not wait, **options)
            self._linking = linked
        except (OSError, RuntimeError) as error:
            failed = f"step {self.step}: a checkpoint could not be written, training goes on: {error}"
            self.record.say(f"{failed}; {room(root.parent)}")

    def _wait_for_the_last(self, output: Path) -> None:
        """Until the checkpoint that is being written is. One that could not be costs nothing that comes after it."""
        try:
            wait_checkpoint()
            self.linked = self._linking
        except (OSError, RuntimeError) as error:
            self._linking = self.linked
            self.record.say(f"the last checkpoint could not be written: {error}; {room(output)}")

    def load(self, continuation: Continuation) -> None:
        """Go on from a checkpoint. Raises ValueError: it is of another run."""
        continuation.check(self.cfg, self.train_set.fingerprint())
        state = resume.load_state(continuation.checkpoint, self.model, self.manager)
        self.step, self.tokens, self.clock = state["step"], state["tokens"], Clock(state["seconds"])
        self._load_best(state, continuation.own)
        if (why := continuation.another_stream(self.cfg, self.train_set.fingerprint())) is None:
            self.feed_state = state["feed"]
        elif state["feed"] and engine.rank() == 0:
            resume.log.warning("resume: the stream begins anew, as %s is not what the checkpoint's run had", why)
        self._logged = tuple(state["logged"])
        self.skipped, self._noted = self.manager.skipped, self.step
        self.unjudged = state.get("unjudged", False)
        self._saved = (-1 if self.unjudged else self.step, time.monotonic())  # it may be the best, and saved as such
        if self.step > self.feed.steps:
            raise ValueError(
                f"max_steps: the run has {self.feed.steps} steps, but {continuation.checkpoint} has done {self.step}"
            )

    def _load_best(self, state: dict[str, Any], own: bool) -> None:
        """The best evaluations before a stop, as far as they count now."""
        metric, linked = f"eval_{self._metric()}", state.get("linked", state["best"])
        if resume.best_counts(self.cfg, metric, state["best"]):
            self.best = state["best"]
            if own:  # patience that was over in another folder would let nothing be trained here
                self.linked, self.bad_evaluations = linked, state["bad_evaluations"]
        elif own and linked.get("metric") == metric and resume.best_counts(self.cfg, metric, linked):
            self.best = self.linked = linked  # the checkpoint of a better one could not be written
        self._linking = self.linked

    def finish(self, target: Path) -> None:
        """The model, as a Hugging Face directory: the best one if best_metric says so."""
        self._wait_for_the_last(target.parent)
        if self.cfg.best_metric is not None and self.best and self.best["step"] != self.step:
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
        path, wanted = resume.best_checkpoint(checkpoints), self.best["step"]
        step = None if path is None else int(path.name.removeprefix("step-"))
        if step != wanted:
            name, rows = self.best["metric"], self.record.rows
            value = next(
                (row[name] for row in reversed(rows) if row["step"] == step and row.get(name) is not None), None
            )
            self.best = {} if value is None else {"metric": name, "value": value, "step": step}
            kept = "the last one" if value is None else f"that of step {step}"
            self.record.say(f"{checkpoints}: the best model, of step {wanted}, is not there; {kept} takes its place")
        if self.best:
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
        tokens, seconds = self.tokens, self.clock.seconds
        used = self.utilisation.since(seconds - self._logged[1])
        speed = (tokens - self._logged[0]) / max(seconds - self._logged[1], 1e-9)
        row = {
            "step": self.step,
            "epoch": self._epoch(),
            "loss": values[0],
            "lr": lr,
            "grad_norm": values[1],
            "tokens": tokens,
            "tokens_per_second": round(speed, 1),
            "padding": round(1 - self.filled / max(self.slots, 1), 6) if self.slots else 0.0,
            **({} if used is None else {"mfu": float(f"{used:.4g}")}),
            "seconds": round(seconds, 4),
        }
        self._note_skipped()
        if self.skipped:
            row["skipped"] = self.skipped
        self._logged = (tokens, seconds)
        self.slots = self.filled = 0
        self.record.log(row)

    def _note_skipped(self) -> None:
        """Write down the steps since the last row whose gradient was not finite, with the rows they were made of."""
        found = self.manager.skipped
        if found > self.skipped:
            for (step, rows, _), norm in zip(self.recent, self._norms(), strict=True):
                if step > self._noted and not abs(norm) < float("inf"):
                    place = self.feed.where(rows, most=10**9)
                    self.record.skipped({"step": step, "grad_norm": str(norm), "rows": place})
        self.skipped, self._noted = found, self.step
        self.recent = self.recent[-2:]  # for _offenders

    def _norms(self) -> list[float]:
        return torch.stack([norm.float() for _, _, norm in self.recent]).tolist() if self.recent else []

    def _offenders(self) -> str:
        """Where the rows of the newest steps are. On a GPU the bad step may be the one before the newest."""
        shown = [f"step {step}: {self.feed.where(rows)}" for step, rows, _ in self.recent[-2:]]
        return "Rows of the last steps: " + " | ".join(shown)

    def leave(self, status: str, reason: str | None, inside: bool = False) -> dict[str, Any]:
        """Write summary.json and the curves; returns the summary. Not collective, but for a run that finished.

        inside: from inside a step, for whose device nothing waits.
        """
        summary = self.summary(status, reason, self.skipped if inside else self.manager.skipped)
        # Where rank 0 alone fails, the others do not wait for it in what comes next.
        with together("writing summary.json") if status == "finished" else nullcontext():
            self.record.close(summary)
        return summary

    def summary(self, status: str, reason: str | None, skipped: int) -> dict[str, Any]:
        """The fields of summary.json. Memory is the most of any rank, where the run ended as it should."""
        seconds = self.clock.seconds
        peak = peak_memory()
        if status == "finished" and engine.world_size() > 1:
            most = torch.tensor(list(peak.values()), device=engine.device())
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            peak = dict(zip(peak, most.tolist(), strict=True))
        metric = self._metric()
        return summarise(
            self.record.rows,
            metric,
            metric in SMALLER_IS_BETTER,
            status=status,
            **({} if reason is None else {"reason": reason}),
            task=self.task.name,
            model=self.cfg.model,
            parameters=self.model.num_parameters(),
            steps=self.step,
            epochs=self._epoch(),
            tokens=self.tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(self.tokens / seconds, 1) if seconds else 0.0,
            skipped_steps=skipped,
            peak_memory=peak,
            data={
                "train": self.train_set.fingerprint(),
                "eval": self.eval_set and self.eval_set.fingerprint(),
            },
        )


def size_of(batch: dict[str, Any]) -> tuple[int, int]:
    """(slots, tokens in them) of a microbatch; an encoder-decoder has two sides."""
    slots = filled = 0
    for prefix in ("", "decoder_"):
        ids, ends = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}cu_seqlens")
        if ids is not None and ends is not None:
            slots, filled = slots + ids.numel(), filled + int(ends[-1])
    return slots, filled

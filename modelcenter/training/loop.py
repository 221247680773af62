"""The training loop. There is one, explicit, for every task and any number of ranks."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import engine
from modelcenter.data.sampling import evaluation_batches
from modelcenter.models.base import Model
from modelcenter.training.accumulation import accumulate
from modelcenter.training.config import TrainConfig
from modelcenter.training.errors import Stopped
from modelcenter.training.evaluation import evaluate
from modelcenter.training.record import Record, clear_output, peak_memory, summarise
from modelcenter.training.setup import Schedule, data_name, make_optimizer
from modelcenter.training.tasks import Batches, Examples


def train(
    cfg: TrainConfig, task: Any, model: Model, tokenizer: Any, train_set: Examples, eval_set: Examples | None
) -> dict[str, Any]:
    """Train, evaluate, save. Every rank calls it.

    Args:
        cfg: flags, as resolved by setup.start and setup.build_model. task: see tasks.py.

    Returns:
        What summary.json says.

    Raises:
        FloatingPointError: losses or gradients were not finite in several steps in a row, or in all.
        Stopped: SIGTERM or SIGINT came. In both cases summary.json says so.
    """
    run = Run(cfg, task, model, train_set, eval_set)
    output = None if cfg.output_dir is None else Path(cfg.output_dir)
    if engine.rank() == 0 and output is not None:
        clear_output(output)
    run.record = Record(output, run.schedule.steps, writer=engine.rank() == 0)
    status, reason = "failed", None
    try:
        with _stoppable():
            if engine.rank() == 0 and output is not None:
                cfg.save(output / "config.yaml")
                run.record.say(run.describe())
            run.train()
            if output is not None:
                model.save_pretrained(output / "model", tokenizer=tokenizer, card=run.card())
            status = "finished"
    except Stopped as error:
        status, reason = "stopped", str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        summary = run.summary(status, reason)
        run.record.close(summary)
    engine.synchronize()  # a rank that left earlier could make its launcher end rank 0 while it writes
    return summary


class Run:
    """The state of a run: counters and clocks beside the model, its optimizer and its data."""

    record: Record

    def __init__(self, cfg: TrainConfig, task: Any, model: Model, train_set: Examples, eval_set: Examples | None):
        self.cfg, self.task, self.model = cfg, task, model
        self.train_set, self.eval_set = train_set, eval_set
        self.schedule = Schedule.of(cfg, train_set.lengths)
        self.manager, self.optimizer, self.rate = make_optimizer(cfg, model, self.schedule.steps)
        self.step = 0  # steps taken
        self.tokens = 0  # real tokens trained on, over all ranks
        self.seconds = 0.0  # of training: evaluation and saving are not in it
        self.slots = self.filled = 0  # of this rank's batches since the last row
        self.rows_of_step: dict[int, Any] = {}  # global rows of the newest steps, to name them if they turn out bad

    def train(self) -> None:
        """All steps, with the evaluations between them."""
        self.model.train()
        self._start_clock()
        for step, rows in self._batches():
            last = step + 1 == self.schedule.steps
            loss, norm, lr = self.train_step(rows)
            self.step = step + 1
            if self.record.show is not None:
                self.record.show.step(self.step)
            if self.step % self.cfg.log_every == 0 or last or step == 0:
                self._log(loss, norm, lr)
            if self._evaluation_due(last):
                self._pause_clock()
                self.evaluate()
                self._start_clock()
        self._pause_clock()
        if self.manager.skipped == self.step:
            raise FloatingPointError(f"no step of the run had a finite loss and gradient. {self._offenders()}")

    def describe(self) -> str:
        """One line on what is about to happen."""
        rows = f"{len(self.train_set):,} rows ({self.task.about_columns()})"
        judged = f"evaluation on {len(self.eval_set):,} rows" if self.eval_set is not None else "no evaluation data"
        ranks = f"{engine.world_size()} rank{'s' if engine.world_size() > 1 else ''}"
        steps = f"{self.schedule.steps:,} steps of {self.cfg.global_batch_size} rows"
        return f"{rows}; {judged}; {steps} on {ranks} ({engine.device()}, {self.cfg.precision})"

    def train_step(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One step on a global batch. Returns loss, gradient norm (both on the device) and the learning rate used."""
        microbatches = [self.train_set.batch(part) for part in self.schedule.rank_rows(rows)]
        lr = self.rate.current_lr
        self.rows_of_step = {self.step: rows, **{s: r for s, r in self.rows_of_step.items() if s > self.step - 2}}
        self.manager.zero_grad()
        loss = accumulate(self.model, microbatches, backward=self.manager.backward)
        limit = self.cfg.max_grad_norm or float("inf")
        norm = self.manager.clip_grad_norm(self.optimizer.param_groups, limit, defer=True)
        try:
            self.manager.step()  # leaves the weights alone where a gradient is not finite
        except FloatingPointError as error:
            raise FloatingPointError(f"step {self.step + 1}: {error}. {self._offenders()}") from None
        self.tokens += int(self.train_set.lengths[rows].sum())
        self.slots += sum(batch["input_ids"].numel() for batch in microbatches)
        self.filled += sum(int(batch["cu_seqlens"][-1]) for batch in microbatches)
        return loss, norm, lr

    def evaluate(self) -> dict[str, Any]:
        """Evaluate, and log it as a row."""
        assert self.eval_set is not None and self.cfg.eval_batch_size is not None
        rows = evaluation_batches(self.eval_set.lengths, self.cfg.eval_batch_size, engine.data_size())[
            engine.data_rank()
        ]
        metrics = self.task.metrics(self.model.device)
        began = time.perf_counter()
        found = evaluate(self.model, Batches(self.eval_set, rows), metrics)
        row = {"step": self.step, "epoch": self._epoch(), **{f"eval_{name}": value for name, value in found.items()}}
        self.record.log({**row, "eval_seconds": round(time.perf_counter() - began, 3)})
        return row

    def _batches(self) -> Iterator[tuple[int, Any]]:
        per_epoch = self.schedule.steps_per_epoch
        for step in range(self.schedule.steps):
            if step % per_epoch == 0:
                batches = self.schedule.batches.epoch(step // per_epoch)
            yield step, batches[step % per_epoch]

    def _epoch(self) -> float:
        return round(self.step / self.schedule.steps_per_epoch, 4)

    def _evaluation_due(self, last: bool) -> bool:
        if self.eval_set is None:
            return False
        every = self.schedule.steps_per_epoch if self.cfg.eval_every == "epoch" else self.cfg.eval_every
        return last or (every != "never" and self.step % int(every) == 0)

    def _log(self, loss: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        values = torch.stack([loss.float(), norm.float().to(loss.device)]).tolist()  # the device is read here only
        tokens, seconds = self.tokens, self._clock()
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
            "seconds": round(seconds, 4),
        }
        if skipped := self.manager.skipped:
            row["skipped"] = skipped
        self._logged = (tokens, seconds)
        self.slots = self.filled = 0
        self.record.log(row)

    # The clock of training time. Reading it waits for the device, so that a GPU's queue does not count as done.
    _logged: tuple[int, float] = (0, 0.0)
    _began: float | None = None

    def _start_clock(self) -> None:
        self._began = time.perf_counter()

    def _clock(self) -> float:
        return self.seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def _pause_clock(self) -> None:
        if engine.device().type == "cuda":
            torch.cuda.synchronize()
        self.seconds, self._began = self._clock(), None

    def _offenders(self) -> str:
        """Where the rows of the newest steps are. On a GPU the bad step may be the one before the newest."""
        shown = []
        for step, rows in sorted(self.rows_of_step.items()):
            places = [self.train_set.table.where(row) for row in rows[:4]]
            more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
            shown.append(f"step {step + 1}: {'; '.join(places)}{more}")
        return "Rows of the last steps: " + " | ".join(shown)

    def card(self) -> dict[str, Any]:
        """What the model card says of the run."""
        last = next((row for row in reversed(self.record.rows) if "eval_loss" in row), {})
        scores = {name.removeprefix("eval_"): value for name, value in last.items() if name.startswith("eval_")}
        dropped = ("loss", "seconds")
        metrics = {name: round(v, 5) for name, v in scores.items() if v is not None and name not in dropped}
        data = data_name(self.cfg)
        text = f"Trained for {self.step} steps of {self.cfg.global_batch_size} rows ({self.tokens:,} tokens)."
        card: dict[str, Any] = {"text": text, "metrics": metrics}
        if data is not None:
            card |= {"datasets": [data], "dataset": data}
        elif metrics:
            card |= {"dataset": "local", "dataset_name": "local files"}
        if self.cfg.eval_split is not None:
            card["dataset_split"] = self.cfg.eval_split
        return card

    def summary(self, status: str, reason: str | None) -> dict[str, Any]:
        """The fields of summary.json. Memory is the most of any rank, where the run ended as it should."""
        seconds = self._clock()
        peak = peak_memory()
        if status == "finished" and engine.world_size() > 1:
            most = torch.tensor(list(peak.values()), device=engine.device())
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            peak = dict(zip(peak, most.tolist(), strict=True))
        return summarise(
            self.cfg,
            self.record.rows,
            self.task.metrics().main,
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
            skipped_steps=self.manager.skipped,
            peak_memory=peak,
            data={
                "train": self.train_set.table.fingerprint(),
                "eval": self.eval_set and self.eval_set.table.fingerprint(),
            },
        )


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end the run as an exception, so that its summary is written. Only a main thread can be
    told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

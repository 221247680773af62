"""What a run says of itself: at its start, at its end, and on the card of its model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine
from engine.checkpoint import latest_checkpoint
from modelcenter.training.checkpoints import resume
from modelcenter.training.setup.model import data_name

if TYPE_CHECKING:
    from modelcenter.training.loop import Run


def first_line(run: "Run") -> str:
    """One line on what is about to happen."""
    count = f"{len(run.train_set):,} rows" if run.feed.steps_per_epoch is not None else "a stream of rows"
    rows = f"{count} ({run.task.about_columns()})"
    if run.train_set.truncated:
        rows += f", {run.train_set.truncated:,} of them cut at {run.cfg.max_length} tokens"
    judged = f"evaluation on {len(run.eval_set):,} rows" if run.eval_set is not None else "no evaluation data"
    ranks = f"{engine.world_size()} rank{'s' if engine.world_size() > 1 else ''}"
    size = run.cfg.global_batch_size
    each = f"{size} rows" if size is not None else f"{run.cfg.global_batch_tokens} tokens"
    steps = f"{run.feed.steps:,} steps of {each}"
    going_on = f", going on after step {run.step:,}" if run.step else ""
    return f"{rows}; {judged}; {steps} on {ranks} ({engine.device()}, {run.cfg.precision}){going_on}"


def last_line(run: "Run", output: Path) -> str:
    """What has become of the run, and what can be done next; collective."""
    steps = f"step {run.step:,}/{run.feed.steps:,}"
    if run.stopping.reason is not None:
        saved = latest_checkpoint(output / resume.CHECKPOINTS) is not None
        anew = "--overwrite_output_dir" if run.cfg.overwrite_output_dir else "--resume never"
        but = f" without {anew}" if saved and (anew != "--resume never" or run.cfg.resume == "never") else ""
        return f"{run.stopping.reason}, at {steps}; the same command{but} {'goes on' if saved else 'starts again'}"
    if run.cfg.quantize is not None:
        return f"finished at {steps}: what was trained is in {output / 'adapter'}"
    kept = run.selection.best if run.cfg.best_metric is not None else {}
    which = f", of step {kept['step']:,} ({run.cfg.best_metric} {kept['value']:.4f})" if kept else ""
    use = f"`modelcenter predict {shlex.quote(str(output))} DATA` uses it"
    return f"finished at {steps}: the model is in {output / 'model'}{which}; {use}"


def card_of(run: "Run") -> dict[str, Any]:
    """What the model card says of the run."""
    best = run.selection.best.get("step") if run.cfg.best_metric is not None else None
    rows = (row for row in reversed(run.record.rows) if "eval_loss" in row)
    judged = next((row for row in rows if best in (None, row["step"])), {})
    scores = {name.removeprefix("eval_"): value for name, value in judged.items() if name.startswith("eval_")}
    dropped = ("loss", "seconds")
    metrics = {name: round(v, 5) for name, v in scores.items() if v is not None and name not in dropped}
    data = data_name(run.cfg)
    size = run.cfg.global_batch_size
    text = f"Trained for {run.step} steps of {f'{size} rows' if size else f'{run.cfg.global_batch_tokens} tokens'}"
    text += f" ({run.meter.tokens:,} tokens)."
    if best not in (None, run.step):
        text += f" The model is that of step {best}, the best by {run.cfg.best_metric}."
    card: dict[str, Any] = {"text": text, "metrics": metrics}
    if data is not None:
        card |= {"datasets": [data], "dataset": data}
    elif metrics:
        card |= {"dataset": "local", "dataset_name": "local files"}
    if run.cfg.eval_split is not None:
        card["dataset_split"] = run.cfg.eval_split
    return card

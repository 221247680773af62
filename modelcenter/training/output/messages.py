"""The messages of a run: at its start, at its end, and on the card of its model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine
from engine.checkpoint import latest_checkpoint
from modelcenter.data.batching.mixture import parse_weight
from modelcenter.data.sources import is_hub_name
from modelcenter.data.token_files import is_tokens
from modelcenter.training.config import TrainConfig
from modelcenter.training.output.folder import CHECKPOINTS

if TYPE_CHECKING:
    from modelcenter.training.loop import Run


def start_message(run: "Run") -> str:
    """One line on what is about to happen."""
    count = f"{len(run.train_set):,} rows" if run.batch_source.steps_per_epoch is not None else "a stream of rows"
    rows = f"{count} ({run.task.describe_columns()})"
    if run.train_set.truncated:
        assert run.cfg.max_length is not None
        rows += f", {run.train_set.truncated:,} of them truncated at {run.task.length_limit(run.cfg.max_length)}"
    evaluation = f"evaluation on {len(run.eval_set):,} rows" if run.eval_set is not None else "no evaluation data"
    ranks = f"{engine.world_size()} rank{'s' if engine.world_size() > 1 else ''}"
    size = run.cfg.global_batch_size
    step_size = f"{size} rows" if size is not None else f"{run.cfg.global_batch_tokens} tokens"
    steps = f"{run.batch_source.steps:,} steps of {step_size}"
    going_on = f", continuing after step {run.step:,}" if run.step else ""
    return f"{rows}; {evaluation}; {steps} on {ranks} ({engine.device()}, {run.cfg.precision}){going_on}"


def end_message(run: "Run", output: Path) -> str:
    """One line on how the run ended and what can be done next. Collective."""
    steps = f"step {run.step:,}/{run.batch_source.steps:,}"
    if run.stopping.reason is not None:
        return f"{run.stopping.reason}, at {steps}; {next_start(run, output)}"
    if run.cfg.quantize is not None:
        return f"finished at {steps}: the adapter is in {output / 'adapter'}"
    best = run.selection.best if run.cfg.best_metric is not None else {}
    which = f", of step {best['step']:,} ({run.cfg.best_metric} {best['value']:.4f})" if best else ""
    use = f"`modelcenter predict {shlex.quote(str(output))} DATA` uses it"
    return f"finished at {steps}: the model is in {output / 'model'}{which}; {use}"


def next_start(run: "Run", output: Path) -> str:
    """What the same command does after a run that was stopped. Collective."""
    newest = latest_checkpoint(output / CHECKPOINTS)
    if newest is None:
        return "the same command starts over"
    fresh_start = ""  # the flag that would make the same command start over
    if run.cfg.overwrite_output_dir:
        fresh_start = " without --overwrite_output_dir"
    elif run.cfg.resume == "never":
        fresh_start = " without --resume never"
    step = int(newest.name.removeprefix("step-"))
    return f"the same command{fresh_start} continues{'' if step == run.step else f' after step {step:,}'}"


def model_card(run: "Run") -> dict[str, Any]:
    """The fields of the model card that the run knows; see hub.card."""
    best = run.selection.best.get("step") if run.cfg.best_metric is not None else None
    rows = (row for row in reversed(run.record.rows) if "eval_loss" in row)
    evaluation: dict[str, Any] = next((row for row in rows if best in (None, row["step"])), {})
    scores = {name.removeprefix("eval_"): value for name, value in evaluation.items() if name.startswith("eval_")}
    omitted = ("loss", "seconds")
    metrics = {name: round(v, 5) for name, v in scores.items() if v is not None and name not in omitted}
    data = data_name(run.cfg)
    size = run.cfg.global_batch_size
    text = f"Trained for {run.step} steps of {f'{size} rows' if size else f'{run.cfg.global_batch_tokens} tokens'}"
    text += f" ({run.throughput.tokens:,} tokens)."
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


def data_name(cfg: TrainConfig) -> str | None:
    """The Hub name of the training data, for the model card; None for local files."""
    names = [parse_weight(entry)[0] for entry in cfg.train_data or []]
    return names[0] if len(names) == 1 and is_hub_name(names[0]) and not is_tokens(names[0]) else None

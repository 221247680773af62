"""model/: the trained model as a Hugging Face directory, and its way to the Hub."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import engine
from engine.checkpoint import load_model
from engine.collectives import together
from modelcenter.adapters import merge_lora, save_adapter
from modelcenter.hub.remote.push import push_directory
from modelcenter.training.checkpoints.model_selection import best_checkpoint
from modelcenter.training.output.folder import CHECKPOINTS
from modelcenter.training.output.messages import model_card

if TYPE_CHECKING:
    from modelcenter.training.loop import Run


def save_final_model(run: "Run", target: Path) -> None:
    """Write the model as a Hugging Face directory: the best one if best_metric says so. Collective."""
    assert run.checkpoints is not None
    run.checkpoints.wait()
    best = run.selection.best if run.cfg.best_metric is not None else {}
    if best and best["step"] != run.step:
        _load_best_model(run, target.parent / CHECKPOINTS)
    if run.cfg.lora_rank is not None:
        save_adapter(run.model, target.parent / "adapter", run.tokenizer)
        if run.cfg.quantize is not None:
            run.record.report("the weights are in 4 bits, which take no updates: adapter/ is what was trained")
            return
        merge_lora(run.model)
    run.task.save_model(run.model, target, run.tokenizer, model_card(run))


def _load_best_model(run: "Run", checkpoints: Path) -> None:
    """Load the weights of the best evaluation; where they could not be written, those of the best before it, or keep
    the last ones, which is reported."""
    path, best_step = best_checkpoint(checkpoints), run.selection.best["step"]
    step = None if path is None else int(path.name.removeprefix("step-"))
    if step != best_step:
        run.selection.fall_back(step, run.record.rows)
        kept = f"that of step {step}" if run.selection.best else "the last one"
        run.record.report(f"{checkpoints}: the best model, of step {best_step}, is not there; {kept} takes its place")
    if run.selection.best:
        assert path is not None
        load_model(path, run.model)


def push_final_model(run: "Run", output: Path, repo_id: str) -> None:
    """Push the model as --push_to_hub says. Collective.

    Raises:
        ValueError: the Hub refuses, or cannot be reached; the model stays in output_dir.
    """
    with together(f"publishing {output / 'model'}", patient=True):
        if engine.rank() == 0:
            try:
                pushed = push_directory(output, repo_id)
            except ValueError as error:  # for the command of this run, all is done
                remedy = shlex.join(["modelcenter", "push", str(output), repo_id])
                raise ValueError(f"{error}. The model is in {output / 'model'}; `{remedy}` pushes it") from None
            run.record.report(f"pushed to {pushed.address}")

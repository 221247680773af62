"""model/: writing the trained model as a Hugging Face directory, and pushing it to the Hub."""

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
    """Write the model as a Hugging Face directory: with best_metric, the best one. Collective."""
    assert run.checkpoints is not None
    run.checkpoints.wait()
    best = run.selection.best if run.cfg.best_metric is not None else {}
    if best and best["step"] != run.step:
        _load_best_model(run, target.parent / CHECKPOINTS)
    if run.cfg.lora_rank is not None:
        save_adapter(run.model, target.parent / "adapter", run.tokenizer)
        if run.cfg.quantize is not None:
            run.record.report("the weights are in 4 bits, so updates cannot be merged: the result is in adapter/")
            return
        merge_lora(run.model)
    run.task.save_model(run.model, target, run.tokenizer, model_card(run))


def _load_best_model(run: "Run", checkpoints: Path) -> None:
    """Load the weights of the best evaluation. If they could not be written, load those of the best one before it, or
    keep the last ones, and report that."""
    path, best_step = best_checkpoint(checkpoints), run.selection.best["step"]
    step = None if path is None else int(path.name.removeprefix("step-"))
    if step != best_step:
        run.selection.fall_back(step, run.record.rows)
        kept = f"that of step {step}" if run.selection.best else "the last one"
        run.record.report(f"{checkpoints}: the best model, of step {best_step}, is missing; {kept} is used instead")
    if run.selection.best:
        assert path is not None
        load_model(path, run.model)


def push_final_model(run: "Run", output: Path, repo_id: str) -> None:
    """Push the model to the repository of --push_to_hub. Collective.

    Raises:
        ValueError: the Hub refuses it or cannot be reached; the model stays in output_dir.
    """
    with together(f"publishing {output / 'model'}", patient=True):
        if engine.rank() == 0:
            try:
                pushed = push_directory(output, repo_id)
            except ValueError as error:  # repeating the run's command would not push: the run is finished
                remedy = shlex.join(["modelcenter", "push", str(output), repo_id])
                raise ValueError(f"{error}. The model is in {output / 'model'}; `{remedy}` pushes it") from None
            run.record.report(f"pushed to {pushed.address}")

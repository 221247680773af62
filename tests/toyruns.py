"""Run scripts on toy data, kill them, and compare their results."""

import json
import multiprocessing
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file
from toydata import SIZES, command, flags, read_jsonl

from engine.testing import run as on_ranks
from modelcenter.training import loop
from scripts.finetune_classification import main

DROPPED = {"model_config": SIZES | {"dropout": 0.3, "attention_dropout": 0.3}}


def run_script(main, values, ranks: int = 1, timeout: float = 90) -> list[dict]:
    """Run a script on this many ranks; returns the rows of metrics.jsonl."""
    if ranks == 1:
        main(command(values))
    else:
        on_ranks(lambda: main(command(values)), ranks, timeout=timeout)
    return read_jsonl(f"{values['output_dir']}/metrics.jsonl")


def train_classifier(folder, ranks: int = 1, **changes) -> list[dict]:
    """Train a classifier on the rows of a folder (`flags`); returns the rows of metrics.jsonl."""
    return run_script(main, flags(folder, **changes), ranks)


def read_summary(folder, name: str = "run") -> dict:
    return json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))


def in_transformers(folder, rows: list[dict], name: str = "run"):
    """The exported model's logits, computed by transformers alone, and its label2id."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(str(folder / name / "model")).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder / name / "model"))
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits, model.config.label2id


def in_a_process(main, values) -> int:
    """Run a script in its own process; returns its exit code, -9 if it was killed."""
    child = multiprocessing.get_context("fork").Process(target=main, args=(command(values),))
    child.start()
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode


def curve(folder, name) -> list[dict]:
    """The metrics of a run without times."""
    rows = read_jsonl(folder / name / "metrics.jsonl")
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def weights(folder, name) -> dict:
    return load_file(folder / name / "model" / "model.safetensors")


def assert_same_end(folder, name, other="whole"):
    """Assert that two runs have the same curve and weights. other: a name, or the path of a run in another folder."""
    assert curve(folder, name) == curve(folder, other)
    for key, tensor in weights(folder, other).items():
        assert torch.equal(tensor, weights(folder, name)[key]), key


def went_on_after(capfd) -> int:
    """The step from which the last run said that it resumed, 0 if it started anew; discards the output so far.

    With the same seed, a run that starts anew has the same curve as one that resumes.
    """
    said = [line for line in capfd.readouterr().out.splitlines() if " evaluation " in line and " steps of " in line]
    found = re.search(r", continuing after step ([\d,]+)$", said[-1])
    return int(found[1].replace(",", "")) if found else 0


def die_at(monkeypatch, step, number=signal.SIGKILL):
    """Send the process a signal before it takes a step."""
    take = loop.Run.train_step

    def train_step(self, batch):
        if batch.step == step:
            os.kill(os.getpid(), number)
        return take(self, batch)

    monkeypatch.setattr(loop.Run, "train_step", train_step)


def assert_same_steps(rows, model, batches, loss_of, optimizer=None, schedule=None, rel=1e-3, abs=2e-5) -> None:
    """Assert that a run has the losses, gradient norms and learning rates of a plain loop over another library's model.

    Args:
        rows: metrics of the run, one row per step; it clipped gradients at 0.5. batches: those of all steps, in order.
        loss_of: `loss_of(batch)`. optimizer: None: AdamW at 1e-2 without decay. schedule: None: a constant rate.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for row, batch in zip(rows, batches, strict=True):
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = {"loss": loss.item(), "grad_norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=rel, abs=abs), row["step"]
        optimizer.step()
        if schedule is not None:
            schedule.step()


def run_values(folder, name, **changes) -> dict:
    """Flags of a run of 3 epochs of 27 rows, 12 steps, with a checkpoint after every second step."""
    return flags(folder, **{"output_dir": str(folder / name), "epochs": 3, "save_every": 2} | changes)


def short_run_values(folder, name, **changes) -> dict:
    """Flags of a run of 4 steps."""
    return flags(folder, **{"output_dir": str(folder / name), "max_steps": 4, "save_every": 2} | changes)


def stop_at(monkeypatch, step, values):
    """Train a classifier that gets SIGTERM before a step."""
    with monkeypatch.context() as patch:
        die_at(patch, step, signal.SIGTERM)
        main(command(values))


def best_of(folder, name="run") -> str:
    """The name of the checkpoint that `best` points to."""
    return (folder / name / "checkpoints" / "best").resolve().name

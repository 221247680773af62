"""The script as people start it: alone, under torchrun (under accelerate: test_launch.py); and the recipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from toydata import command, flags, write_folder
from toyruns import read_summary

from modelcenter._paths import scripts_dir
from modelcenter.training.tasks import TASKS
from scripts.finetune_classification import main

SCRIPT = scripts_dir() / "finetune_classification.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=18, dev=7)


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """From another folder than the checkout, without it on the path: the script finds its packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=cwd, env=env)


def losses(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("eval_loss")) for row in rows]


@pytest.mark.full
def test_alone_and_under_torchrun_are_the_same_run(folder):
    main(command(flags(folder, output_dir=str(folder / "alone"))))
    two = start(*TORCHRUN, str(SCRIPT), *command(flags(folder, output_dir="two", batch_size=4)), cwd=folder)
    assert two.returncode == 0, two.stderr
    assert losses(folder, "two") == pytest.approx(losses(folder, "alone"), abs=1e-5)
    assert len(losses(folder, "two")) == 4  # 18 rows: steps of 8, 8 and 2, and an evaluation
    summary = read_summary(folder, "two")
    assert summary["status"] == "finished" and summary["hardware"]["ranks"] == 2
    assert "finetune_classification.py --model tiny/bert" in summary["command"]
    assert two.stdout.count("step 3/3") == 3  # rank 0 alone speaks: the step, its evaluation, the end


@pytest.mark.full
def test_mistakes_are_said_once_under_torchrun(folder):
    done = start(*TORCHRUN, str(SCRIPT), *command(flags(folder, train_data="nowhere.tsv")), cwd=folder)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: nowhere.tsv: no such file or directory")


def test_script_is_readable_in_one_sitting():
    assert len(SCRIPT.read_text().splitlines()) < 150


@pytest.mark.parametrize("path", sorted((scripts_dir() / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_are_flags(path):
    text = path.read_text()
    task = yaml.safe_load(text).get("task", "classification")
    cfg = TASKS[task].flags().from_yaml(path)
    assert cfg.model and cfg.train_data and cfg.output_dir is None  # the folder is the user's choice
    assert (
        text.startswith("# ")
        and f"modelcenter {TASKS[task].verb} {task.removeprefix(TASKS[task].verb + '-')}" in text
        and f"--config scripts/recipes/{path.name}" in text
    )
    named = [role for role in cfg.roles if getattr(cfg, f"{role}_column") is not None]
    if cfg.form is None and task in ("classification", "token-classification", "qa", "multiple-choice"):
        assert set(cfg.roles) - set(named) <= {"text_pair", "group"}  # nothing is left to be found


def test_recipes_are_shipped():
    assert len(list((scripts_dir() / "recipes").glob("*.yaml"))) >= 5

"""The main job on sample data, as `make demo` runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo import MARKER, finetune, prepare

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "scripts" / "samples"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def demo(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_samples_are_balanced_and_do_not_overlap():
    train, dev = rows("train"), rows("dev")
    assert (len(train), len(dev)) == (320, 80)
    for split in (train, dev):
        assert sum(row["label"] == "positive" for row in split) == len(split) / 2
        assert {row["label"] for row in split} == {"positive", "negative"}
        assert sum(bool(re.search("[\u4e00-\u9fff]", row["text"])) for row in split) == len(split) / 2
    texts = [row["text"] for row in train + dev]
    assert len(set(texts)) == len(texts)


def test_the_ranks_meet_where_nobody_knows_the_machines_name(tmp_path: Path, monkeypatch):
    from torch.distributed.run import parse_args

    commands = []
    monkeypatch.setattr("scripts.demo.run", lambda words, log: commands.append(words))
    (tmp_path / "summary.json").write_text("{}")
    finetune(tmp_path / "start", tmp_path, 2, 1)
    (words,) = commands
    parsed = parse_args(words[3:])
    assert parsed.standalone and parsed.local_addr == "127.0.0.1" and parsed.nproc_per_node == "2"


@pytest.mark.full
def test_demo(tmp_path: Path):
    done = demo("--output_dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = float(re.search(r"accuracy (\d\.\d+) on 80 dev rows", done.stdout)[1])
    assert accuracy >= 0.8
    assert "logits equal" in done.stdout
    run = tmp_path / "out" / "run"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "model/model.safetensors",
        "model/config.json",
    ):
        assert (run / name).stat().st_size > 0
    prepare(tmp_path / "out")  # as another demo there begins
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MARKER]


def test_demo_leaves_other_files_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="has files that no demo wrote"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.full
def test_demo_fails_when_a_step_fails(tmp_path: Path):
    done = demo("--output_dir", "out", "--epochs", "-1", cwd=tmp_path)
    assert done.returncode != 0
    assert "epochs" in done.stdout and "failed with exit status" in done.stderr

"""Runs that a program starts, and no command line."""

import pathlib
import shlex

import pytest
from toydata import flags, write_folder
from toyruns import curve, read_summary, train_classifier

import modelcenter as mc
from modelcenter.training.config import ClassificationConfig
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


def test_a_call_trains_as_the_command_does(folder):
    train_classifier(folder, max_steps=3, eval_every=2, freeze=["embed.*"], output_dir=str(folder / "command"))
    values = flags(folder, max_steps=3, eval_steps=2, freeze=["embed.*"])
    values |= {"output_dir": folder / "run", "train_data": [pathlib.Path(values["train_data"])]}
    del values["epochs"]
    summary = mc.training.run("classification", **values)
    assert curve(folder, "run") == curve(folder, "command")
    assert summary == read_summary(folder) and summary["status"] == "finished"
    # The command that it names does the same.
    program, verb, task, *words = shlex.split(summary["command"])
    assert (program, verb, task) == ("modelcenter", "finetune", "classification") and "--eval_every" in words
    main([*words, "--output_dir", str(folder / "again")])
    assert curve(folder, "again") == curve(folder, "run")
    with pytest.raises(ValueError, match="output_dir: .*run has a finished run"):
        mc.training.run("classification", **values)


def test_a_file_of_flags_and_a_dry_run(folder, capsys):
    (folder / "flags.yaml").write_text("lr: 3e-4\nlr_scheduler: cosine\nmax_steps: 7\n")
    cfg = ClassificationConfig.from_keywords(
        {"config": folder / "flags.yaml", "compile": False, "columns": {"text": "a"}}
    )
    assert (cfg.lr, cfg.text_column) == (3e-4, "a")
    assert shlex.join(cfg.words) == f"--config {folder}/flags.yaml --compile False --columns text=a"
    values = flags(folder, config=folder / "flags.yaml", learning_rate=0.25, dry_run=True)
    del values["lr"], values["epochs"], values["output_dir"]
    assert mc.training.run("classification", **values) == {}
    assert "steps       7 (" in (shown := capsys.readouterr().out) and "lr 0.25 cosine" in shown


@pytest.mark.parametrize(
    ("task", "changes", "says"),
    [
        ("clasification", {}, "task: got 'clasification', expected one of .*Did you mean 'classification'"),
        ("classification", {"lrr": 3}, "the call has the unknown key 'lrr'. Did you mean 'lr'?"),
        ("classification", {"learning_rate": 3}, "the call gives lr twice, the second time as 'learning_rate'"),
        ("classification", {"fp16": True}, "the call: fp16 is not a flag here: --precision fp16 computes in fp16"),
        ("classification", {"lr": "fast"}, "lr: got 'fast', expected a number"),
        ("classification", {"model": None}, "--model is needed"),
        ("classification", {"max_steps": 3}, "epochs: changes nothing with max_steps"),
        ("classification", {"config": "nothere.yaml"}, "config: cannot read nothere.yaml"),
    ],
)
def test_mistakes_in_a_call_are_those_of_a_command(folder, task, changes, says):
    with pytest.raises(ValueError, match=says):
        mc.training.run(task, **flags(folder, **changes))
    assert not (folder / "run").exists()

"""The folder of a run: what may be in it before, what is never overwritten, and when none is made."""

import json
import os
import shutil

import pytest
from toydata import command, write_folder
from toyruns import read_summary, short_run_values, train_classifier

from modelcenter.training.output.folder import clear_output
from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27, dev=4)


@pytest.mark.parametrize("name", ["checkpoints", "model"])
def test_a_link_to_a_folder_elsewhere_stays_one(folder, name):
    elsewhere, precious = folder / "elsewhere", folder / "precious"
    for path in (elsewhere / "old", precious / "weights", folder / "run"):
        path.mkdir(parents=True)
    (elsewhere / "newest").symlink_to("old")
    (elsewhere / "mine").symlink_to(precious)
    (folder / "run" / name).symlink_to(elsewhere)
    main(command(short_run_values(folder, "run", max_steps=1)))
    assert (folder / "run" / name).is_symlink()
    assert not {"old", "newest", "mine"} & set(os.listdir(elsewhere)) and os.listdir(precious) == ["weights"]
    assert (elsewhere / {"checkpoints": "last", "model": "config.json"}[name]).exists()
    main(command(short_run_values(folder, "run", max_steps=1, overwrite_output_dir=True)))
    elsewhere.rename(folder / "gone")
    says = rf"output_dir: .*{name} is a link to .*elsewhere, which does not exist; create"
    with pytest.raises(ValueError, match=says):
        main(command(short_run_values(folder, "run", max_steps=1, overwrite_output_dir=True)))


def test_nothing_of_a_run_is_left_by_the_next(tmp_path):
    """Not even an empty adapter/, by which a run is told from one without."""
    for name in ("adapter", "model", "checkpoints/step-00000001"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    for name in ("metrics.jsonl", "mine.txt"):
        (tmp_path / name).touch()
    clear_output(tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_output_dir_is_never_overwritten_unasked(folder):
    train_classifier(folder, max_steps=1)
    with pytest.raises(ValueError, match="output_dir: .*run has a finished run; .*--overwrite_output_dir"):
        train_classifier(folder, max_steps=1)
    with pytest.raises(ValueError, match="no column 'txt'"):
        train_classifier(folder, text_column="txt", overwrite_output_dir=True)
    assert read_summary(folder)["steps"] == 1  # a mistake costs no finished run
    assert train_classifier(folder, max_steps=2, overwrite_output_dir=True)[-1]["step"] == 2
    (folder / "logged").mkdir()
    for name in ("log", "nohup.out"):  # `> logged/log`
        (folder / "logged" / name).touch()
    assert train_classifier(folder, output_dir=str(folder / "logged"), max_steps=1)[-1]["step"] == 1
    assert (folder / "logged" / "log").exists()
    (folder / "home").mkdir()
    (folder / "home" / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="has files that are not from a run"):
            train_classifier(folder, output_dir=str(folder / "home"), overwrite_output_dir=overwrite)
    assert (folder / "home" / "thesis.tex").exists()
    for name in ("config.yaml", "model/model.safetensors", "checkpoints/mine.pt"):  # as a run names them
        own = folder / "own" / name
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("batch_size: 4 # fits")
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"own has files that are not from a run \\({name.split('/')[0]}, "):
                train_classifier(folder, output_dir=str(folder / "own"), overwrite_output_dir=overwrite)
        assert own.read_text() == "batch_size: 4 # fits"
        own.unlink()
        assert (
            train_classifier(folder, output_dir=str(folder / "own"), max_steps=1)[-1]["step"] == 1
        )  # an empty folder is fine
        shutil.rmtree(folder / "own")
    with pytest.raises(ValueError, match="output_dir: .*thesis.tex is a file, expected a folder or a new name"):
        train_classifier(folder, output_dir=str(folder / "home" / "thesis.tex"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_length": 33}, "max_length: got 33, but the position table of this model has 32"),
        ({"max_length": 3}, "max_length: got 3, expected more than the 3 special tokens"),
        ({"text_column": "txt"}, "text_column: .* has no column 'txt', it has 'text', 'label'; did you mean 'text'"),
        ({"num_labels": 1, "problem_type": "regression"}, "line 1: label '(good|bad)' is not a number"),
        ({"eval_split": "tset"}, "has no split 'tset'"),
        ({"tokenizer": "nowhere/at/all"}, "^tokenizer: no such directory: nowhere/at/all"),
        ({"model_config": {"vocab_size": 7}}, "has 29 tokens, but the model's vocab_size is 7"),
        (
            {"model_config": {"hiden_size": 7}},
            "^model: .*not understood: 'hiden_size' = 7.* Did you mean 'hidden_size'",
        ),
        ({"model": "./nowhere"}, "^model: no such directory: nowhere"),
        ({"global_batch_size": 12}, "global_batch_size: got 12, expected a multiple of 8"),
        (
            {"train_data": "data/train.jsonl", "eval_every": 2},
            "eval_every: changes nothing without rows to evaluate on; give eval",
        ),
    ],
)
def test_flags_that_no_run_can_begin_with_leave_no_folder(folder, changes, says, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises((ValueError, OSError), match=says):
        train_classifier(folder, output_dir=str(folder / "runs" / "a"), **changes)
    assert not (folder / "runs").exists()


def test_a_mistake_leaves_the_folders_that_were_there(folder):
    (folder / "runs" / "a").mkdir(parents=True)
    for name in ("a", "b/c"):
        with pytest.raises(ValueError, match="text_column"):
            train_classifier(folder, text_column="txt", output_dir=str(folder / "runs" / name))
    assert [path.name for path in (folder / "runs").rglob("*")] == ["a"]


def test_output_that_cannot_be_written(folder):
    (folder / "file").touch()
    with pytest.raises(OSError, match="output_dir: cannot write to .*file/run: Not a directory"):
        train_classifier(folder, output_dir=str(folder / "file" / "run"))


def test_a_name_that_is_not_utf_8_costs_no_checkpoint_and_no_summary(folder):
    """As unzip leaves the names of an archive from a Chinese Windows."""
    data = folder / os.fsdecode(b"\xb2\xe2.jsonl")
    shutil.copy(folder / "data" / "train.jsonl", data)
    train_classifier(folder, train_data=str(data), eval_fraction=0.2, save_every=2, max_steps=4)
    assert list(read_summary(folder)["data"]["train"]["sha256"]) == [str(data)]
    about = json.loads((folder / "run" / "checkpoints" / "last" / "run.json").read_text())
    assert about["step"] == 4 and str(data) in about["data"]["sha256"]
    assert (folder / "run" / "model" / "README.md").is_file()

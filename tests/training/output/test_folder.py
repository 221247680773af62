"""The folder of a run."""

import os

import pytest
from toydata import command, write_folder
from toyruns import short_run_values

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
    with pytest.raises(ValueError, match=rf"output_dir: .*{name} is a link to .*elsewhere, which is not there; make"):
        main(command(short_run_values(folder, "run", max_steps=1, overwrite_output_dir=True)))

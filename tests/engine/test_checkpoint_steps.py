"""Many checkpoints of a run in one directory: which stay, which are named best and last, which is the newest."""

import os
import shutil
from unittest import mock

import engine_toys as toys
import pytest
from checkpoint_toys import Run
from directory_toys import names

import engine
from engine.checkpoint import check_manifest, finish_save, steps
from engine.checkpoint import training as module
from modelcenter.hub.run_folder import find_step


def test_keep_and_best_and_last(tmp_path):
    run = Run(3, 1)
    run.step(0)
    for left in ("partial", "old"):
        (tmp_path / f".step-00000009.{left}-dead").mkdir()
    mine = tmp_path / "step-00000000-mine"
    mine.mkdir()
    for step in range(1, 6):
        done = engine.save_checkpoint(tmp_path, run.model, run.manager, step=step, keep=2, best=step == 2)
        assert done == tmp_path / f"step-{step:08d}"
    mine.rmdir()  # which is none of these, and stayed
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "best").resolve().name == "step-00000002" and os.readlink(tmp_path / "last") == "step-00000005"
    assert engine.latest_checkpoint(tmp_path) == tmp_path / "step-00000005"
    engine.load_checkpoint(tmp_path / "best", run.model, run.manager)
    # Back to an earlier step: later ones are not this run's to remove.
    engine.save_checkpoint(tmp_path, run.model, step=3, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000003", "step-00000004", "step-00000005"]


def test_no_whole_checkpoint_is_removed_for_a_broken_one(tmp_path):
    """A broken one is none of those that are kept; it goes when there are enough whole ones that are newer."""
    model = toys.build()
    for step in (1, 2, 3, 4):
        engine.save_checkpoint(tmp_path, model, step=step)
    next((tmp_path / "step-00000003" / "model").glob("*.distcp")).unlink()
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    engine.save_checkpoint(tmp_path, model, step=5, keep=2)
    assert names(tmp_path) == ["last", "step-00000002", "step-00000003", "step-00000004", "step-00000005"]
    finish_save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["last", "step-00000005"]
    (tmp_path / "step-00000005" / "manifest.json").write_text("")
    engine.save_checkpoint(tmp_path, model, step=6, keep=1)
    assert names(tmp_path) == ["last", "step-00000006"]


def test_of_an_old_checkpoint_that_is_a_link_only_the_link_is_removed(tmp_path):
    model = toys.build()
    engine.save_checkpoint(tmp_path / "run", model, step=1)
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "moved")
    engine.save_checkpoint(tmp_path / "run", model, step=2, keep=1)
    assert names(tmp_path / "run") == ["last", "step-00000002"]
    check_manifest(tmp_path / "moved")


def test_a_save_that_was_killed_before_it_named_its_checkpoint_is_finished(tmp_path, monkeypatch):
    run = Run(3, 1)
    with monkeypatch.context() as patch:
        engine.save_checkpoint(tmp_path, run.model, step=1, best=True)
        patch.setattr(module, "clear_up", lambda *_: None)
        for step in (2, 3):
            engine.save_checkpoint(tmp_path, run.model, step=step, best=True)
    (tmp_path / ".best.dead").symlink_to("step-00000003")
    finish_save(tmp_path, 3, best=7)  # which is gone
    assert names(tmp_path) == ["best", "last", "step-00000001", "step-00000002", "step-00000003"]
    assert [os.readlink(tmp_path / name) for name in ("best", "last")] == ["step-00000001", "step-00000003"]
    finish_save(tmp_path, 3, best=2, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000003"]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    with monkeypatch.context() as patch:  # killed as it begins to remove one
        patch.setattr(steps, "remove_directory", lambda path: None)
        finish_save(tmp_path, 3, best=3, keep=1)
    assert not (tmp_path / "step-00000002").exists()


def test_the_newest_valid_one_is_found_with_a_word_about_the_broken(tmp_path):
    run = Run(3, 1)
    assert engine.latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        engine.load_checkpoint(tmp_path, run.model)
    for step in (9, 10, 11):
        engine.save_checkpoint(tmp_path, run.model, run.manager, {"step": step}, step=step)
    next((tmp_path / "step-00000011" / "model").glob("*.distcp")).unlink()
    with pytest.warns(UserWarning, match="passed over: .*step-00000011 is incomplete: model/.*distcp is missing"):
        assert engine.load_checkpoint(tmp_path, run.model, run.manager) == {"step": 10}
    (tmp_path / "step-00000012").write_text("a file")  # no word about that
    (tmp_path / "step-00000013-mine").mkdir()
    data = next((tmp_path / "step-00000010" / "model").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning) as warned:
        assert engine.latest_checkpoint(tmp_path, verify=True) == tmp_path / "step-00000009"
    assert "step-00000011" in str(warned[0].message) and "sha256" in str(warned[1].message)
    shutil.rmtree(tmp_path / "step-00000009")
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"no valid checkpoint: .*distcp is missing; .*sha256"),
    ):
        engine.load_checkpoint(tmp_path, run.model, run.manager, verify=True)


def test_a_file_system_without_links_has_names_in_files(tmp_path, monkeypatch):
    """And one that takes no names either still has its old checkpoints removed."""
    run = Run(3, 1)
    refuse = mock.Mock(side_effect=OSError(95, "Operation not supported"))
    monkeypatch.setattr(module.Path, "symlink_to", refuse)
    for step in range(1, 5):
        engine.save_checkpoint(tmp_path, run.model, None, {"n": step}, step=step, keep=1, best=step == 2)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004"]
    assert (tmp_path / "last").is_file() and not (tmp_path / "last").is_symlink()
    assert engine.load_checkpoint(tmp_path / "best", run.model) == {"n": 2}
    assert engine.latest_checkpoint(tmp_path / "best") == tmp_path / "step-00000002"
    (tmp_path / "last").write_text("step-00000004\n")  # by hand
    assert engine.latest_checkpoint(tmp_path / "last") == tmp_path / "step-00000004"
    (tmp_path / "notes").write_text("and/or")
    assert engine.latest_checkpoint(tmp_path / "notes") is None
    (tmp_path / "notes").unlink()
    assert find_step(tmp_path / "best", None) == find_step(tmp_path, "best") == tmp_path / "step-00000002"
    assert find_step(tmp_path / "last", None) == find_step(tmp_path, "last") == tmp_path / "step-00000004"
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", refuse)
        with pytest.raises(OSError, match="not supported"):
            engine.save_checkpoint(tmp_path, run.model, None, {"n": 5}, step=5, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000005"]
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path, run.model, None, {"n": 6}, step=6, best=True)  # where there are links again
    assert os.readlink(tmp_path / "best") == os.readlink(tmp_path / "last") == "step-00000006"
    (tmp_path / "last").unlink()  # as of a copy without links
    assert find_step(tmp_path, None) == find_step(tmp_path, "last") == tmp_path / "step-00000006"

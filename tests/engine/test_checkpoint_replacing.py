"""A checkpoint takes the place of an older one in one step, and of nothing else."""

import ctypes
import errno
import functools
import os
import shutil
import stat
from pathlib import Path

import engine_toys as toys
import pytest
from checkpoint_toys import Run, save
from directory_toys import names

import engine
from engine.checkpoint import atomic_directory, check_manifest, files, save_model


def put(path, text):
    with atomic_directory(path) as new:
        (new / "a").write_text(text)


def test_replacing_is_one_step_where_the_system_has_it(tmp_path, monkeypatch):
    """No rename alone has such a step, so none takes part; without it, the names are as after it."""
    path = tmp_path / "run [1]"
    put(path, "first")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    exchanges = files.exchange_names(tmp_path / "one", tmp_path / "other")
    for name in ("one", "other"):
        (tmp_path / name).rmdir()
    with monkeypatch.context() as patch:
        if exchanges:
            patch.setattr(Path, "rename", None)
        put(path, "second")
    assert (path / "a").read_text() == "second" and [p.name for p in tmp_path.iterdir()] == [path.name]
    monkeypatch.setattr(files, "exchange_names", lambda one, other: False)
    put(path, "third")
    assert (path / "a").read_text() == "third" and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_sandbox_that_does_not_know_how_to_exchange_names(tmp_path, monkeypatch):
    """An error of the disk is one all the same, and changes nothing."""
    numbers = [errno.EIO, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS]  # the last first

    class Library:
        @staticmethod
        def renameat2(*_):
            ctypes.set_errno(numbers.pop())
            return -1

    put(tmp_path / "run", "first")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    for _ in numbers[1:]:
        put(tmp_path / "run", "second")
    with pytest.raises(OSError, match="Input/output error: '.*/run'"):
        put(tmp_path / "run", "third")
    assert (tmp_path / "run" / "a").read_text() == "second" and os.listdir(tmp_path) == ["run"]


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    target, synced = tmp_path / "saved", []

    def note(entry):
        synced.append((entry.name, target.exists()))

    monkeypatch.setattr(files, "fsync", note)
    with atomic_directory(target) as path:
        (path / "part").mkdir()
        (path / "part" / "file").write_text("x")
    assert {name for name, there in synced if not there} >= {"part", "file", files.MANIFEST, path.name}
    assert synced[-1] == (tmp_path.name, True)


def test_what_is_replaced_goes_when_the_new_name_is_on_the_disk(tmp_path, monkeypatch):
    target, there = tmp_path / "saved", []
    put(target, "first")
    monkeypatch.setattr(files, "fsync", lambda entry: there.append((entry, names(tmp_path))))
    for exchanges in (True, False):
        if not exchanges:
            monkeypatch.setattr(files, "exchange_names", lambda one, other: False)
        put(target, "second")
        (entry, held) = there[-1]
        assert entry == tmp_path and len(held) == 2 and "saved" in held


def test_a_name_that_cannot_be_given_leaves_the_old_one(tmp_path, monkeypatch):
    """Where the system exchanges no names."""
    target, rename = tmp_path / "saved", Path.rename
    put(target, "first")
    monkeypatch.setattr(files, "exchange_names", lambda one, other: False)

    def refuse(path, to):
        if ".partial-" in path.name:
            raise error
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    for error in (OSError(errno.EDQUOT, "Disk quota exceeded"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            put(target, "second")
        assert (target / "a").read_text() == "first" and os.listdir(tmp_path) == ["saved"]


def test_a_file_system_that_cannot_bring_directories_to_the_disk(tmp_path, monkeypatch):
    """As of shared folders of virtual machines. An error of the disk is one all the same."""
    fsync = os.fsync

    def refuse(handle, number=errno.EINVAL):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    put(tmp_path / "a", "text")
    for number in (errno.ENOTSUP, errno.ENOSYS):
        monkeypatch.setattr(os, "fsync", functools.partial(refuse, number=number))
        put(tmp_path / "a", "text")
    assert (tmp_path / "a" / "a").read_text() == "text"
    monkeypatch.setattr(os, "fsync", functools.partial(refuse, number=errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        put(tmp_path / "b", "text")


def killed_while_writing(path):
    with atomic_directory(path) as partial:
        (partial / "a").write_text("half")
        if engine.rank() == 0:
            os.kill(os.getpid(), 9)


def test_a_killed_save_leaves_nothing_that_looks_complete(two, tmp_path):
    path = tmp_path / "checkpoint"
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        two.run(killed_while_writing, path)
    assert not path.exists()
    save(path, 3, 1, {})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]  # what was left is cleaned
    shutil.rmtree(path)


def test_what_a_killed_save_was_replacing_gets_its_name_back(tmp_path):
    path, old = tmp_path / "run [1]", tmp_path / ".run [1].old-dead"
    put(path, "first")
    shutil.copytree(path, tmp_path / ".run [1].partial-dead")
    path.rename(old)
    with pytest.raises(ValueError, match=r"no manifest.json; a killed save .*\.run \[1\]\.old-dead: rename that$"):
        check_manifest(path)
    with pytest.raises(RuntimeError), atomic_directory(path):
        raise RuntimeError
    assert (path / "a").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == [path.name]
    shutil.copytree(path, old)  # whole, of a save that had replaced it
    put(path, "second")
    assert (path / "a").read_text() == "second" and [p.name for p in tmp_path.iterdir()] == [path.name]
    shutil.copytree(path, old)
    (old / "a").unlink()  # half of what was being removed
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError), atomic_directory(path):
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]


def test_what_a_killed_save_was_replacing_is_named_where_a_link_leads(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    save_model(tmp_path / "link", toys.build())
    (tmp_path / "disk" / "run").rename(tmp_path / "disk" / ".run.old-dead")
    with pytest.raises(ValueError, match=r"no manifest.json; a killed save .*/disk/\.run\.old-dead: rename that$"):
        check_manifest(tmp_path / "link")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path, there):
    """Also by a folder of its path, and to where nothing is yet: what it names is often a larger disk."""
    real, link = tmp_path / "disk" / "run", tmp_path / "link"
    if there:
        real.mkdir(parents=True)
    link.symlink_to(real)
    model, other = toys.build(), toys.build()
    for step in range(2):
        assert engine.save_checkpoint(link, model, state={"n": step}) == link
        assert engine.load_checkpoint(real, other) == {"n": step}
    save_model(link, model)
    assert engine.load_checkpoint(link, other) == {}
    assert link.is_symlink() and names(tmp_path) == ["disk", "link"] and names(real.parent) == ["run"]
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "of" / "runs")
    for step in (1, 2, 3):
        engine.save_checkpoint(tmp_path / "runs", model, step=step, keep=1, best=step == 1)
    assert names(tmp_path / "disk" / "of" / "runs") == ["best", "last", "step-00000001", "step-00000003"]


def saves_over(place, asynchronous=False):
    with pytest.raises(ValueError, match="would replace: name a new directory|is a file, expected a directory") as told:
        engine.save_checkpoint(place, Run(3, 1).model, asynchronous=asynchronous)
    return str(told.value)


def test_what_is_no_checkpoint_is_not_replaced(two, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    run = Run(3, 1)
    engine.save_checkpoint(tmp_path / "run", run.model, step=3)
    assert "file is a file, expected" in saves_over(tmp_path / "file")
    assert "file is a file, expected" in saves_over(tmp_path / "file", asynchronous=True)  # at once
    for message in two.run(saves_over, tmp_path / "notes"):
        assert "has other files, such as a.txt" in message
    message = saves_over(tmp_path / "run")
    assert "such as step-00000003" in message and "or pass step= to save one of several inside" in message
    with pytest.raises(ValueError, match="such as a.txt"):
        save_model(tmp_path / "notes", run.model)
    (tmp_path / "notes").rename(tmp_path / "step-3-notes")  # which is no name of a checkpoint
    with pytest.raises(ValueError, match="such as a.txt"):
        save_model(tmp_path / "step-3-notes", run.model)
    (tmp_path / "step-3-notes").rename(tmp_path / "notes")
    assert (tmp_path / "file").read_text() == (tmp_path / "notes" / "a.txt").read_text() == "mine"
    (tmp_path / "run" / "step-00000003" / "manifest.json").unlink()  # broken, but by its name a checkpoint
    engine.save_checkpoint(tmp_path / "run", run.model, step=3)
    engine.save_checkpoint(tmp_path / "empty", run.model)
    assert names(tmp_path) == ["empty", "file", "notes", "run"]
    assert engine.latest_checkpoint(tmp_path / "run").name == "step-00000003"


def test_what_nothing_can_replace_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    model, mounted = toys.build(), Path.is_mount
    for name in ("here", "volume"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume" or mounted(path))
    for save_to in (engine.save_checkpoint, save_model):
        for place in (".", "..", tmp_path / "volume"):
            with pytest.raises(ValueError, match=r"current directory, one above it, or a mount point, which no check"):
                save_to(place, model)
    assert names(tmp_path) == ["here", "volume"] and not any(names(path) for path in tmp_path.iterdir())
    engine.save_checkpoint(".", model, step=1)
    engine.save_checkpoint("../volume/run", model)
    assert names(tmp_path / "volume") == ["run"] and names(tmp_path / "here") == ["last", "step-00000001"]


def test_a_run_whose_current_directory_was_removed_is_saved(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        engine.save_checkpoint(tmp_path / "run", toys.build())
    assert names(tmp_path) == ["run"]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save_model(tmp_path / "file" / "checkpoint", toys.build())

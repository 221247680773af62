"""Directories that take the place of others: whole or absent after kills, interruptions and on odd file systems."""

import os
import shutil
from pathlib import Path

import pytest
from directory_toys import tree, write_config

from engine.checkpoint.files import exchange_names
from modelcenter.hub.files import atomic_directory
from modelcenter.hub.files.atomic_directory import new_directory


def test_a_file_that_cannot_be_moved(tmp_path, monkeypatch):
    """A folder that is read-only, for one: what is where is said, and nothing is lost."""
    write_config(tmp_path / "out", "old")
    (tmp_path / "out/notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        rename = Path.rename

        def refuse(path, target):
            if path.name == "notes.txt":
                raise PermissionError(13, "Permission denied", str(path))
            return rename(path, target)

        patch.setattr(Path, "rename", refuse)
        with pytest.raises(ValueError, match="out is complete, but .*notes.txt could not be moved to it: Permission d"):
            write_config(tmp_path / "out", "new")
    assert tree(tmp_path / "out") == {"config.json": b"new"}
    write_config(tmp_path / "out", "newer")
    assert tree(tmp_path) == {"out/config.json": b"newer", "out/notes.txt": b"mine"}


def test_its_name_is_on_the_disk_before_the_old_one_goes(tmp_path, monkeypatch):
    noted, synced = [], []
    monkeypatch.setattr(atomic_directory, "sync_to_disk", lambda path: synced.append(path.parent))
    monkeypatch.setattr(atomic_directory, "fsync", lambda path: noted.append((path, len(synced), tree(tmp_path))))
    write_config(tmp_path / "out", "old", "notes.txt")
    for exchanged in (True, False):
        if not exchanged:
            monkeypatch.setattr(atomic_directory, "exchange_names", lambda one, other: False)
        write_config(tmp_path / "out", "new")
    assert [(path, count) for path, count, _ in noted] == [(tmp_path, count) for count in (1, 2, 3)]
    assert "out/config.json" in noted[0][2]
    for _, _, held in noted[1:]:
        assert held["out/config.json"] == b"new" and "out/notes.txt" not in held
        assert any(name.startswith(".out.") and name.endswith("/config.json") for name in held)


def test_a_disk_that_does_not_keep_its_name(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(atomic_directory, "fsync", fail)
    with pytest.raises(ValueError, match="out is complete, but its disk may not keep it: Input/output error"):
        write_config(tmp_path / "out", "new")
    assert tree(tmp_path) == {"out/config.json": b"new"}


def test_a_killed_save_leaves_the_old_one(tmp_path):
    """The directory under construction is beside the target, never in it; the next save removes what a kill left."""
    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "out") as scratch:
        assert scratch.parent == tmp_path and scratch.name.startswith(".out.saving-")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["out"]
    (tmp_path / ".out.saving-0123").mkdir()
    with new_directory(tmp_path / "out") as scratch:
        (scratch / "x").write_text("new")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["x"]


def test_two_saves_at_once(tmp_path):
    """The second one does not take what the first one writes for the rest of a process that was killed."""
    with new_directory(tmp_path / "out") as scratch:
        (scratch / "config.json").write_text("first")
        with pytest.raises(ValueError, match="cannot save to .*/out: another process is saving there"):
            write_config(tmp_path / "out", "second")
    assert tree(tmp_path) == {"out/config.json": b"first"}


@pytest.fixture(params=[True, False], ids=["names are exchanged", "names are given one after the other"])
def exchanges(request, tmp_path_factory, monkeypatch):
    """Whether two directories exchange their names in one step."""
    if request.param:
        return exchange_names(tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other"))
    monkeypatch.setattr(atomic_directory, "exchange_names", lambda one, other: False)
    return False


def test_folders_where_only_owners_remove_files(tmp_path, monkeypatch):
    """Such as /tmp, with the lock that another user's killed save left there."""
    (tmp_path / ".out.saving").touch()

    def refuse(path, **options):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    write_config(tmp_path / "out", "new")
    assert (tmp_path / "out/config.json").read_text() == "new"


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    """It says so, and not that the lock, which it could not make there, is not there."""
    kept = os.open

    def refuse(path, flags, *mode, **options):
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return kept(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot save to .*/out: Permission denied \(.*/\.out\.saving\)"):
        write_config(tmp_path / "out", "new")


def test_a_file_system_without_permissions(tmp_path, monkeypatch):
    write_config(tmp_path / "out", "old")

    def refuse(path, mode, **options):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "chmod", refuse)
    write_config(tmp_path / "out", "new")
    assert tree(tmp_path) == {"out/config.json": b"new"}


def test_killed_while_it_takes_the_place_of_the_old_one(tmp_path, exchanges):
    """Wherever it stops, what has the name is whole, and the next save brings back what was somebody's own."""
    target, before = tmp_path / "out", {"config.json": b"old", "notes.txt": b"mine", "runs/log": b"mine too"}
    wanted = {"config.json": b"newer", "notes.txt": b"mine", "runs/log": b"mine too"}
    for turn in range(30):
        shutil.rmtree(target, ignore_errors=True)
        (target / "runs").mkdir(parents=True)
        for name, data in before.items():
            (target / name).write_bytes(data)
        finished = in_a_process_that_dies(lambda: write_config(target, "new"), turn)
        found = tree(target) if target.exists() else {}
        assert found.get("config.json") in (b"old", b"new") or not (found or exchanges)
        write_config(target, "newer")
        assert tree(target) == wanted and os.listdir(tmp_path) == ["out"], turn
        if finished:
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("behind", ["saving", "out"])
def test_interrupted_while_it_takes_the_place_of_the_old_one(behind, tmp_path, monkeypatch, exchanges):
    """Where the new one has not got its name yet, and the old one may have lost it."""
    write_config(tmp_path / "out", "old")
    rename = Path.rename

    def interrupted(path, target):
        if behind == "out" and path.name == "out":
            rename(path, target)
        if path.name == "out" if behind == "out" else ".saving-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        if exchanges and behind == "out":
            patch.setattr(atomic_directory, "exchange_names", lambda one, other: interrupt())
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_config(tmp_path / "out", "new")
    assert tree(tmp_path) == {"out/config.json": b"old"}


def test_interrupted_anywhere(tmp_path, monkeypatch, exchanges):
    """Before or behind each step: what has the name is whole, and the next save brings back what was somebody's own."""
    target, points = tmp_path / "out", 0
    for behind in (False, True):
        for turn in range(30):
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            (target / "config.json").write_text("old")
            (target / "notes.txt").write_text("mine")
            with monkeypatch.context() as patch:
                count_steps(patch.setattr, turn, interrupt, behind)
                try:
                    write_config(target, "new", "extra.txt")
                except KeyboardInterrupt:
                    points += 1
                else:
                    break
            new = (target / "config.json").read_bytes() == b"new"
            assert new == (target / "extra.txt").exists() and (new or (target / "notes.txt").exists()), (behind, turn)
            write_config(target, "newer", "extra.txt")
            wanted = {"config.json": b"newer", "extra.txt": b"newer", "notes.txt": b"mine"}
            assert tree(target) == wanted and os.listdir(tmp_path) == ["out"], (behind, turn)
        else:
            raise AssertionError("it never came to its end")
    assert points > 8


@pytest.mark.full
@pytest.mark.parametrize("exchanged", [False, True])
def test_killed_again_while_what_a_kill_left_is_put_right(exchanged, tmp_path, monkeypatch):
    """Of a new directory that is half removed nothing is taken for somebody's own."""
    target, more = tmp_path / "out", "12345"

    def die(one, other):
        os._exit(9 if not exchanged or exchange_names(one, other) else 0)

    for turn in range(30):
        shutil.rmtree(target, ignore_errors=True)
        write_config(target, "old")
        (target / "notes.txt").write_text("mine")
        with monkeypatch.context() as patch:
            patch.setattr(atomic_directory, "exchange_names", die)
            if in_a_process_that_dies(lambda: write_config(target, "new", *more), 99):
                pytest.skip("this system does not exchange names")
        assert exchanged == (target / "1").exists()
        finished = in_a_process_that_dies(lambda: write_config(target, "newer"), turn)
        write_config(target, "newest")
        wanted = {"config.json": b"newest", "notes.txt": b"mine"} | (dict.fromkeys(more, b"new") if exchanged else {})
        assert tree(target) == wanted and os.listdir(tmp_path) == ["out"], turn
        if finished:
            return
    raise AssertionError("it never came to its end")


def refuse_to_exchange(one, other):
    """As where a container filters system calls."""
    raise PermissionError(1, "Operation not permitted", str(other))


@pytest.mark.parametrize("exchange", [exchange_names, lambda one, other: False, refuse_to_exchange])
def test_a_file_system_that_numbers_what_is_renamed_anew(exchange, tmp_path, monkeypatch):
    """As some of FUSE: whether two have exchanged their names, their numbers do not tell."""
    write_config(tmp_path / "out", "old")
    (tmp_path / "out/notes.txt").write_text("mine")
    numbers = []

    def rename(path, target):
        if not path.is_dir():
            return os.rename(path, target)
        numbers.append(path.stat().st_ino)
        shutil.copytree(path, target)
        shutil.rmtree(path)
        assert target.stat().st_ino != numbers[-1]

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(atomic_directory, "exchange_names", exchange)
    write_config(tmp_path / "out", "new")
    assert numbers and tree(tmp_path / "out") == {"config.json": b"new", "notes.txt": b"mine"}
    assert os.listdir(tmp_path) == ["out"]


def in_a_process_that_dies(work, after):
    """Whether `work` came to its end before its process would have renamed or removed something once more."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0

    count_steps(setattr, after, lambda: os._exit(9))
    work()
    os._exit(0)


def count_steps(setattr, after, stop, behind=False):
    """From now on the step that comes after `after` others calls `stop`, before or `behind` it."""

    def counted(function):
        def call(*args, **kwargs):
            nonlocal after
            after -= 1
            last = after == -1
            if last and not behind:
                stop()
            result = function(*args, **kwargs)
            if last and behind:
                stop()
            return result

        return call

    steps = [(os, "rename"), (os, "unlink"), (os, "rmdir"), (Path, "rename"), (atomic_directory, "exchange_names")]
    for where, name in steps:
        setattr(where, name, counted(getattr(where, name)))


def interrupt():
    raise KeyboardInterrupt

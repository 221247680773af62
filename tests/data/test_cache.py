"""The cache of arrays: what is part of a key, and what becomes of entries that are damaged."""

import os
import pwd
import resource
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from modelcenter.data import cache as module
from modelcenter.data.cache import cached, digest
from modelcenter.data.token_files import TokenWriter


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def arrays():
    return {"ids": np.arange(10, dtype=np.int32), "spans": np.ones((3, 2), np.int64), "none": np.zeros(0, np.uint8)}


def test_built_once_and_mapped_afterwards():
    calls = []
    for _ in range(2):
        found = cached(["qa", 1, ["a", "b"]], lambda: calls.append(1) or arrays())
        assert {n: (a.dtype, a.tolist()) for n, a in found.items()} == {
            n: (a.dtype, a.tolist()) for n, a in arrays().items()
        }
    assert len(calls) == 1 and isinstance(found["ids"], np.memmap)
    cached(["qa", 2, ["a", "b"]], lambda: calls.append(1) or arrays())
    cached(["qa", 1, ["a", "b"]], lambda: calls.append(1) or arrays(), cache=False)
    assert len(calls) == 3


def test_keys_that_differ():
    keys = [
        [], [None], [0], ["0"], [""], [[]], [["ab", "c"]], [["a", "bc"]], [["ab"], ["c"]], [["ab", "c"], None],
        ["ab", "c"], ["abc"], [b"abc"], [np.arange(3)], [np.arange(3, dtype=np.int32)], [np.arange(3.0)],
        [np.arange(4).reshape(2, 2)], [np.arange(4)], [{"a": 1}], [{"a": 2}], [True],
    ]  # fmt: skip
    assert len({digest(key) for key in keys}) == len(keys)
    assert digest([["ab", "c"], 3]) == digest((("ab", "c"), 3))
    assert digest([np.arange(6)[::2]]) == digest([np.array([0, 2, 4])])


def test_keys_stay_what_they_are():
    """Entries of earlier versions are found again; whoever changes digest on purpose raises _VERSION, and this."""
    key = ["rows", 1, None, True, ["a", "bc"], np.arange(3), b"x"]
    assert digest(key) == "d8b27ee701c906eeb9e40679df22b4d2e1f89355"


@pytest.mark.parametrize("name", ["ids.npy", "about.json", "spans.npy"])
@pytest.mark.parametrize("harm", ["cut", "gone", "other", "empty"])
def test_a_damaged_entry_is_built_again(folder, name, harm, caplog):
    cached(["x"], arrays)
    (entry,) = (p for p in folder.iterdir() if p.is_dir())
    if harm == "gone":
        (entry / name).unlink()
    else:
        (entry / name).write_bytes({"cut": (entry / name).read_bytes()[:-9], "other": b"x", "empty": b""}[harm])
    assert cached(["x"], arrays)["spans"].tolist() == arrays()["spans"].tolist()
    assert "damaged" in caplog.text
    assert cached(["x"], lambda: {})["ids"].tolist() == list(range(10))


def test_an_error_while_building_leaves_no_entry(folder):
    with pytest.raises(RuntimeError):
        cached(["x"], lambda: (_ for _ in ()).throw(RuntimeError))
    assert cached(["x"], arrays)["ids"].tolist() == list(range(10))


@pytest.mark.parametrize("mask, rights", [(0o002, 0o775), (0o077, 0o700)])
def test_folders_have_the_rights_that_the_user_gives(folder, mask, rights, monkeypatch):
    """So that others may read them, or not. The umask is asked of no one: another thread may be making a file."""
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            cached(["x"], arrays)
            with TokenWriter(folder / "written", 10):
                pass
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir() if p.is_dir()] == [rights, rights]


def test_a_file_system_without_permissions_keeps_entries(monkeypatch):
    def refuse(path, mode):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    cached(["x"], arrays)
    assert cached(["x"], lambda: {})["ids"].tolist() == list(range(10))


def test_a_file_system_that_shares_no_memory(only_private_maps):
    cached(["x"], arrays)
    found = cached(["x"], lambda: {})["ids"]
    assert found.tolist() == list(range(10)) and isinstance(found, np.memmap) and not found.flags.writeable


def test_the_folder_is_one_of_ours_in_that_of_the_users_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("MODELCENTER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert module.cache_dir() == tmp_path / "xdg" / "modelcenter" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module.cache_dir() == tmp_path / ".cache" / "modelcenter" / "tokens"


def test_a_user_without_a_home_has_no_cache(monkeypatch, tmp_path, caplog):
    """As in containers that run under a number that no user has."""
    for name in ("MODELCENTER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    assert cached(["x"], arrays)["ids"].tolist() == list(range(10))
    assert "set MODELCENTER_CACHE to a folder" in caplog.text and not list(tmp_path.iterdir())


def test_an_entry_and_a_lock_that_may_not_be_read(folder, monkeypatch, caplog):
    """Of another user: they stay as they are, and the arrays are built."""
    cached(["x"], arrays)
    (entry,) = (p for p in folder.iterdir() if p.is_dir())

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(type(entry), "read_text", refused)
        patch.setattr(module, "_open_lock", refused)
        assert cached(["x"], arrays)["ids"].tolist() == list(range(10))
    assert "cannot be read (Permission denied): tokenising without it" in caplog.text
    assert "damaged" not in caplog.text and "not written" not in caplog.text
    assert cached(["x"], lambda: {})["ids"].tolist() == list(range(10))


def test_a_full_disk_is_named(folder, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        assert len(cached(["x"], lambda: {"ids": np.arange(1 << 16)})["ids"]) == 1 << 16
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "was not written: [Errno 27] File too large" in caplog.text
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_a_lock_of_another_user(folder, monkeypatch):
    real = type(folder).open

    def open_(path, mode="r", *args, **options):
        if path.suffix == ".lock" and mode == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, mode, *args, **options)

    cached(["x"], arrays)
    monkeypatch.setattr(type(folder), "open", open_)
    assert cached(["x"], lambda: {})["ids"].tolist() == list(range(10))


def test_who_waited_for_nothing_builds_beside_the_others(folder, monkeypatch):
    """Where no entry can be kept, processes do not build one after the other."""
    monkeypatch.setattr(module, "_save", lambda entry, arrays: None)
    together, turns = threading.Barrier(2, timeout=20), iter(range(3))

    def build():
        if next(turns):
            together.wait()  # the second and the third are at it at the same time
        else:
            time.sleep(0.5)  # meanwhile they wait for the lock
        return arrays()

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(cached, ["x"], build) for _ in range(3)]
        assert [len(one.result(timeout=30)) for one in found] == [3] * 3


def test_what_a_killed_process_left_is_removed(folder):
    cached(["x"], arrays)
    (entry,) = (p for p in folder.iterdir() if p.is_dir())
    mine, young, other = (folder / f".writing-{name}" for name in (f"{entry.name}-a", f"{entry.name}-b", "0" * 40))
    for left in (mine, young, other):
        left.mkdir()
        (left / "ids.npy").write_bytes(b"x")
    for left in (mine, other):
        os.utime(left, (0, 0))
    shutil.rmtree(entry)
    cached(["x"], arrays)
    assert not mine.exists() and young.exists() and other.exists()  # which other processes may be writing

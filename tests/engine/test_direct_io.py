"""Files written past the page cache: the bytes, from whatever pieces, and what happens where that is not possible."""

import errno
import hashlib
import os

import numpy as np
import pytest
import torch

from engine import direct_io
from engine.direct_io import DirectWriter

BLOCK, ROOM, LEAST = direct_io._BLOCK, direct_io._ROOM, direct_io._LEAST


def content(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A file that is written to directly."""
    monkeypatch.setenv("MODELCENTER_DIRECT_IO", "1")
    with DirectWriter(tmp_path / "probe") as probe:
        if not probe.is_direct:
            pytest.skip("the file system of the temporary directory has no direct writes")
    return tmp_path / "file"


@pytest.fixture
def writes(monkeypatch):
    """(past the page cache, start, size) of each write."""
    made, pwrite = [], os.pwrite

    def noted(handle, data, start):
        flags = int(open(f"/proc/self/fdinfo/{handle}").read().split("flags:")[1].split()[0], 8)
        made.append((bool(flags & os.O_DIRECT), start, len(data)))
        return pwrite(handle, data, start)

    monkeypatch.setattr(os, "pwrite", noted)
    return made


@pytest.mark.parametrize("last", [0, 5, LEAST - 100, LEAST, LEAST + 7, ROOM - 1, ROOM, 2 * ROOM + LEAST + 77])
def test_pieces_become_blocks_and_an_end(path, writes, last):
    pieces = [content(size, seed) for seed, size in enumerate((0, 1, 4095, ROOM - 4096, 17, last))]
    whole = np.concatenate(pieces)
    path.write_bytes(b"longer than what replaces it" * 1_000_000)
    with DirectWriter(path) as writer:
        for number, piece in enumerate(pieces):
            assert writer.write(memoryview(piece)) == len(piece)
            assert writer.tell() == sum(map(len, pieces[: number + 1]))
    assert np.array_equal(np.fromfile(path, np.uint8), whole)
    assert writer.sha256 == hashlib.sha256(whole).hexdigest() and writer.tell() == len(whole)
    assert all(start % BLOCK == size % BLOCK == 0 and size >= LEAST for direct, start, size in writes if direct)
    end = len(whole) % ROOM
    assert sum(size for direct, _, size in writes if not direct) >= end % BLOCK
    assert sum(size for direct, _, size in writes if direct) == len(whole) - (end % BLOCK if end >= LEAST else end)


def test_what_torch_saves_is_read_again(path, writes):
    tensors = {"a": torch.randn(3, 1_400_000), "b": torch.arange(5)}
    with DirectWriter(path) as writer:
        torch.save(tensors, writer)
    found = torch.load(path)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert any(direct for direct, _, _ in writes) and writer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def refuse_direct_writes(monkeypatch, number=errno.EINVAL):
    pwrite, refused = os.pwrite, []

    def refuses(handle, data, start):
        if len(data) >= LEAST:
            refused.append(start)
            raise OSError(number, os.strerror(number))
        return pwrite(handle, data, start)

    monkeypatch.setattr(os, "pwrite", refuses)
    return refused


def test_a_disk_with_larger_blocks_is_written_through_the_cache(path, monkeypatch):
    refused, data = refuse_direct_writes(monkeypatch), content(2 * ROOM + 9)
    with DirectWriter(path) as writer:
        writer.write(data)
        assert not writer.is_direct and refused == [0]
    assert np.array_equal(np.fromfile(path, np.uint8), data)


def test_a_full_disk_is_told_once_and_nothing_is_written_after_it(path, monkeypatch):
    refused = refuse_direct_writes(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"), DirectWriter(path) as writer:
        writer.write(content(ROOM + 5))
    assert refused == [0] and writer.closed and writer.sha256 == ""
    with pytest.raises(OSError, match="No space left"):
        with DirectWriter(path) as writer:
            writer.write(content(ROOM - 5))  # which closing writes
    assert refused == [0, 0] and writer.closed and writer.sha256 == ""
    writer.close()


def test_it_is_on_the_disk_when_it_is_closed(path, writes, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: [synced.append(sum(size for *_, size in writes)), fsync(handle)])
    with DirectWriter(path) as writer:
        writer.write(content(ROOM + 5))
    assert synced == [ROOM + 5]


def test_no_descriptor_stays_open(path, tmp_path, monkeypatch):
    before = os.listdir("/proc/self/fd")
    with DirectWriter(path) as writer:
        writer.write(content(LEAST))
    with pytest.raises(ZeroDivisionError), DirectWriter(path):
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError):
        DirectWriter(tmp_path / "nowhere" / "file")
    refuse_direct_writes(monkeypatch)
    with DirectWriter(path) as writer:
        writer.write(content(LEAST))
    assert os.listdir("/proc/self/fd") == before


def test_only_local_file_systems_are_written_to_directly(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    device = (tmp_path / "file").stat().st_dev
    monkeypatch.delenv("MODELCENTER_DIRECT_IO", raising=False)
    kinds = {"ext4": True, "xfs": True, "overlay": True, "nfs4": False, "tmpfs": False, "fuse.sshfs": False}
    for kind, expected in kinds.items():
        lines = (
            f"1 0 0:1 / / rw - proc p rw\n9 1 {os.major(device)}:{os.minor(device)} / /m rw shared:1 - {kind} x rw\n"
        )
        monkeypatch.setattr("pathlib.Path.read_text", lambda self, lines=lines, **_: lines)
        direct_io._is_local.cache_clear()
        assert direct_io._is_local(device) is expected, kind
        if not expected:
            assert direct_io._open_direct(tmp_path / "file") is None
    monkeypatch.setattr("pathlib.Path.read_text", lambda self, **_: "")
    direct_io._is_local.cache_clear()
    assert not direct_io._is_local(device)
    direct_io._is_local.cache_clear()


@pytest.mark.parametrize("choice, local, asked", [("0", True, False), ("1", False, True), (None, True, True)])
def test_the_choice_can_be_overridden(tmp_path, monkeypatch, choice, local, asked):
    opened, flags = os.open, []
    monkeypatch.setattr(direct_io, "_is_local", lambda device: local)
    monkeypatch.setattr(os, "open", lambda path, flag, *mode: [flags.append(flag), opened(path, flag, *mode)][1])
    monkeypatch.delenv("MODELCENTER_DIRECT_IO", raising=False)
    if choice is not None:
        monkeypatch.setenv("MODELCENTER_DIRECT_IO", choice)
    DirectWriter(tmp_path / "file").close()
    assert any(flag & os.O_DIRECT for flag in flags) is asked


def test_a_file_system_without_direct_writes_is_written_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_DIRECT_IO", "1")
    opened, data = os.open, content(LEAST * 3)

    def refuses(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuses)
    with DirectWriter(tmp_path / "file") as writer:
        assert not writer.is_direct
        writer.write(data)
    assert np.array_equal(np.fromfile(tmp_path / "file", np.uint8), data)

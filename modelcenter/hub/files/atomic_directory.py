"""Writing checkpoints: the only safetensors writer, and directories that are whole or absent."""

import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from engine.checkpoint.files import sync_to_disk
from modelcenter.hub.files.locks import free, is_at
from modelcenter.hub.files.names import ADAPTER_CONFIG_FILE, MANIFEST_FILE, is_replaced
from modelcenter.hub.files.reader import DTYPE_NAMES

_AT_ONCE = 2**18  # bytes; for larger writes the kernel looks for memory in large pieces, which may cost ten times more

Entry = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape of a tensor to write


def file_head(entries: Sequence[Entry]) -> tuple[bytes, list[int]]:
    """What a safetensors file of these tensors starts with, and the byte at which each, then the file, ends or starts.

    Returns:
        (length and header, padded to a multiple of 8 bytes; first byte of each tensor, then the size of the file).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = [0]
    for name, dtype, shape in entries:
        end = places[-1] + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [places[-1], end]}
        places.append(end)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + place for place in places]


def write_at(handle: int, data: memoryview, start: int) -> None:
    """Write bytes to their place in a file.

    No more at once than the kernel takes in without looking for memory in one large piece, which costs it many times
    what the copy does.
    """
    while len(data):
        count = os.pwrite(handle, data[:_AT_ONCE], start)
        data, start = data[count:], start + count


def make_file(path: Path, size: int, head: bytes = b"") -> None:
    """Make a file at its full size, with what it starts with. Raises OSError where the disk is too full for it.

    A file that has its size begins right: an interruption falls behind the allocation, which may take minutes.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(handle, memoryview(head), 0)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        elif size:  # macOS
            os.ftruncate(handle, size)
    finally:
        os.close(handle)


class SafetensorsWriter:
    """Writes a file of known entries, one tensor at a time, in the order given. A context manager.

    The header comes first, from the shapes alone, padded so that data starts at a multiple of 8 bytes.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]):
        self._start, _ = file_head(entries)
        self._path, self._left = path, list(reversed(entries))

    def __enter__(self) -> "SafetensorsWriter":
        self._file = open(self._path, "wb", buffering=0)
        self._write(memoryview(self._start))
        return self

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next tensor; it has the dtype and shape announced."""
        name, dtype, shape = self._left.pop()
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape, (name, tensor.dtype, tuple(tensor.shape))
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._write(flat.view(torch.uint8).numpy().data)

    def _write(self, data: memoryview) -> None:
        while len(data):
            data = data[self._file.write(data[:_AT_ONCE]) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert not self._left, f"{len(self._left)} tensors were announced and not written"
            os.fsync(self._file.fileno())
        self._file.close()


@dataclass(frozen=True)
class FilePlan:
    """A file to write and the tensors in it."""

    name: str
    entries: tuple[Entry, ...]


def plan_files(entries: Sequence[Entry], max_bytes: int, stem: str = "model") -> list[FilePlan]:
    """Deal tensors, in their order, to files of at most `max_bytes` each; a larger tensor has a file of its own.

    Within a file wider dtypes come first, which keeps every tensor aligned to its element size.
    """
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = prod(entry[2]) * entry[1].itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    for group in groups:
        group.sort(key=lambda entry: -entry[1].itemsize)
    if len(groups) == 1:
        return [FilePlan(f"{stem}.safetensors", tuple(groups[0]))]
    count = len(groups)
    return [FilePlan(f"{stem}-{i:05d}-of-{count:05d}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]


def write_index(directory: Path, plans: Sequence[FilePlan], stem: str = "model") -> None:
    """Write the index of a checkpoint of several files."""
    entries = [entry for plan in plans for entry in plan.entries]
    total = {
        "total_parameters": sum(prod(shape) for _, _, shape in entries),
        "total_size": sum(prod(shape) * dtype.itemsize for _, dtype, shape in entries),
    }
    names = {entry[0]: plan.name for plan in plans for entry in plan.entries}
    write_json(
        directory / f"{stem}.safetensors.index.json", {"metadata": total, "weight_map": dict(sorted(names.items()))}
    )


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON. What of a path is not UTF-8 becomes escapes, which read back as it was."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "200MB", "1.5GiB" or a number.

    Raises:
        ValueError: not a positive size.
    """
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]I?B)?", str(size).strip().upper())
    try:
        value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except (ValueError, KeyError):
        value = 0
    if value <= 0:
        raise ValueError(f"max_shard_size: got {size!r}, expected bytes such as 500000000, '500MB' or '5GB'")
    return value


# -- directories that are whole or absent ----------------------------------------------------------------------------

_PARTS = ("model", "optim", "state")  # directories of a distributed checkpoint


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` to fill; it takes the place of `target` when the block ends, or vanishes if it fails.

    An existing `target` loses the config and weights of an earlier checkpoint, if the new directory is one. Its other
    files stay unless the new directory has them: a tokenizer saved there before, a card, logs.

    Raises:
        ValueError: the place cannot be written, another process is saving there, or `target` is not a directory that
            may be replaced.
    """
    target = checked_target(target)
    scratch = target.parent / f".{target.name}.saving-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = target.parent / f".{target.name}.saving"
            stack.enter_context(locked(lock, f"cannot save to {target}: another process is saving there"))
            for left in target.parent.glob(f".{glob.escape(target.name)}.saving-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            finish_replacing(target)
            scratch.mkdir()
        except OSError as error:
            raise ValueError(f"cannot save to {target}: {error.strerror or error} ({error.filename})") from error
        try:
            yield scratch
            put_in_place(scratch, target)
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"saving to {target} failed: {why}; nothing was changed there") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def locked(path: Path, message: str) -> Iterator[None]:
    """Keep other processes out while inside, by a lock on a file that is there meanwhile.

    The system lets go of it when the process and all that it forked meanwhile have ended, however they end.

    Raises:
        ValueError: another process has it; says `message`.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's, who may be at it or was killed
        handle = os.open(path, os.O_RDONLY)
    if not (free(lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)) and is_at(path, handle)):
        os.close(handle)
        raise ValueError(message)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def checked_target(target: Path) -> Path:
    """The absolute path of a directory to make or replace.

    Raises:
        ValueError: it is something that must not be replaced.
    """
    target = target.expanduser()
    target = target.resolve() if target.exists() else target.absolute()
    if target.exists() and not target.is_dir():
        raise ValueError(f"cannot save to {target}: it is a file, expected a directory or a new name")
    if target.exists() and not os.access(target, os.W_OK | os.X_OK):
        raise ValueError(f"cannot save to {target}: it is read-only; change its mode or name another directory")
    if target in (Path.cwd(), *Path.cwd().parents) or target.is_mount():
        raise ValueError(
            f"cannot save to {target}: it is the current directory, one above it, or a mount point; name one inside"
        )
    return target


def refuse_adapter_at(target: Path) -> None:
    """Raise ValueError for a place where an adapter lies, which transformers would add to a model saved there."""
    if (target / ADAPTER_CONFIG_FILE).is_file():
        raise ValueError(
            f"cannot save a model to {target}: an adapter lies there ({ADAPTER_CONFIG_FILE}), and transformers would "
            "add it to the model, into which it may be merged already; name another directory or move the adapter away"
        )


def put_in_place(scratch: Path, target: Path) -> None:
    """Give a finished directory the name `target`, once all of it is on the disk; see new_directory.

    Raises:
        OSError: nothing was changed. ValueError: it has its name, but a file of the old one could not be moved to it.
    """
    sync_to_disk(scratch)
    if not target.exists():
        scratch.rename(target)
        return
    old = target.parent / f".{target.name}.replaced-{secrets.token_hex(4)}"
    shutil.copymode(target, scratch)
    try:
        target.rename(old)
        scratch.rename(target)
    except BaseException:  # an interruption too must not leave nothing of that name
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    try:
        _carry_over(old, target)
    except OSError as error:
        raise ValueError(
            f"{target} is complete, but {error.filename} could not be moved to it: {error.strerror}. What is missing "
            f"there is in {old}; the next save tries again"
        ) from error


def finish_replacing(target: Path) -> None:
    """Finish what put_in_place began in a process that was killed.

    Where it had not named the new directory yet, the old one gets its name back; else its files that stay move over.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    for old in target.parent.glob(f".{glob.escape(target.name)}.replaced-*"):
        if target.exists():
            _carry_over(old, target)
        else:
            old.rename(target)


def _carry_over(old: Path, target: Path) -> None:
    """Move to `target` the files of the directory that it replaced, but those of its checkpoint; remove the rest."""
    new = {path.name for path in target.iterdir()}
    # The folders go with the manifest, and both stay beside an adapter.
    parts = _PARTS if (old / MANIFEST_FILE).is_file() and is_replaced(MANIFEST_FILE, new) else ()
    for path in old.iterdir():
        if path.name not in new and path.name not in parts and not is_replaced(path.name, new):
            path.rename(target / path.name)
    # Under a name that says so: of a directory half removed nothing would tell what was of its checkpoint.
    discarded = old.with_name(f".{target.name}.discarded-{secrets.token_hex(4)}")
    old.rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)

"""Directories that are complete or absent, and their manifests."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from engine import runtime
from engine.collectives import from_rank_0, gather_objects, together

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d+)")  # the name of a checkpoint in a directory of many
_noted: dict[Path, dict[str, Any]] = {}  # manifest entries of files in directories under construction, on this rank


@contextmanager
def atomic_directory(directory: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield a directory to write into, the same on all ranks; at the end it gets a manifest and becomes ``directory``.

    A symbolic link is kept, and its target is created or replaced. Collective over ``group``, which holds all ranks
    (None: the default one). If the body raises on any rank, everything written is removed and every rank raises; a rank
    must fail either before the others wait for it, or inside ``together``.

    Raises:
        ValueError: ``directory`` exists and is not a checkpoint, or cannot be replaced.
    """
    target = Path(directory).absolute()
    place = ""
    with together(f"creating {target}", group):
        if runtime.rank() == 0:
            target = checked_place(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            _clean_up_after_killed_saves(target)
            place = str(target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
            Path(place).mkdir()
    path = Path(from_rank_0(place, group))
    try:
        with together(f"writing {target}", group):
            yield path
        files = _hash_files(path, target, group)
        with together(f"writing {target}", group):
            if runtime.rank() == 0:
                text = json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1)
                (path / MANIFEST).write_text(text, encoding="utf-8")
                sync_to_disk(path)
                _replace(path, target)
    finally:
        for file in [file for file in _noted if file.is_relative_to(path)]:
            del _noted[file]
        if runtime.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


def note_hash(path: Path, size: int, sha256: str) -> None:
    """Tell the `atomic_directory` around a file that this rank has written what its manifest will say of it, so that
    the file is not read again. The file must not change any more."""
    _noted[path] = {"size": size, "sha256": sha256}


def _hash_files(path: Path, target: Path, group: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
    """{relative path: {size, sha256}} of all files under ``path``; the ranks share what is left. Collective."""
    own = {str(file.relative_to(path)): entry for file, entry in _noted.items() if file.is_relative_to(path)}
    noted = {name: entry for part in gather_objects(own, group) for name, entry in part.items()}
    names: list[str] = []
    with together(f"writing {target}", group):
        if runtime.rank() == 0:
            names = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    names = from_rank_0(names, group)
    left = [name for name in names if name not in noted]
    found: dict[str, dict[str, Any]] = {}
    with together(f"writing {target}", group):
        try:
            sizes = {name: _size(path / name) for name in sorted({*names, *noted})}
            for name in left[runtime.rank() :: runtime.world_size()]:
                found[name] = {"size": sizes[name], "sha256": _sha256(path / name)}
        except OSError as error:
            raise RuntimeError(
                f"rank {runtime.rank()} cannot read what another rank wrote ({error}): a checkpoint must be on a file "
                "system that all ranks share"
            ) from error
        for name, entry in noted.items():
            if sizes[name] != entry["size"]:
                raise RuntimeError(f"{target}: {name} has {sizes[name]} bytes, expected {entry['size']}")
    if runtime.world_size() > 1:
        parts = gather_objects(found, group)
        found = {name: entry for part in parts for name, entry in part.items()}
    return dict(sorted({**found, **noted}.items()))


def _size(path: Path) -> int:
    return path.stat().st_size


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` names, if it is a small file with the name of a sibling, else ``path`` itself.

    On file systems without symbolic links, "best" and "last" are such files.
    """
    if path.is_file() and path.stat().st_size < 100:
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if STEP.fullmatch(name):
            return path.with_name(name)
    return path


def sync_to_disk(path: Path) -> None:
    """fsync all files and directories under ``path``."""
    for entry in [*path.rglob("*"), path]:
        fsync(entry)


def fsync(path: Path) -> None:
    """fsync a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Many network, FUSE and virtual machine file systems do not support this for directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _clean_up_after_killed_saves(target: Path) -> None:
    """Remove leftovers of killed saves to ``target``; if it is gone, restore the checkpoint that one was replacing."""
    name = glob.escape(target.name)
    for left in target.parent.glob(f".{name}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    for old in target.parent.glob(f".{name}.old-*"):
        if target.exists() or not is_complete(old):
            remove_directory(old)
        else:
            old.rename(target)


def remove_directory(path: Path) -> None:
    """Remove a directory as far as possible. Of a symbolic link, which rmtree refuses, only the link is removed."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def is_complete(path: Path) -> bool:
    """Whether a directory is a checkpoint with all its files in their sizes. Not collective."""
    try:
        check_manifest(path)
    except ValueError:
        return False
    return True


def checked_place(directory: Path) -> Path:
    """The path that a checkpoint at ``directory`` creates or replaces: links are followed, dangling ones too.

    Raises ValueError if it exists and is not a checkpoint, or cannot be replaced. Not collective.
    """
    target = Path(os.path.realpath(directory))
    if not target.exists():
        return target
    if not target.is_dir():
        raise ValueError(f"{target} is a file, expected a directory or a new name for a checkpoint")
    if is_irreplaceable(target):
        raise ValueError(
            f"{target} is the current directory, one above it, or a mount point, which no checkpoint can replace: name "
            "a directory inside"
        )
    inside = sorted(entry.name for entry in target.iterdir())
    if not inside or MANIFEST in inside or STEP.fullmatch(target.name):
        return target
    many = [name for name in inside if STEP.fullmatch(name)]
    advice = ", or pass step= to save one of several inside" if many else ""
    raise ValueError(
        f"{target} is not a checkpoint and has other files, such as {(many or inside)[0]}, which a checkpoint saved "
        f"there would replace: name a new directory{advice}"
    )


def is_irreplaceable(directory: Path) -> bool:
    """Whether a directory, given by its real path, cannot be replaced: a mount point, the current directory or one
    above it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current directory was removed
        return directory.is_mount()
    return directory in (here, *here.parents) or directory.is_mount()


def _replace(path: Path, target: Path) -> None:
    """Rename ``path`` to ``target``, in exchange for an existing ``target``, or after renaming that.

    The exchange is atomic where the system supports it, so that readers, and runs after a kill, always find a complete
    checkpoint. The old one is removed once the new name is on disk, so a power cut leaves one of the two.
    """
    old = target.parent / f".{target.name}.old-{uuid.uuid4().hex[:8]}"
    if not target.exists():
        path.rename(target)
    elif not exchange_names(path, target):
        rename_both(path, target, old)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def rename_both(path: Path, target: Path, old: Path) -> None:
    """Rename ``target`` to ``old`` and then ``path`` to ``target``; for a moment, ``target`` does not exist."""
    try:
        target.rename(old)
        path.rename(target)
    except BaseException:  # an interruption, too, must not leave ``target`` missing
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange the names of two directories atomically. False if this is not supported or not allowed; renaming each
    then works, or raises a clear error."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # Linux has it
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    failed = library.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange)
    # Sandboxes answer EPERM to system calls that they do not know.
    if failed and (number := ctypes.get_errno()) not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        raise OSError(number, os.strerror(number), str(other))
    return not failed


def check_manifest(directory: str | os.PathLike[str], hashes: bool = False) -> dict[str, Any]:
    """Read a checkpoint's manifest, and compare the sizes of the files with it, and with ``hashes`` also their sha256.

    A file has one hash, or "parts": hashes of ranges of its bytes, so that its writer hashes each byte only once.

    Raises ValueError, which names the file and the difference. Not collective.
    """
    path = Path(directory)
    manifest, sizes = _read_manifest(path)
    for name, expected in sizes.items():
        entry = manifest["files"][name]
        file = path / name
        if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(path)):  # resolve() fails in loops
            raise ValueError(f"{path / MANIFEST} names {name}, which is outside the checkpoint")
        if not file.is_file():
            raise ValueError(f"checkpoint {path} is incomplete: {name} is missing")
        if (size := file.stat().st_size) != expected:
            raise ValueError(f"checkpoint {path} is damaged: {name} has {size} bytes, but its manifest says {expected}")
        if hashes and "parts" in entry:
            _check_parts(path, name, entry)
        elif hashes and (found := _sha256(file)) != entry.get("sha256"):
            raise ValueError(
                f"checkpoint {path} is damaged: {name} has sha256 {found}, but its manifest says {entry.get('sha256')}"
            )
    return manifest


def _read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """(manifest of a checkpoint, {file: size}). Raises ValueError if the manifest is missing or damaged."""
    if not (path / MANIFEST).is_file():
        place = Path(os.path.realpath(path))
        replaced = [] if place.exists() else [*place.parent.glob(f".{glob.escape(place.name)}.old-*/{MANIFEST}")]
        hint = (
            f"; a killed save was replacing it, and left the old one as {replaced[0].parent}: rename that"
            if replaced
            else ""
        )
        raise ValueError(f"{path} is not a complete checkpoint: it has no {MANIFEST}{hint}")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if (version := manifest["format_version"]) == FORMAT_VERSION:
            return manifest, {name: int(entry["size"]) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error!r}") from error
    raise ValueError(f"{path / MANIFEST} has format_version {version!r}, but this version reads {FORMAT_VERSION}")


def hash_ranges(file: BinaryIO, ranges: Sequence[Sequence[int]]) -> str:
    """The sha256 of the concatenated byte ranges [first, end) of an open file."""
    digest = hashlib.sha256()
    for first, end in ranges:
        file.seek(first)
        while first < end and (data := file.read(min(end - first, 2**20))):
            digest.update(data)
            first += len(data)
    return digest.hexdigest()


def _check_parts(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compare a file with the hashes of its parts, which must cover each byte once."""
    parts, at = entry["parts"], 0
    try:
        for first, end in sorted((first, end) for part in parts for first, end in part["bytes"]):
            at = end if first == at <= end else -1
        if at != entry["size"]:
            raise ValueError("they do not contain each byte once")
        hashes = [part["sha256"] for part in parts]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged: the parts of {name}: {error!r}") from error
    with open(path / name, "rb", buffering=0) as file:
        for part, expected in zip(parts, hashes, strict=True):
            if (found := hash_ranges(file, part["bytes"])) != expected:
                where = ", ".join(f"{first} to {end}" for first, end in part["bytes"][:3])
                raise ValueError(
                    f"checkpoint {path} is damaged: bytes {where} of {name} have sha256 {found}, but its manifest says "
                    f"{expected}"
                )

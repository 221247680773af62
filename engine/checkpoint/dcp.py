"""Write and read tensors as a directory of torch.distributed.checkpoint (DCP).

Importing DCP takes longer than staging a model, so this module is only imported when tensors are read or written.
"""

from __future__ import annotations

import copyreg
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem

from engine.checkpoint.dcp_metadata import MetadataUnpickler
from engine.checkpoint.files import note_hash
from engine.direct_io import DirectWriter

# Early versions of Python 3.11 pickle an Enum member as a call of getattr, which pickle scanners report.
copyreg.pickle(_MEM_FORMAT_ENCODING, lambda item: (type(item), (item.value,)))


def write(path: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """See ``write_tensors``."""
    with _plain_errors(path):
        dcp.save(
            tensors,
            storage_writer=_Writer(path, sync_files=False),  # _Files syncs them
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def read(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """See ``read_tensors``."""
    with _plain_errors(path):
        dcp.load(tensors, storage_reader=_Reader(path), planner=_Planner(), no_dist=not dist.is_initialized())


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Raise the error of the first rank that failed, on all ranks, instead of torch's error about all of them, which is
    not an Exception and so would not be caught. Without a process group, also suppress torch's warning about that."""
    if not dist.is_initialized():
        # Permanently: in the writing thread, catch_warnings would undo what the main thread sets meanwhile.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, OSError) and cause.errno is not None:  # a full disk names no file
            raise OSError(cause.errno, cause.strerror, str(cause.filename or path)) from cause
        kind = next((kind for kind in (ValueError, OSError) if isinstance(cause, kind)), RuntimeError)
        raise kind(f"{path}: rank {rank}: {cause}") from cause


class _Files(FileSystem):
    """Writes files past the page cache, and hashes tensors while they are written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DirectWriter(Path(path)) as writer:
            yield writer
        if str(path).endswith(DEFAULT_SUFFIX):  # the metadata are renamed
            note_hash(Path(path), writer.tell(), writer.sha256)


class _Writer(dcp.FileSystemWriter):
    """Leaves the directory out of the metadata: checkpoints move, and other versions of Python cannot unpickle a path
    from Python 3.13, where its module has another name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fs = _Files()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            # On a full disk torch also fails to close the file, and only reports that: "unexpected pos 704 vs 598".
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def storage_meta(self) -> StorageMeta | None:
        told = super().storage_meta()
        return told and replace(told, checkpoint_id=None)


class _Properties(TensorProperties):
    """Ignores fields that later versions of torch add, such as 2.15's strides, which earlier ones do not know."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[: len(fields(TensorProperties))])


class _Unpickler(MetadataUnpickler):
    def resolve(self, module: str, name: str) -> Any:
        found = super().resolve(module, name)
        return _Properties if found is TensorProperties else found


class _Unreadable:
    """Raises the error of reading metadata once it is used: torch 2.11 drops what ``read_metadata`` raises."""

    def __init__(self, error: Exception):
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


class _Planner(dcp.DefaultLoadPlanner):
    """Reads only tensors: torch unpickles other values, which could run anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor in the checkpoint, expected one")


class _Reader(dcp.FileSystemReader):
    """Reads the metadata without running code: torch unpickles it, and a pickle from the Hub could run anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except Exception as error:
            return cast(Metadata, _Unreadable(error))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

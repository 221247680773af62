"""Converting a checkpoint between Hugging Face's format and the distributed one, tensor by tensor.

No model is allocated and no large tensor is held in memory as a whole. Everything is written to a directory next to
the target, whose name is derived from the source and the options. After an interruption, the same conversion finds that
directory, reads it, compares the hashes, and continues. The target appears when everything is complete.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.memory import readable
from modelcenter._version import __version__
from modelcenter.convert.pieces import HUB, NATIVE
from modelcenter.hub.conversion.checkpoint import SIDES, Checkpoint, Request, open_checkpoint
from modelcenter.hub.conversion.fill import Filler, WorkUnit, hash_tensor, work_units
from modelcenter.hub.conversion.metadata import write_conversion_record, write_manifest, write_model_files
from modelcenter.hub.conversion.plan import Job, plan_distributed, plan_hub
from modelcenter.hub.conversion.progress import Progress, Report
from modelcenter.hub.conversion.workers import can_fork, flushing, imap_unordered, make_lock
from modelcenter.hub.dtypes import common_dtype, parse_dtype
from modelcenter.hub.files.atomic_directory import checked_target, finish_replacing, put_in_place
from modelcenter.hub.files.dcp import DCPSource
from modelcenter.hub.files.locks import locked
from modelcenter.hub.files.names import CARD_FILE, CONFIG_FILE
from modelcenter.hub.files.occupied import refuse_occupied
from modelcenter.hub.files.safetensors import FilePlan, parse_size, write_index
from modelcenter.hub.files.weight_files import add_folder, open_weight_files
from modelcenter.hub.files.weight_index import find_weights
from modelcenter.hub.run_folder import find_step

FORMATS = {name: side for side, name in SIDES.items()}


@dataclass
class Conversion:
    """The result of a conversion; `asdict` is what --json prints.

    Attributes:
        tensors, parameters, bytes: written. continued: tensors kept from an interrupted run.
        further_heads: heads other than the named class's. dropped: tensors without content. ignored: by --ignore.
        tied: tensors that repeat another and are not written. seconds: wall time. peak_bytes: maximum of any process.
        verified: written tensors that were read back.
    """

    source: str
    target: str
    format: str
    model_type: str
    task: str
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    continued: int = 0
    further_heads: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    verified: int = 0
    workers: int = 1
    seconds: float = 0.0
    peak_bytes: int = 0

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e6
        text = (
            f"{self.source} -> {self.target} ({self.format}): {self.tensors} tensors, {self.parameters:,} parameters, "
            f"{readable(self.bytes)} in {self.seconds:.1f} s ({rate:.0f} MB/s)"
        )
        text += f"; {self.continued} were kept from an interrupted conversion" if self.continued else ""
        for what, names in (("further heads", self.further_heads), ("dropped", self.dropped),
                            ("ignored", self.ignored), ("tied", self.tied)):  # fmt: skip
            if names:
                text += f"\n  {len(names)} {what}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        return text + (f"\n  {self.verified} tensors read again, all as written" if self.verified else "")


def convert(
    source: Any,
    target: Any,
    to: str,
    *,
    request: Request | None = None,
    dtype: str | torch.dtype | None = None,
    workers: int | None = None,
    verify: bool = False,
    max_shard_size: int | str = "5GB",
    progress: bool = False,
) -> Conversion:
    """Convert a checkpoint with all its heads.

    Args:
        source: a name, a Hugging Face directory, a distributed or training checkpoint, or a run's folder.
        target: a directory to make or replace. to: "hf" or "distributed".
        request: see Request. dtype: of the tensors; None: unchanged.
        workers: number of processes; None: one for each processor, at most 8.
        verify: read the files back after writing, and compare every tensor with the source.
        max_shard_size: maximum size of a file in format "hf".
        progress: print bytes, throughput and the time left to stderr.

    Raises:
        ValueError: the source or an argument is wrong, or the target cannot be written; nothing is left behind.
        KeyboardInterrupt, ChildProcessError (a worker was killed), RuntimeError: written tensors are kept next to the
            target, and the same call continues.
    """
    if to not in FORMATS:
        raise ValueError(f"--to: got {to!r}, expected {' or '.join(FORMATS)}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers: got {workers}, expected at least 1")
    target_dtype, shard_bytes = parse_dtype(dtype), parse_size(max_shard_size)
    place = checked_target(Path(target))
    refuse_occupied(place)
    with open_checkpoint(source, request) as checkpoint:
        directory = checkpoint.files.directory
        if directory is not None and directory.resolve() == place:
            raise ValueError(f"{place} is the source itself; name another target")
        checkpoint.check_heads()
        count = workers or min(os.cpu_count() or 1, 8)
        return _Run(checkpoint, place, FORMATS[to], target_dtype, shard_bytes, count, verify, progress).run()


def export(source: Any, target: Any, *, step: str | None = None, **options: Any) -> Conversion:
    """Convert a checkpoint, or a run's final model or one of its steps, to a Hugging Face directory; see `convert`."""
    return convert(find_step(source, step), target, "hf", **options)


class _Run:
    """One conversion: its plan, its number of processes, and its result."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Path,
        side: int,
        dtype: torch.dtype | None,
        shard_bytes: int,
        workers: int,
        verify: bool,
        show_progress: bool,
    ):
        self.checkpoint, self.target, self.side, self.dtype = checkpoint, target, side, dtype
        self.workers = workers if can_fork() else 1
        self.verify, self.show_progress = verify, show_progress
        self.files: Sequence[FilePlan] = ()
        if side == HUB:
            self.plan, self.files = plan_hub(checkpoint, dtype, shard_bytes)
        else:
            self.plan = plan_distributed(checkpoint, dtype)
        # The dtype in which it loads: that of the source.
        self.loaded_dtype = common_dtype({job.dtype for job in self.plan.jobs}, checkpoint.files.config)
        content = checkpoint.whole
        self.result = Conversion(
            checkpoint.origin,
            str(target),
            SIDES[side],
            checkpoint.arch.model_type,
            content.task,
            workers=self.workers,
            further_heads=content.further_heads,
            dropped=content.dropped,
            ignored=checkpoint.ignored,
            tied=[name for name, _ in content.repeats],
        )
        self.peaks: list[int] = []

    def run(self) -> Conversion:
        began = time.perf_counter()
        scratch = self.target.parent / f".{self.target.name}.converting-{self._fingerprint()}"
        try:
            with _claimed(self.target, scratch):
                keep = False
                try:
                    self._fill(scratch)
                except (KeyboardInterrupt, RuntimeError, ChildProcessError):
                    keep = True
                    raise
                finally:
                    if not keep:
                        shutil.rmtree(scratch, ignore_errors=True)
        except ChildProcessError:
            raise
        except OSError as error:
            place = error.filename2 or error.filename  # for a copy that does not fit, the source comes first
            why = f"{error.strerror or error}" + (f" ({place})" if place else "")
            raise ValueError(f"converting to {self.target} failed: {why}; nothing was changed there") from error
        self.result.seconds = round(time.perf_counter() - began, 3)
        self.result.peak_bytes = max(self.peaks, default=0)
        return self.result

    def _fingerprint(self) -> str:
        """Identifies the source and the options, so that only the same conversion continues from existing files."""
        source, location = self.checkpoint.source, self.checkpoint.files
        files = sorted({source.position(name)[0] for name in source.tensors})
        stats = [(f, s.st_size, s.st_mtime_ns) for f in files for s in [_stat(location.directory, f)] if s is not None]
        # One file may hold a model twice, under two prefixes; and kept layers have the names of other layers.
        read = [self.checkpoint.names, location.prefix, location.kept]
        content = [__version__, stats, [asdict(job) for job in self.plan.jobs], location.config, read]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def _fill(self, scratch: Path) -> None:
        for path in scratch.iterdir():  # other files of a run killed near its end: the manifest would list itself
            if path.is_file() and path.name not in self.plan.sizes:
                path.unlink()
        self.plan.prepare(scratch)
        journal = _Journal(scratch)
        hashes = self._intact(scratch, journal.read())
        self.result.continued = len(hashes)
        self.checkpoint.check_repeats()
        filler = Filler(self.checkpoint, self.side, scratch, make_lock())

        def write(unit: WorkUnit, report: Report) -> dict[str, str]:
            written: dict[str, str] = {}
            with journal.entries() as record:

                def on_written(name: str, sha256: str) -> None:
                    written[name] = sha256
                    record(name, sha256)

                filler.write(unit, report, on_written)
            return written

        with flushing([scratch / name for name in self.plan.sizes]):
            for _, written in self._each("converting", write, work_units(self.plan, hashes)):
                hashes.update(written)
        self._finish(scratch, journal, hashes)

    def _each(self, what: str, work: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        progress = Progress(what, sum(job.nbytes for job in jobs), self.show_progress)
        yield from imap_unordered(work, jobs, self.workers, progress, self.peaks)
        progress.close()

    def _intact(self, scratch: Path, recorded: dict[str, str]) -> dict[str, str]:
        """The tensors that an interrupted run wrote and that are still intact: name -> sha256."""
        jobs = [job for job in self.plan.jobs if job.name in recorded]
        if not jobs:
            return {}
        with self._reader(scratch) as reader:

            def look(job: Job, report: Report) -> str:
                try:
                    return hash_tensor(reader, job.name, report)
                except ValueError:
                    return ""  # the archive around it is incomplete

            hashes = {jobs[index].name: value for index, value in self._each("checking existing tensors", look, jobs)}
        return {name: value for name, value in hashes.items() if value == recorded[name]}

    def _reader(self, scratch: Path) -> Any:
        """The written files, opened with the reader that loading uses."""
        if self.side == NATIVE:
            return DCPSource(scratch)
        write_index(scratch, self.files)
        source = open_weight_files(find_weights(scratch))
        for file in self.files:
            if folder := file.name.rpartition("/")[0]:
                add_folder(source, folder, scratch / file.name)
        return source

    def _finish(self, scratch: Path, journal: "_Journal", hashes: dict[str, str]) -> None:
        if self.verify:
            self._verify(scratch, hashes)
        journal.remove()
        # A README.md that does not belong to a checkpoint is the user's, and is kept.
        keep_card = (self.target / CARD_FILE).is_file() and not (self.target / CONFIG_FILE).is_file()
        write_model_files(self.checkpoint, scratch, self.loaded_dtype, keep_card)
        write_conversion_record(self.checkpoint, self.plan, scratch, self.dtype, hashes)
        if self.side == HUB:
            write_index(scratch, self.files)
        else:
            write_manifest(self.plan, scratch, hashes)
        jobs = self.plan.jobs
        self.result.tensors, self.result.bytes = len(jobs), sum(job.nbytes for job in jobs)
        self.result.parameters = sum(job.nbytes // job.dtype.itemsize for job in jobs)
        put_in_place(scratch, self.target)

    def _verify(self, scratch: Path, hashes: dict[str, str]) -> None:
        """Read all files back; raises ValueError for a tensor that differs from what was written."""
        with self._reader(scratch) as reader:

            def look(job: Job, report: Report) -> str:
                return hash_tensor(reader, job.name, report)

            for index, sha256 in self._each("reading again", look, self.plan.jobs):
                name = self.plan.jobs[index].name
                if sha256 != hashes[name]:
                    raise ValueError(f"{self.target}: tensor {name!r} does not read back as it was written")
                self.result.verified += 1


class _Journal:
    """The tensors that each process of a conversion has written, so that an interrupted one can continue.

    Each process appends lines to its own file: the name of a tensor and the sha256 of its elements.
    """

    def __init__(self, scratch: Path):
        self._folder = scratch / ".journal"
        self._folder.mkdir(exist_ok=True)

    def read(self) -> dict[str, str]:
        """All entries: name -> sha256."""
        recorded: dict[str, str] = {}
        for journal in self._folder.iterdir():
            for line in journal.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed process
                    name, sha256 = json.loads(line)
                    recorded[name] = sha256
        return recorded

    @contextlib.contextmanager
    def entries(self) -> Iterator[Callable[[str, str], None]]:
        """Yield a function that appends an entry of this process."""
        with open(self._folder / str(os.getpid()), "a", buffering=1) as file:

            def record(name: str, sha256: str) -> None:
                file.write(json.dumps([name, sha256]) + "\n")

            yield record

    def remove(self) -> None:
        shutil.rmtree(self._folder)


def _stat(root: Path | None, file: str) -> os.stat_result | None:
    # Files of a distributed checkpoint have no folder; in the current directory there may be another's.
    for path in (*([root / "model" / file] if root is not None else []), Path(file)):
        if path.is_file():
            return path.stat()
    return None


@contextlib.contextmanager
def _claimed(target: Path, scratch: Path) -> Iterator[None]:
    """The scratch directory, locked for this process; those of other conversions to `target` are removed.

    Raises:
        ValueError: another conversion to `target` is running.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.converting", f"another conversion to {target} is running"):
        for left in target.parent.glob(f".{glob.escape(target.name)}.converting-*"):
            if left != scratch:
                shutil.rmtree(left, ignore_errors=True)
        finish_replacing(target)
        scratch.mkdir(exist_ok=True)
        yield

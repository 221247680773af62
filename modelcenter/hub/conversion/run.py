"""Convert a checkpoint between Hugging Face's form and the distributed one, tensor by tensor.

No module with memory is built and no tensor is held whole. Everything is written to a directory beside the target,
which is named after what is converted and how: a conversion that was interrupted finds it and goes on, after it has
read again what is there and compared the hashes. The target appears when all is complete.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint
from engine.memory import readable
from modelcenter._version import __version__
from modelcenter.convert.pieces import HUB, NATIVE, whole
from modelcenter.convert.stream import CHUNK_BYTES, chunks
from modelcenter.hub.conversion.checkpoint import SIDES, Opened, Request, find_step, open_any
from modelcenter.hub.conversion.plan import (
    Filler,
    Job,
    Unit,
    file_parts,
    hash_tensor,
    plan_distributed,
    plan_hub,
    units_of,
    write_hub_index,
)
from modelcenter.hub.conversion.workers import Progress, Report, can_fork, flushing, make_lock, run_all
from modelcenter.hub.files.atomic_directory import (
    FilePlan,
    checked_target,
    finish_replacing,
    locked,
    parse_size,
    put_in_place,
    refuse_adapter_at,
    write_json,
)
from modelcenter.hub.files.dcp import StoredSource
from modelcenter.hub.files.names import CARD_FILE, CONFIG_FILE, GENERATION_FILE, MANIFEST_FILE
from modelcenter.hub.files.reader import find_weights, open_checkpoint
from modelcenter.hub.load import parse_dtype
from modelcenter.registry import shipped_file

FORMATS = {name: side for side, name in SIDES.items()}
CONVERSION_FILE = "conversion.json"
_JOURNAL = ".journal"  # within the scratch directory: what each process has written


@dataclass
class Conversion:
    """What a conversion did; `asdict` is what --json prints.

    Attributes:
        tensors: written. parameters, bytes: of them. continued: of them, those found whole from an interrupted run.
        further_heads: heads beside those of the named class. dropped: tensors without content, ignored: by --ignore.
        tied: tensors that repeat another and are not written. seconds: wall time; peak_bytes: the largest of a process.
        verified: written tensors whose files were read again.
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
        text += f"; {self.continued} were there from an interrupted conversion" if self.continued else ""
        for what, names in (("heads beside the named one", self.further_heads), ("dropped", self.dropped),
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
    """Convert a checkpoint with all the heads it holds.

    Args:
        source: a name, a Hugging Face directory, a distributed or training checkpoint, or a run's folder.
        target: a directory to make or replace. to: "hf" or "distributed".
        request: see Request. dtype: of tensors of floating numbers; None: as they are.
        workers: processes; None: one for each processor, at most 8.
        verify: read the files again once they are written, and compare every tensor with what was read.
        max_shard_size: of one file of format "hf".
        progress: print bytes, throughput and the time left to stderr.

    Raises:
        ValueError: the source or an argument is wrong, or the target cannot be written; nothing is left then.
        KeyboardInterrupt, ChildProcessError (a worker was killed): what is written stays beside the target, and the
            same call continues.
    """
    if to not in FORMATS:
        raise ValueError(f"--to: got {to!r}, expected {' or '.join(FORMATS)}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers: got {workers}, expected at least 1")
    wanted, size = parse_dtype(dtype), parse_size(max_shard_size)
    place = checked_target(Path(target))
    refuse_adapter_at(place)
    with open_any(source, request) as opened:
        if opened.directory is not None and opened.directory.resolve() == place:
            raise ValueError(f"{place} is the source itself; name another target")
        count = workers or min(os.cpu_count() or 1, 8)
        return _Run(opened, place, FORMATS[to], wanted, size, count, verify, progress).run()


class _Run:
    def __init__(
        self, opened: Opened, target: Path, side: int, wanted: torch.dtype | None, max_bytes: int, workers: int,
        verify: bool, shown: bool,
    ):  # fmt: skip
        self.opened, self.target, self.side, self.wanted = opened, target, side, wanted
        self.workers = workers if can_fork() else 1
        self.verify, self.shown = verify, shown
        self.files: Sequence[FilePlan] = ()
        if side == HUB:
            self.plan, self.files = plan_hub(opened, wanted, max_bytes)
        else:
            self.plan = plan_distributed(opened, wanted)
        held = opened.whole
        self.done = Conversion(
            opened.origin, str(target), SIDES[side], opened.arch.model_type, held.task, workers=self.workers,
            further_heads=held.further, dropped=held.dropped, ignored=opened.left_out,
            tied=[name for name, _ in held.repeats],
        )  # fmt: skip
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
            why = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            raise ValueError(f"converting to {self.target} failed: {why}; nothing was changed there") from error
        self.done.seconds = round(time.perf_counter() - began, 3)
        self.done.peak_bytes = max(self.peaks, default=0)
        return self.done

    def _fingerprint(self) -> str:
        """Names what is converted and how, so that only the same conversion continues what is there."""
        source = self.opened.source
        files = sorted({source.position(name)[0] for name in source.tensors})
        root = self.opened.directory
        seen = [(f, s.st_size, s.st_mtime_ns) for f in files for s in [_stat(root, f)] if s is not None]
        said = [__version__, self.side, seen, [asdict(job) for job in self.plan.jobs], self.opened.values]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]

    def _fill(self, scratch: Path) -> None:
        for path in scratch.iterdir():  # texts of a run that was killed at its end: a manifest would name itself
            if path.is_file() and path.name not in self.plan.sizes:
                path.unlink()
        self.plan.prepare(scratch)
        written = self._continued(scratch)
        self.done.continued = len(written)
        self._compare_repeats()
        filler = Filler(self.opened, self.side, scratch, make_lock())

        def write(unit: Unit, report: Report) -> dict[str, str]:
            made: dict[str, str] = {}
            with open(scratch / _JOURNAL / str(os.getpid()), "a", buffering=1) as journal:

                def wrote(name: str, found: str) -> None:
                    made[name] = found
                    journal.write(json.dumps([name, found]) + "\n")

                filler.write(unit, report, wrote)
            return made

        with flushing([scratch / name for name in self.plan.sizes]):
            for _, made in self._each("converting", write, units_of(self.plan, written)):
                written.update(made)
        self._finish(scratch, written)

    def _each(self, what: str, work: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        progress = Progress(what, sum(job.nbytes for job in jobs), self.shown)
        yield from run_all(work, jobs, self.workers, progress, self.peaks)
        progress.close()

    def _continued(self, scratch: Path) -> dict[str, str]:
        """Tensors that an interrupted run wrote and that are there as it wrote them: name -> sha256."""
        (scratch / _JOURNAL).mkdir(exist_ok=True)
        said: dict[str, str] = {}
        for journal in (scratch / _JOURNAL).iterdir():
            for line in journal.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a process that was killed
                    name, found = json.loads(line)
                    said[name] = found
        jobs = [job for job in self.plan.jobs if job.name in said]
        if not jobs:
            return {}
        with self._reader(scratch) as reader:

            def look(job: Job, report: Report) -> str:
                try:
                    return hash_tensor(reader, job.name, report)
                except ValueError:
                    return ""  # the archive around it was not finished

            found = {jobs[index].name: value for index, value in self._each("looking at what is there", look, jobs)}
        return {name: value for name, value in found.items() if value == said[name]}

    def _reader(self, scratch: Path) -> Any:
        """The written files, by the reader that users' programs have."""
        if self.side == NATIVE:
            return StoredSource(scratch)
        write_hub_index(scratch, self.files)
        return open_checkpoint(find_weights(scratch))

    def _compare_repeats(self) -> None:
        """Raise for a tensor of the source that should repeat another, and differs."""
        opened = self.opened
        for name, key in opened.whole.repeats:
            first = opened.names[key]
            if not same_values(opened.source, name, opened.source, first):
                raise ValueError(
                    f"{opened.origin}: tensor {name!r} should repeat {first!r} (they are tied), but its values differ. "
                    "If the checkpoint is meant to be untied, say so in its config.json: tie_word_embeddings false"
                )

    def _finish(self, scratch: Path, written: Mapping[str, str]) -> None:
        if self.verify:
            with self._reader(scratch) as reader:

                def look(job: Job, report: Report) -> str:
                    return hash_tensor(reader, job.name, report)

                for index, found in self._each("reading again", look, self.plan.jobs):
                    name = self.plan.jobs[index].name
                    if found != written[name]:
                        raise ValueError(f"{self.target}: tensor {name!r} does not read back as it was written")
                    self.done.verified += 1
        shutil.rmtree(scratch / _JOURNAL)
        self._write_texts(scratch)
        self._write_conversion(scratch, written)
        if self.side == HUB:
            write_hub_index(scratch, self.files)
        else:
            self._write_manifest(scratch, written)
        jobs = self.plan.jobs
        self.done.tensors, self.done.bytes = len(jobs), sum(job.nbytes for job in jobs)
        self.done.parameters = sum(job.nbytes // job.dtype.itemsize for job in jobs)
        put_in_place(scratch, self.target)

    def _write_texts(self, scratch: Path) -> None:
        opened = self.opened
        counts: dict[torch.dtype, int] = {}
        for job in self.plan.jobs:
            counts[job.dtype] = counts.get(job.dtype, 0) + job.nbytes
        main = str(max(counts, key=lambda d: counts[d])).removeprefix("torch.") if counts else "float32"
        hf_class = opened.arch.tasks[opened.whole.task].hf_class
        write_json(scratch / CONFIG_FILE, opened.arch.config.write(opened.config, hf_class, main))
        for name in opened.arch.files:
            shutil.copyfile(shipped_file(name), scratch / Path(name).name)
        # A README.md where no checkpoint was is somebody's: it stays.
        taken = (self.target / CARD_FILE).is_file() and not (self.target / CONFIG_FILE).is_file()
        for name in (GENERATION_FILE, *(() if taken else (CARD_FILE,))):
            if (path := opened.beside.file(name)) is not None:
                shutil.copyfile(path, scratch / name)
        opened.beside.copy_tokenizer(scratch)

    def _write_conversion(self, scratch: Path, written: Mapping[str, str]) -> None:
        opened, done = self.opened, self.done
        write_json(
            scratch / CONVERSION_FILE,
            {
                "format_version": 1,
                "tool": {"name": "modelcenter", "version": __version__, "torch": torch.__version__},
                "source": {
                    "origin": opened.origin,
                    "repository": opened.repo,
                    "revision": opened.revision,
                    "format": SIDES[opened.side],
                    "architectures": opened.values.get("architectures"),
                },
                "format": done.format,
                "model_type": done.model_type,
                "task": done.task,
                "dtype": None if self.wanted is None else str(self.wanted).removeprefix("torch."),
                "further_heads": done.further_heads,
                "dropped": done.dropped,
                "ignored": done.ignored,
                "tied": dict(opened.whole.repeats),
                "tensors": {
                    job.name: {
                        "shape": list(job.shape),
                        "dtype": str(job.dtype).removeprefix("torch."),
                        "sha256": written[job.name],
                        "file": job.file,
                    }
                    for job in self.plan.jobs
                },
            },
        )

    def _write_manifest(self, scratch: Path, written: Mapping[str, str]) -> None:
        """manifest.json, of what is known by now and of small files; no tensor is hashed again."""
        files: dict[str, Any] = {}
        inside: dict[str, list[Job]] = {name: [] for name in self.plan.sizes}
        for job in self.plan.jobs:
            inside[job.file].append(job)
        for path in sorted(p for p in scratch.rglob("*") if p.is_file()):
            name, size = str(path.relative_to(scratch)), path.stat().st_size
            files[name] = {"size": size}
            if name in inside:
                files[name]["parts"] = file_parts(path, size, inside[name], written)
            else:
                with open(path, "rb", buffering=0) as file:
                    files[name]["sha256"] = checkpoint.hash_ranges(file, [(0, size)])
        write_json(scratch / MANIFEST_FILE, {"format_version": checkpoint.FORMAT_VERSION, "files": files})


def _stat(root: Path | None, file: str) -> os.stat_result | None:
    for path in (Path(file), *([root / "model" / file] if root is not None else [])):
        if path.is_file():
            return path.stat()
    return None


@contextlib.contextmanager
def _claimed(target: Path, scratch: Path) -> Iterator[None]:
    """The scratch directory, for this process alone; those of other conversions to `target` are removed.

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


def same_values(first: Any, a: str, second: Any, b: str) -> bool:
    """Whether two tensors are equal in shape, and in value (NaN equals NaN; -0 equals 0), read in chunks."""
    x, y = first.tensors[a], second.tensors[b]
    if tuple(x.shape) != tuple(y.shape):
        return False
    for box in chunks(whole(tuple(x.shape)), CHUNK_BYTES // x.dtype.itemsize):
        left, right = first.read(a, box), second.read(b, box)
        if not torch.allclose(left, right.to(left.dtype), rtol=0, atol=0, equal_nan=True):
            return False
    return True


def export(source: Any, target: Any, *, step: str | None = None, **options: Any) -> Conversion:
    """Convert a checkpoint, or a run's final model or one of its steps, to a Hugging Face directory; see `convert`."""
    return convert(find_step(source, step), target, "hf", **options)

"""The record of a run: the rows of its files, and its progress on the terminal. Only rank 0 writes and shows."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from modelcenter._paths import write_whole
from modelcenter.training.config import TrainConfig
from modelcenter.training.output.curves import plot
from modelcenter.training.output.display import Display
from modelcenter.training.output.folder import free_space
from modelcenter.training.output.json_text import finite, json_text
from modelcenter.training.output.trackers import Trackers


class Record:
    """Writes the rows of metrics.jsonl and the files beside it. With writer=False (on other ranks and in dry runs),
    rows are only kept in memory.

    If rows or the curves cannot be written, that is reported once and the run continues; summary.json must be written.
    """

    def __init__(
        self, path: Path | None, total_steps: int, writer: bool, step: int = 0, cfg: TrainConfig | None = None
    ):
        """step: the step that the run resumes from; rows of later steps, which a stopped run wrote, are removed."""
        self.path = path if writer else None
        self.rows: list[dict[str, Any]] = []
        self.display = Display(total_steps) if writer else None
        self._file: TextIO | None = None
        self._unwritable: set[str] = set()  # files that were reported as unwritable
        self._trackers = Trackers(None)
        if self.path is not None:
            self.rows = truncate_rows(self.path / "metrics.jsonl", step)
            truncate_rows(self.path / "skipped.jsonl", step)
            truncate_rows(self.path / "samples.jsonl", step)
            self._file = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._trackers = Trackers(self.path, cfg, step)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row, and show it."""
        row = finite(row)
        self.rows.append(row)
        if self._file is not None and self.path is not None:
            with self._reporting_failure("metrics.jsonl"):
                self._file.write(json_text(row) + "\n")
                self._file.flush()  # on a full disk, a few KB stay in the buffer until there is space
        self._trackers.log(row)
        if self.display is not None:
            self.display.row(row)

    def log_sample(self, row: dict[str, Any]) -> None:
        """Add a row to samples.jsonl, the model's output for an example, and show it."""
        self._append("samples.jsonl", row)
        self.report("\n".join(f"  {name:<10} {str(value)!r:.500}" for name, value in row.items() if name != "step"))

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if self.path is not None:
            with self._reporting_failure(name), (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")

    def log_skipped(self, row: dict[str, Any]) -> None:
        """Add a row to skipped.jsonl, for a step that changed nothing because its gradient was not finite."""
        if self.path is not None:
            self._append("skipped.jsonl", row)
            self.report(f"step {row['step']}: the gradient was not finite, skipped; its rows are in skipped.jsonl")

    def report(self, text: str) -> None:
        """Show a line."""
        if self.display is not None:
            self.display.print_line(text)

    def close(self, summary: dict[str, Any], finish: Callable[[], None] | None = None) -> None:
        """Write summary.json (atomically) and curves.png, and close the trackers.

        Args:
            finish: the last action of a finished run, called once the curves are drawn. summary.json is written after
                it, so that a run that is killed earlier resumes and repeats it.

        Raises:
            OSError: summary.json could not be written. Also what `finish` raises.
        """
        if self.display is not None:
            self.display.close()
        try:
            if self._file is not None and self.path is not None:
                with self._reporting_failure("metrics.jsonl"):
                    self._file.close()
                if finish is None:  # write it first, because little time may be left
                    _write_summary(self.path / "summary.json", summary)
                self._draw(self.path / "curves.png")
                if finish is not None:
                    finish()
                    _write_summary(self.path / "summary.json", summary)
        finally:
            self._trackers.close()

    def _draw(self, path: Path) -> None:
        try:
            plot(self.rows, path)
        except Exception as error:  # any error of matplotlib: a failed plot must not end the run
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            print(f"{path.name} could not be written: {reason}", file=sys.stderr)

    @contextmanager
    def _reporting_failure(self, name: str) -> Iterator[None]:
        """Report, once per file, that it cannot be written, instead of raising."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritable and self.path is not None:
                self._unwritable.add(name)
                free = free_space(self.path)
                self.report(f"{name} cannot be written, the run continues without its rows: {error.strerror}; {free}")


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    write_whole(path, (json_text(summary, indent=2) + "\n").encode())


def truncate_rows(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove rows of later steps and incomplete rows from a file of JSON lines. Returns the rest."""
    if not path.is_file():
        return []
    rows = []
    # Not splitlines(): generated texts may contain U+2028 and the like.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        of_step = row.get("step") if isinstance(row, dict) else None
        if isinstance(of_step, int) and of_step <= step:
            rows.append(row)
    write_whole(path, "".join(json_text(row) + "\n" for row in rows).encode())
    return rows

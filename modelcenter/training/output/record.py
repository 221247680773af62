"""What a run leaves in --output_dir, and what it shows while it runs. Only rank 0 writes and shows."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from modelcenter.training.config import TrainConfig
from modelcenter.training.output.curves import plot
from modelcenter.training.output.display import Display
from modelcenter.training.output.folder import room
from modelcenter.training.output.json_text import finite, json_text
from modelcenter.training.output.trackers import Trackers


class Record:
    """The rows of metrics.jsonl and the files around them; with writer=False (other ranks, dry runs) it only
    remembers.

    A file of rows, or the curves, that cannot be written are said once and do not end the run; summary.json must be.
    """

    def __init__(
        self, path: Path | None, total_steps: int, writer: bool, step: int = 0, cfg: TrainConfig | None = None
    ):
        """step: what is written of later steps is of a run that was stopped, and cut off."""
        self.path = path if writer else None
        self.rows: list[dict[str, Any]] = []
        self.show = Display(total_steps) if writer else None
        self._file: TextIO | None = None
        self._unwritable: set[str] = set()  # files of which that has been said
        self._trackers = Trackers(None)
        if self.path is not None:
            self.rows = cut(self.path / "metrics.jsonl", step)
            cut(self.path / "skipped.jsonl", step)
            cut(self.path / "samples.jsonl", step)
            self._file = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._trackers = Trackers(self.path, cfg)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row, and show it."""
        row = finite(row)
        self.rows.append(row)
        if self._file is not None and self.path is not None:
            with self._trying("metrics.jsonl"):
                self._file.write(json_text(row) + "\n")
                self._file.flush()  # a few KB that find no room stay in its buffer, and are written once there is some
        self._trackers.log(row)
        if self.show is not None:
            self.show.row(row)

    def sample(self, row: dict[str, Any]) -> None:
        """Write down and show what the model made of a row."""
        self._add("samples.jsonl", row)
        self.say("\n".join(f"  {name:<10} {str(value)!r:.500}" for name, value in row.items() if name != "step"))

    def _add(self, name: str, row: dict[str, Any]) -> None:
        if self.path is not None:
            with self._trying(name), (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")

    def skipped(self, row: dict[str, Any]) -> None:
        """Write down a step that changed nothing, as its gradient was not finite."""
        if self.path is not None:
            self._add("skipped.jsonl", row)
            self.say(f"step {row['step']}: the gradient was not finite, skipped; its rows are in skipped.jsonl")

    def say(self, text: str) -> None:
        """Show a line."""
        if self.show is not None:
            self.show.say(text)

    def close(self, summary: dict[str, Any]) -> None:
        """Write summary.json (whole or not at all) and curves.png; then end the trackers.

        Raises:
            OSError: summary.json could not be written.
        """
        if self.show is not None:
            self.show.close()
        try:
            if self._file is not None and self.path is not None:
                with self._trying("metrics.jsonl"):
                    self._file.close()
                _write_summary(self.path / "summary.json", summary)
                self._draw(self.path / "curves.png")
        finally:
            self._trackers.close()

    def _draw(self, path: Path) -> None:
        try:
            plot(self.rows, path)
        except Exception as error:  # of matplotlib too: what only shows the run does not end it
            why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            print(f"{path.name} could not be written: {why}", file=sys.stderr)

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        """Let a file of rows be one that cannot be written, which is said once."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritable and self.path is not None:
                self._unwritable.add(name)
                free = room(self.path)
                self.say(f"{name} cannot be written, the run goes on without its rows: {error.strerror}; {free}")


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    work = path.with_name(f".{path.name}")
    try:
        work.write_text(json_text(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    work.rename(path)


def cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Take the rows of later steps out of a file of JSON lines, and what a killed run wrote half; returns the rest."""
    if not path.is_file():
        return []
    rows = []
    # Not splitlines(): what a model wrote may hold U+2028 and its like.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("step", math.inf) <= step:
            rows.append(row)
    work = path.with_name(f".{path.name}")
    work.write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")
    work.replace(path)
    return rows

"""What a run leaves in --output_dir, and what it shows while it runs. Only rank 0 writes and shows."""

import json
import math
import os
import platform
import resource
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from modelcenter.training.config import TrainConfig
from modelcenter.training.trackers import Trackers

_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "skipped.jsonl",
    "samples.jsonl",
    "summary.json",
    "curves.png",
    "model",
    "adapter",
    "checkpoints",
    "tracking",
)


def prepare_output(path: Path, overwrite: bool) -> None:
    """Make sure that a run can write to `path`, before anything slow starts. Rank 0's work.

    Raises:
        ValueError: the folder holds a finished run (and not overwrite), files that are not of a run, or a link that
            leads nowhere.
        OSError: it cannot be written.
    """
    if path.is_dir():
        foreign = [p.name for p in path.iterdir() if p.name not in _FILES and not p.name.startswith(".")]
        summary = path / "summary.json"
        if foreign and not summary.exists() and not (path / "config.yaml").exists():
            raise ValueError(f"output_dir: {path} holds files of something else ({foreign[0]}, ...); give a new folder")
        if not overwrite and _status(summary) == "finished":
            raise ValueError(
                f"output_dir: {path} holds a finished run; give another folder, to train it further with --resume "
                f"{path}, or --overwrite_output_dir"
            )
    for link in (path / name for name in _FILES):
        if link.is_symlink() and not link.exists():
            raise ValueError(f"output_dir: {link} is a link to {link.readlink()}, which is not there; make that folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(f"output_dir: cannot write to {path}: {error.strerror}") from None


def clear_output(path: Path) -> None:
    """Remove what an earlier run left, now that the new one starts; other files stay."""
    for name in _FILES:
        _empty(path / name)


def _empty(path: Path) -> None:
    """Remove a file or a folder; of a link to a folder, as people put checkpoints on another disk, what is in it."""
    if path.is_symlink() and path.is_dir():
        for inside in path.iterdir():
            _remove(inside)  # links in it too, such as `last` and those to checkpoints that are kept elsewhere
    else:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _status(summary: Path) -> str | None:
    try:
        return json.loads(summary.read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError):
        return None


def finite(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become null, also inside dictionaries and lists."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Record:
    """The rows of metrics.jsonl and the files around them; with writer=False (other ranks, dry runs) it only
    remembers."""

    def __init__(
        self, path: Path | None, total_steps: int, writer: bool, step: int = 0, cfg: TrainConfig | None = None
    ):
        """step: what is written of later steps is of a run that was stopped, and cut off."""
        self.path = path if writer else None
        self.rows: list[dict[str, Any]] = []
        self.show = Display(total_steps) if writer else None
        self._file: TextIO | None = None
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
            with _naming(self.path / "metrics.jsonl"):
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
        self._trackers.log(row)
        if self.show is not None:
            self.show.row(row)

    def sample(self, row: dict[str, Any]) -> None:
        """Write down and show what the model made of a row."""
        self._add("samples.jsonl", row)
        self.say("\n".join(f"  {name:<10} {str(value)!r:.500}" for name, value in row.items() if name != "step"))

    def _add(self, name: str, row: dict[str, Any]) -> None:
        if self.path is not None:
            with _naming(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

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
        """Write summary.json (whole or not at all) and curves.png; then end the trackers."""
        if self.show is not None:
            self.show.close()
        if self._file is not None and self.path is not None:
            with _naming(self.path / "metrics.jsonl"):
                self._file.close()
            work = self.path / ".summary.json"
            with _naming(self.path / "summary.json"):
                work.write_text(json.dumps(finite(summary), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            work.rename(self.path / "summary.json")
            try:
                plot(self.rows, self.path / "curves.png")
            except OSError as error:
                print(f"curves.png could not be written: {error.strerror}", file=sys.stderr)
        self._trackers.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of writing say which file it is of: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


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
    work.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    work.replace(path)
    return rows


class Display:
    """A bar with the newest numbers on a terminal; a line per logged row elsewhere."""

    def __init__(self, steps: int, stream: TextIO | None = None):
        self.steps, self.stream = steps, stream or sys.stdout
        self.bar: Any = None
        if self.stream.isatty() and find_spec("rich") is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("", total=steps)
            self.bar.start()

    def step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        if "loss" in row:
            text = f"epoch {row['epoch']:.2f}  loss {_number(row['loss'])}  grad {_number(row['grad_norm'])}"
            text += f"  lr {row['lr']:.2e}  {row['tokens_per_second']:,.0f} tok/s"
            text += f"  skipped {row['skipped']}" if row.get("skipped") else ""
            if self.bar is not None:
                self.bar.update(self.task, description=text)
                return
        else:
            text = "  ".join(f"{name} {_number(value)}" for name, value in row.items() if name.startswith("eval_"))
        self.say(f"step {row['step']:>{len(str(self.steps))}}/{self.steps}  {text}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}" if abs(value) < 1e6 else f"{value:.3g}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss, learning rate and evaluation metrics over the steps; without matplotlib one line says so."""
    if find_spec("matplotlib") is None:
        print(f"{path.name} needs matplotlib (pip install matplotlib): not drawn", file=sys.stderr)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4))
    FigureCanvasAgg(figure)
    # Margins of their own: a layout that matplotlib works out draws everything twice.
    margins = {"left": 0.04, "right": 0.99, "bottom": 0.13, "top": 0.91, "wspace": 0.19}
    loss, rate, metrics = figure.subplots(1, 3, gridspec_kw=margins)
    train, evals = [r for r in rows if "loss" in r], [r for r in rows if "eval_loss" in r]
    loss.plot([r["step"] for r in train], [_nan(r["loss"]) for r in train], label="training")
    rate.plot([r["step"] for r in train], [r["lr"] for r in train])
    if evals:
        loss.plot([r["step"] for r in evals], [_nan(r["eval_loss"]) for r in evals], "o-", label="evaluation")
    apart = ("eval_loss", "eval_mse", "eval_seconds")  # of another scale
    for name in [n for n in (evals[0] if evals else ()) if n.startswith("eval_") and n not in apart]:
        metrics.plot([r["step"] for r in evals], [_nan(r[name]) for r in evals], "o-", label=name[5:])
    for axes, title in ((loss, "loss"), (rate, "learning rate"), (metrics, "evaluation")):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.ticklabel_format(axis="y", scilimits=(-2, 4))
        if axes.get_legend_handles_labels()[0] and axes is not rate:
            axes.legend()
    figure.savefig(path, dpi=110)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def about_machine() -> dict[str, Any]:
    """Versions and hardware, for summary.json."""
    import torch

    import engine
    from modelcenter import __version__

    versions = {"modelcenter": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("transformers", "tokenizers", "numpy"):
        if name in sys.modules:
            versions[name] = getattr(sys.modules[name], "__version__", "unknown")
    device = engine.device()
    return {
        "versions": versions,
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "threads_per_rank": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": engine.world_size(),
        },
    }


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process so far: host (resident), and device where it is a GPU."""
    import torch

    import engine

    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if engine.device().type == "cuda":
        peak["device_bytes"] = torch.cuda.max_memory_allocated()
    return peak


def room(path: Path) -> str:
    """What is free on the disk of a folder, in words: torch does not say so where a disk was too small for a file."""
    return f"{shutil.disk_usage(path).free / 1e6:,.1f} MB are free at {path}"


def command_line() -> str:
    """How this process was started, as one would type it."""
    return shlex.join(sys.argv)


def summarise(rows: list[dict[str, Any]], main_metric: str, lower: bool, **more: Any) -> dict[str, Any]:
    """The fields of summary.json that follow from the rows. lower: the main metric is better so."""
    evals = [r for r in rows if "eval_loss" in r]
    key = f"eval_{main_metric}"
    scored = [r for r in evals if r.get(key) is not None]
    train = [r for r in rows if r.get("loss") is not None]
    of = min if lower else max
    best = of(scored, key=lambda r: r[key]) if scored else min(train, key=lambda r: r["loss"], default={})
    last: dict[str, Any] = {}
    for row in (*train[-1:], *evals[-1:]):
        last |= row
    return {
        **more,
        "last": last,
        "best": {"metric": key if scored else "loss", **best} if best else {},
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_line(),
        **about_machine(),
    }

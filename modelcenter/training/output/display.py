"""The progress of a run on the terminal."""

import sys
from importlib.util import find_spec
from typing import Any, TextIO


class Display:
    """A progress bar with the newest numbers on a terminal; elsewhere a line per logged row."""

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
        """Move the bar to `step`."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        """Show a row of metrics.jsonl."""
        if "loss" in row:
            text = f"epoch {row['epoch']:.2f}  loss {_number(row['loss'])}  grad {_number(row['grad_norm'])}"
            text += f"  lr {row['lr']:.2e}  {row['tokens_per_second']:,.0f} tok/s"
            text += f"  skipped {row['skipped']}" if row.get("skipped") else ""
            if self.bar is not None:
                self.bar.update(self.task, description=text)
                return
        else:
            text = "  ".join(f"{name} {_number(value)}" for name, value in row.items() if name.startswith("eval_"))
        self.print_line(f"step {row['step']:>{len(str(self.steps))}}/{self.steps}  {text}")

    def print_line(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
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

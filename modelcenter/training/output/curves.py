"""curves.png: plots of a run's loss, learning rate and evaluation metrics."""

import io
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelcenter._paths import write_whole


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot loss, learning rate and evaluation metrics over the steps. Without matplotlib, print a line that says so."""
    if find_spec("matplotlib") is None:
        print(f"{path.name} was not drawn: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4))
    FigureCanvasAgg(figure)
    # Fixed margins: matplotlib's automatic layouts draw everything twice.
    margins = {"left": 0.04, "right": 0.99, "bottom": 0.13, "top": 0.91, "wspace": 0.19}
    loss, rate, metrics = figure.subplots(1, 3, gridspec_kw=margins)
    train, evals = [r for r in rows if "loss" in r], [r for r in rows if "eval_loss" in r]
    loss.plot([r["step"] for r in train], [_nan(r["loss"]) for r in train], label="training")
    rate.plot([r["step"] for r in train], [r["lr"] for r in train])
    if evals:
        loss.plot([r["step"] for r in evals], [_nan(r["eval_loss"]) for r in evals], "o-", label="evaluation")
    omitted = ("eval_loss", "eval_mse", "eval_seconds")  # on another scale
    names = dict.fromkeys(name for row in evals for name in row if name.startswith("eval_"))
    for name in (name for name in names if name not in omitted):
        known = [row for row in evals if name in row]  # a resumed run may have other metrics than before
        metrics.plot([r["step"] for r in known], [_nan(r[name]) for r in known], "o-", label=name[5:])
    for axes, title in ((loss, "loss"), (rate, "learning rate"), (metrics, "evaluation")):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.ticklabel_format(axis="y", scilimits=(-2, 4))
        if axes.get_legend_handles_labels()[0] and axes is not rate:
            axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    write_whole(path, drawn.getvalue())


def _nan(value: float | None) -> float:
    return math.nan if value is None else value

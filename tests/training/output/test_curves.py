"""curves.png."""

from modelcenter.training.output.curves import plot


def test_curves_of_rows_without_numbers(curves, tmp_path):
    """A loss that is not finite is null in metrics.jsonl; there may be no evaluation, and no row at all."""
    row = {"step": 1, "loss": None, "lr": 0.1, "grad_norm": None}
    for name, rows in {"a": [row, row | {"step": 2, "eval_loss": None, "eval_f1": None}], "b": [row], "c": []}.items():
        plot(rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_curves_of_evaluations_by_different_metrics(curves, tmp_path, monkeypatch):
    """As those of a run that went on with other --metrics."""
    from matplotlib.axes import Axes

    drawn = {}

    def draw(self, x, y, *args, label=None, **kwargs):
        drawn[label] = (x, y)
        return usual(self, x, y, *args, label=label, **kwargs)

    usual = Axes.plot
    monkeypatch.setattr(Axes, "plot", draw)
    evals = [{"step": 1, "eval_loss": 2.0, "eval_f1": 0.5}, {"step": 2, "eval_loss": 1.0, "eval_bleu": 9.0}]
    plot(evals, tmp_path / "curves.png")
    assert drawn["f1"] == ([1], [0.5]) and drawn["bleu"] == ([2], [9.0])

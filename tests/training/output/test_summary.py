"""summary.json."""

from modelcenter.training.checkpoints.model_selection import ModelSelection
from modelcenter.training.output.summary import _command, _last_and_best


def test_the_last_numbers_are_of_the_newest_step():
    rows = [{"step": 4, "epoch": 1.0, "eval_loss": 0.5}, {"step": 6, "epoch": 1.5, "loss": 0.4, "tokens": 60}]
    selection = ModelSelection("loss", None)
    selection.judge(rows[0])
    found = _last_and_best(rows, selection)
    assert found["last"] == {"step": 6, "epoch": 1.5, "loss": 0.4, "tokens": 60, "eval_loss": 0.5}
    assert found["best"]["step"] == 4
    selection.best = {"metric": "eval_loss", "value": 0.2, "step": 2}  # of the folder that the run went on from
    assert _last_and_best(rows, selection)["best"] == {"metric": "eval_loss", **rows[0]}


def test_the_command_can_be_typed(monkeypatch):
    """By `python -m modelcenter` the program is called .../modelcenter/__main__.py."""
    for program, name in (("/opt/modelcenter/__main__.py", "modelcenter"), ("scripts/x.py", "scripts/x.py")):
        monkeypatch.setattr("sys.argv", [program, "--model", "a b"])
        assert _command() == f"{name} --model 'a b'"

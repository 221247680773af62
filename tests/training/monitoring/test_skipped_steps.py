"""The steps that changed nothing, as they are found out when the device is read."""

from types import SimpleNamespace

import torch

from modelcenter.training.monitoring.skipped_steps import SkippedSteps


def test_a_step_is_told_once():
    """Also where the one after it is skipped too: of the last steps it still knows."""
    source = SimpleNamespace(to_remember=lambda rows: rows, where=lambda rows, most: f"rows {rows}")
    manager = SimpleNamespace(skipped=0)
    steps, told = SkippedSteps(manager, source), []
    for step, norm in enumerate((float("nan"), float("inf"), 1.0, float("nan")), 1):
        steps.add(step, step * 10, torch.tensor(norm))
        manager.skipped += norm != 1.0
        told.append(list(steps.new_rows(step)))
    found = [[(row["step"], row["rows"]) for row in rows] for rows in told]
    assert found == [[(1, "rows 10")], [(2, "rows 20")], [], [(4, "rows 40")]]
    assert steps.count == 3

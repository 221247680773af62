"""Each skipped step is told of once, whenever the device is read."""

from types import SimpleNamespace

import torch

from modelcenter.training.monitoring.skipped_steps import SkippedSteps


def test_a_skipped_step_is_a_row_once():
    manager = SimpleNamespace(skipped=0)
    source = SimpleNamespace(to_remember=lambda rows: rows, where=lambda rows, most=4: f"{rows} of {most}")
    steps = SkippedSteps(manager, source)

    def told(first, norms, skipped):
        """The rows after these steps, of which so many of the run were skipped."""
        for number, norm in enumerate(norms, first):
            steps.add(number, f"rows {number}", torch.tensor(norm))
        manager.skipped = skipped
        return [(row["step"], row["grad_norm"], row["rows"]) for row in steps.new_rows(first + len(norms) - 1)]

    nan, inf = float("nan"), float("inf")
    assert told(1, [1.0, nan, 2.0, inf], 2) == [(2, "nan", "rows 2 of 1000000000"), (4, "inf", "rows 4 of 1000000000")]
    assert told(5, [3.0], 2) == []
    assert told(6, [-inf], 3) == [(6, "-inf", "rows 6 of 1000000000")]  # not step 4 again, which is remembered
    steps.add(7, "rows 7", torch.tensor(1.0))
    assert steps.rows_of_last_steps() == "Rows of the last steps: step 6: rows 6 of 4 | step 7: rows 7 of 4"
    steps.start_from(9)  # a checkpoint of another step, which knows how many were skipped
    assert told(9, [nan], 3) == [] and told(10, [nan], 4) == [(10, "nan", "rows 10 of 1000000000")]

"""Ranks that are given different flags or data."""

import os

import pytest
from toydata import command, flags, make_rows, write_folder, write_jsonl

from engine.testing import run as on_ranks
from scripts.finetune_classification import main


def _differ(folder, changes):
    values = flags(folder, output_dir=str(folder / "run"), max_steps=1)
    if int(os.environ["RANK"]) == 1:
        values |= changes
    main(command(values))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.5}, r"lr: rank 1 on .* has 0.5, rank 0 on .* has 0.01; start all ranks with the same"),
        (
            {"train_data": "other"},
            r"train_data: rank 1 on .* has 24 rows of \d+ tokens of its own, rank 0 on .* 24 rows of \d+ tokens of its "
            "own; let all ranks read the same files",
        ),
        # Said by rank 0, which waits for no answer.
        ({"train_data": "broken"}, "rank 1 failed while preparing the rows: .*line 25: the row has no text"),
    ],
    ids=["flags", "data", "rows"],
)
def test_ranks_that_are_given_different_things_are_an_error(tmp_path, changes, says):
    """The same rows at another place are no difference."""
    write_folder(tmp_path)
    write_jsonl(tmp_path / "same" / "train.jsonl", make_rows(24, seed=1))
    write_jsonl(tmp_path / "same" / "dev.jsonl", make_rows(11, seed=2))
    write_jsonl(tmp_path / "other" / "train.jsonl", make_rows(24, seed=3))
    write_jsonl(tmp_path / "broken" / "train.jsonl", [*make_rows(24, seed=1), {"text": None, "label": "good"}])
    here = {k: str(tmp_path / v) if k == "train_data" else v for k, v in changes.items()}
    with pytest.raises(RuntimeError, match=says):
        on_ranks(_differ, 2, tmp_path, here)
    if changes.get("train_data") == "other":
        on_ranks(_differ, 2, tmp_path, {"train_data": str(tmp_path / "same")})

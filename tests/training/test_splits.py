"""Rows that are held out for evaluation: their labels are labels of the data, whichever rows these are."""

import json

import pytest

from modelcenter.training.config import ClassificationConfig, TokenClassificationConfig
from modelcenter.training.tasks.classification import Classification
from modelcenter.training.tasks.token_classification import TokenClassification


def write(tmp_path, rows: list[dict]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("rare", ["rare", 9, [9, 8], 0.5])
def test_a_class_that_only_held_out_rows_have(tmp_path, rare):
    usual = [["a", "b"], [0, 1], [[0], [1]], [0, 1]][["rare", 9, [9, 8], 0.5].index(rare)]
    rows = [{"text": f"film {i}", "label": rare if i == 7 else usual[i % 2]} for i in range(20)]
    data = write(tmp_path, rows)
    tasks = [
        Classification.from_flags(ClassificationConfig(train_data=[data], eval_fraction=0.3, seed=seed))
        for seed in range(9)
    ]
    assert len({task.labels for task in tasks}) == 1
    held_out = ["film 7" in task.eval_table.columns["text"] for task in tasks]
    assert any(held_out) and not all(held_out)
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() + '{"text": "film", "label": null}\n')
    for seed in range(9):
        with pytest.raises(ValueError, match="rows.jsonl, line 21: the row has no label"):
            Classification.from_flags(ClassificationConfig(train_data=[data], eval_fraction=0.3, seed=seed))


def test_a_tag_that_only_held_out_rows_have(tmp_path):
    rows = [{"tokens": ["film", str(i)], "tags": ["B-RARE" if i == 7 else "B-X", "O"]} for i in range(20)]
    data = write(tmp_path, rows)
    tasks = [
        TokenClassification.from_flags(TokenClassificationConfig(train_data=[data], eval_fraction=0.3, seed=seed))
        for seed in range(9)
    ]
    assert {task.tag_names for task in tasks} == {("B-RARE", "B-X", "O")}
    assert any(["film", "7"] in task.eval_words for task in tasks)

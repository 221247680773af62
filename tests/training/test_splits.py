"""Labels of the rows of an evaluation: those that are held out of the training rows, and those that lack some."""

import json
from pathlib import Path

import pytest

from modelcenter.data.readers import read_file
from modelcenter.training.config import ClassificationConfig, EvaluateConfig, TokenClassificationConfig
from modelcenter.training.tasks.classification import Classification
from modelcenter.training.tasks.splits import read_splits
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


@pytest.mark.parametrize("name", ["validation", "dev", "valid"])
def test_rows_that_are_trained_on_are_not_evaluated_on_by_themselves(tmp_path, name):
    """A split has several names."""
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text("text,label\na film,a\na book,b\n")
    data = [str(tmp_path)]
    train, held = read_splits(ClassificationConfig(train_data=data, train_split=name))
    assert train.where(0).endswith("dev.csv, line 2") and held is None
    train, held = read_splits(ClassificationConfig(train_data=data, train_split=name, eval_split="train"))
    assert held is not None and held.where(0).endswith("train.csv, line 2")


def test_rows_with_some_of_the_columns_of_labels(tmp_path):
    """Those that are there, by themselves, would be taken for numbers of classes."""
    rows = [{"text": f"film {i}", "toxic": i % 2, "threat": 0, "fold": "ab"[i % 2]} for i in range(20)]
    run = ClassificationConfig(train_data=[write(tmp_path, rows)], label_column="toxic, threat")
    Classification.from_flags(run)
    cfg = EvaluateConfig()
    whole = Classification.for_inference(cfg, run, read_file(tmp_path / "rows.jsonl"), labelled=True)
    assert whole.columns.label == "toxic, threat"
    for row in rows:
        del row["threat"]
    table = read_file(Path(write(tmp_path, rows)))
    with pytest.raises(ValueError, match="label_column: .*rows.jsonl has no column 'threat', but the run's labels are"):
        Classification.for_inference(cfg, run, table, labelled=True)
    cfg.label_column = "fold"  # what is given is taken
    assert Classification.for_inference(cfg, run, table, labelled=True).columns.label == "fold"
    assert Classification.for_inference(EvaluateConfig(), run, table, labelled=False).columns.label is None


def test_a_tag_that_only_held_out_rows_have(tmp_path):
    rows = [{"tokens": ["film", str(i)], "tags": ["B-RARE" if i == 7 else "B-X", "O"]} for i in range(20)]
    data = write(tmp_path, rows)
    tasks = [
        TokenClassification.from_flags(TokenClassificationConfig(train_data=[data], eval_fraction=0.3, seed=seed))
        for seed in range(9)
    ]
    assert {task.tag_names for task in tasks} == {("B-RARE", "B-X", "O")}
    assert any(["film", "7"] in task.eval_words for task in tasks)

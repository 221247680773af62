"""What the model card tells of the data."""

from toydata import write_jsonl

from modelcenter.training.config import ClassificationConfig
from modelcenter.training.output.messages import data_name


def test_the_card_names_data_sets_of_the_hub_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here/tokens.bin", "here/tokens.idx", "here/rows"):
        write_jsonl(tmp_path / name, [])
    for given, name in {
        "nyu-mll/glue": "nyu-mll/glue", "rajpurkar/squad@2": "rajpurkar/squad", "data/*.jsonl": None, "~/x/y": None,
        "here/rows": None, "here/rows@2": None, "here/tokens": None, "here/gone.jsonl": None, "./a/b": None,
    }.items():  # fmt: skip
        assert data_name(ClassificationConfig(train_data=[given])) == name, given
    assert data_name(ClassificationConfig(train_data=["nyu-mll/glue", "here/rows"])) is None

"""Where rows come from: files, folders with splits, patterns, Hub names."""

import gzip
import os
import sys
import types

import numpy as np
import pytest

from modelcenter.data import sources
from modelcenter.data.readers import read_file
from modelcenter.training.tasks.splits import evaluation_split, inference_split


@pytest.fixture
def folder(tmp_path):
    for name, rows in {"train_all.tsv": 5, "dev-few.tsv": 3, "test_public.tsv": 2, "unlabeled.tsv": 7}.items():
        (tmp_path / name).write_text("".join(f"{i % 2}\t{name} {i}\n" for i in range(rows)))
    (tmp_path / "notes.md").write_text("no data")
    return tmp_path


def test_folder_with_splits(folder):
    source = sources.find(str(folder))
    assert set(source.splits) == {"train", "validation", "test"}
    sizes = {name: len(source.read(name)) for name in ("train", "dev", "validation", "test")}
    assert sizes == {"train": 5, "dev": 3, "validation": 3, "test": 2}  # the unlabelled file belongs to none
    assert source.whole("dev") == source.whole("validation[:2]") == "validation"
    with pytest.raises(ValueError, match="has no split 'tset'; its splits: "):
        source.read("tset")


def test_sub_folders_and_hub_style_names(tmp_path):
    for name in ("train/a.jsonl", "train/b.jsonl", "data/validation-00000-of-00001.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    source = sources.find(str(tmp_path))
    assert len(source.read("train")) == 2 and len(source.read("validation")) == 1


def test_folder_without_splits_pattern_and_list_are_one_split(folder):
    (folder / "sub").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "sub" / name).write_text("x\ny\n")
    assert sources.find(str(folder / "sub")).splits == ("train",)
    assert len(sources.find(str(folder / "sub")).read("train")) == 4
    assert len(sources.find(str(folder / "sub" / "*.txt")).read("train")) == 4
    both = sources.find([str(folder / "sub" / "a.txt"), str(folder / "dev-few.tsv")])
    assert both.splits == ("train",) and len(both.read("train")) == 5


@pytest.mark.parametrize(
    "names",
    [
        ("trainset.csv", "devset.csv", "testset_w_refs.csv"),  # as the E2E challenge publishes them
        ("traindata.csv", "development.csv", "testdata.csv"),
        ("news-training.csv", "Evaluation_set.csv", "TestSplit.csv"),
    ],
)
def test_names_of_splits(tmp_path, names):
    for name in (*names, "contest.csv", "latest.csv"):  # in these "test" is no word
        (tmp_path / name).write_text(f"text,label\n{name},1\n")
    source = sources.find(str(tmp_path))
    found = {split: source.read(split).columns["text"] for split in source.splits}
    assert found == {split: [name] for split, name in zip(("train", "validation", "test"), names, strict=True)}


def test_splits_of_several_folders_are_joined(folder, tmp_path_factory):
    """What is held out of each stays held out of all."""
    other = tmp_path_factory.mktemp("other")
    for name in ("train.tsv", "validation.tsv"):
        (other / name).write_text("0\tx\n1\ty\n")
    (folder / "more.tsv").write_text("1\tz\n")
    source = sources.find([str(folder), str(folder / "more.tsv")])
    assert [len(source.read(name)) for name in ("train", "dev", "test")] == [6, 3, 2]
    assert len(sources.find([str(other), str(other)]).read("dev")) == 4
    paths = sources.find_paths([str(other), str(folder / "more.tsv")], None, "train")
    assert [path.name for path in paths] == ["train.tsv", "more.tsv"]


def test_hidden_folders_are_no_data(tmp_path):
    for name in ("train.csv", ".ipynb_checkpoints/train-checkpoint.csv", "a/.cache/b/dev.csv", "__MACOSX/train.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text,label\na,1\n")
    source = sources.find(str(tmp_path))
    assert source.splits == ("train",) and len(source.read("train")) == 1
    assert len(sources.find(str(tmp_path / ".ipynb_checkpoints")).read("train")) == 1  # named, it is meant


def test_nothing_there(folder, tmp_path):
    with pytest.raises(ValueError, match=r"trian_all.tsv: no such file or directory. Did you mean '.*train_all.tsv'"):
        sources.find(str(folder / "trian_all.tsv"))
    with pytest.raises(ValueError, match="no file matches this pattern"):
        sources.find(str(folder / "*.jsonl"))
    with pytest.raises(ValueError, match=r"no such file or directory \(.*nowhere does not exist\)"):
        sources.find(str(folder / "nowhere" / "a.tsv"))
    with pytest.raises(ValueError, match="^~nobody-of-this-name.csv: no such file or directory"):
        sources.find("~nobody-of-this-name.csv")
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="the directory has no .json"):
        sources.find(str(folder / "empty"))
    with pytest.raises(ValueError, match="data_config 'x' is for Hub data sets"):
        sources.find(str(folder), "x")


def test_a_pipe_is_no_data(tmp_path):
    """What a shell makes of `<(...)`: it can be read only once."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: got a pipe or a device, expected a file or a directory; write"):
        sources.find(str(tmp_path / "pipe"))


def test_hold_out_is_a_fixed_partition(folder):
    table = sources.find(str(folder)).read("train")
    train, held = sources.hold_out(table, 0.4, seed=3)
    assert len(train) == 3 and len(held) == 2
    assert sorted(train.columns["1"] + held.columns["1"]) == sorted(table.columns["1"])
    assert sources.hold_out(table, 0.4, seed=3)[1].columns == held.columns
    assert {tuple(sources.hold_out(table, 0.4, seed=s)[1].columns["1"]) for s in range(6)} != {tuple(held.columns["1"])}
    with pytest.raises(ValueError, match="eval_fraction: got 0.01, which is 0 of 5 rows"):
        sources.hold_out(table, 0.01, seed=0)


def test_hold_out_keeps_groups_together(folder):
    table = read_file(folder / "unlabeled.tsv")
    groups = np.array([0, 1, 0, 2, 1, 3, 2])
    texts = table.columns["1"]
    for seed in range(5):
        train, held = sources.hold_out(table, 0.5, seed, groups)
        sides = [{int(groups[texts.index(text)]) for text in part.columns["1"]} for part in (train, held)]
        assert len(sides[0]) == len(sides[1]) == 2 and not sides[0] & sides[1]
        assert len(train) + len(held) == 7
    with pytest.raises(ValueError, match="eval_fraction: got 0.1, which is 0 of 4 groups, expected some groups on eac"):
        sources.hold_out(table, 0.1, 0, groups)


class ClassLabel:
    names = ["no", "yes"]


def fake_hub(monkeypatch, fail: Exception | None = None):
    """The part of the `datasets` library that is used, serving one data set."""
    module = types.ModuleType("datasets")
    module.ClassLabel = ClassLabel
    module.config = types.SimpleNamespace(HF_HUB_OFFLINE=True)

    def split_names(name, config):
        if fail is not None:
            raise fail
        return ["train", "validation_matched"]

    class Rows:
        features = {"text": object(), "label": ClassLabel(), "tags": types.SimpleNamespace(feature=ClassLabel())}
        _fingerprint = "abc"

        def __init__(self, split):
            self.data = {"text": [split, "b"], "label": [1, 0], "tags": [[0], [1]]}

        def __len__(self):
            return 2

        def to_dict(self):
            return self.data

    module.get_dataset_split_names = split_names
    module.load_dataset = lambda name, config, split: Rows(f"{name} {config} {split}")
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_name(monkeypatch):
    fake_hub(monkeypatch)
    source = sources.find("owner/set", "sub")
    table = source.read("train[:10]")  # slices are the library's
    assert table.columns["text"][0] == "owner/set sub train[:10]"
    assert table.classes == {"label": ["no", "yes"], "tags": ["no", "yes"]}
    assert table.where(1) == "owner/set/sub:train[:10], row 2"
    with pytest.raises(ValueError, match="owner/set has no split 'validation'; its splits: train, validation_matched"):
        source.read("validation")


@pytest.mark.parametrize(
    "rows", ["[:3]", "[2:]", "[1:3]", "[:]", "[-2:]", "[:-4]", "[-9:9]", "[:50%]", "[50%:]", "[10%:30%]", "[-30%:100%]"]
)
def test_rows_of_a_split_of_files(folder, rows):
    """They are those that the Hub's library takes of its own data sets."""
    datasets = pytest.importorskip("datasets")
    source = sources.find(str(folder))
    [theirs] = datasets.ReadInstruction.from_spec(f"train{rows}").to_absolute({"train": 5})
    table = source.read(f"train{rows}")
    assert table.columns["1"][:] == [f"train_all.tsv {i}" for i in range(theirs.from_, theirs.to)]
    assert table.where(0).endswith(f"train_all.tsv, line {theirs.from_ + 1}")


def test_rows_of_a_split_under_its_other_names_of_several_files_and_errors(folder, tmp_path_factory, monkeypatch):
    source = sources.find(str(folder))
    table = source.read("dev[1:]")
    assert table.columns == source.read("validation[1:]").columns and len(table) == 2
    # What a run keeps of its data tells these rows from as many others of the same file.
    assert table.fingerprint()["split"] == "validation[1:]" != source.read("dev[:2]").fingerprint()["split"]
    assert "split" not in source.read("dev").fingerprint()
    other = tmp_path_factory.mktemp("other")
    (other / "train.tsv").write_text("1\tlast one\n")
    both = sources.find([str(folder), str(other)]).read("train[4:]")
    assert both.columns["1"] == ["train_all.tsv 4", "last one"] and both.where(1).endswith("train.tsv, line 1")
    for wrong in ("train[3]", "train[:x]", "train[1:50%]", "train[:1]+test", "train[", "train[:2", "train[:1:2]"):
        says = r"got the rows 'train\[.*', expected, for example, train\[:1000\] or train\["
        with pytest.raises(ValueError, match=says):
            source.read(wrong)
    with pytest.raises(ValueError, match=r"'train\[5:\]' selects no rows; train has 5"):
        source.read("train[5:]")
    with pytest.raises(ValueError, match=r"has no split 'tset\[:3\]'; its splits: "):
        source.read("tset[:3]")
    with pytest.raises(ValueError, match=r"got 'train\[:3\]', but streams, and documents .* need a whole split"):
        sources.find_paths(str(folder), None, "train[:3]")
    fake_hub(monkeypatch)
    assert sources.find("owner/set", "sub").read("training[:1]").columns["text"][0] == "owner/set sub train[:1]"


def test_a_split_that_cannot_be_read_is_one_error(monkeypatch):
    """The library's own errors, such as DatasetGenerationError, are of no common kind; what is wrong is their cause."""

    def load(name, config, split):
        raise Exception("An error occurred while generating the dataset") from OSError("No space left on device")

    fake_hub(monkeypatch)
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load)
    with pytest.raises(ValueError, match="owner/set: the split 'train' of .* cannot be read: No space left on device"):
        sources.find("owner/set").read("train")


def test_hub_name_that_is_none(monkeypatch, tmp_path):
    fake_hub(monkeypatch, FileNotFoundError("'nosuch' doesn't exist"))
    (tmp_path / "reviews").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"reveiws: neither .* 'nosuch' doesn't exist\. Did you mean 'reviews'\?"):
        sources.find("reveiws")
    with pytest.raises(
        ValueError, match="nosuch: neither a local file or directory nor an accessible data set of the Hub: 'nosuch'"
    ):
        sources.find("nosuch")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        sources.find("owner/set")


def test_a_folder_of_save_to_disk(tmp_path):
    """Of one split or of several; the files that describe it are no rows."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"text": ["a", "b"], "label": [1, 0]}
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    one = datasets.Dataset.from_dict(rows, features)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, validation=one.select([1])).save_to_disk(str(tmp_path / "two"))
    table = sources.find(str(tmp_path / "one")).read("train")
    assert (table.columns, table.classes) == (rows, {"label": ["no", "yes"]})
    assert table.where(1) == f"{tmp_path / 'one'}, row 2"
    source = sources.find([str(tmp_path / "two")])
    assert source.splits == ("train", "validation") and source.read("dev").columns["text"] == ["b"]
    datasets.Dataset.from_dict({"text": [0.5, float("nan")]}).save_to_disk(str(tmp_path / "nan"))
    assert sources.find(str(tmp_path / "nan")).read("train").columns == {"text": [0.5, None]}  # NaN is no value
    assert sources.find(str(tmp_path / "one")).read("train[1:]").columns == {"text": ["b"], "label": [0]}
    with pytest.raises(ValueError, match="one: a folder of `save_to_disk` cannot be combined with other paths"):
        sources.find([str(tmp_path / "one"), str(tmp_path / "two")])
    with pytest.raises(ValueError, match="one: a folder of `save_to_disk`.* `to_parquet`"):
        sources.find_paths(str(tmp_path / "one"), None, "train")
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match="one: cannot read this folder of `save_to_disk`: "):
        sources.find(str(tmp_path / "one"))


def test_rows_of_a_part(folder):
    table = sources.find(str(folder)).read("train").take(np.array([4, 1]))
    assert table.columns["0"] == ["0", "1"] and table.where(0).endswith("line 5")


def test_compressed_files_are_found_and_belong_to_splits(tmp_path):
    for name in ("train.jsonl.gz", "dev.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "x"}\n{"text": "y"}\n'))
    source = sources.find(str(tmp_path))
    assert set(source.splits) == {"train", "validation"} and source.read("dev").columns == {"text": ["x", "y"]}
    assert sources.find_paths(str(tmp_path), None, "dev") == [tmp_path / "dev.jsonl.gz"]
    assert sources.find_paths("owner/set", None, "train") is None
    with pytest.raises(ValueError, match="has no split 'test'; its splits: "):
        sources.find_paths(str(tmp_path), None, "test")


def test_a_file_beside_a_folder_with_splits_is_not_left_out_where_one_split_is_chosen(tmp_path):
    (tmp_path / "data").mkdir()
    for path in (tmp_path / "extra.csv", tmp_path / "data" / "train.csv", tmp_path / "data" / "test.csv"):
        path.write_text("text,label\na,b\n")
    source = sources.find([str(tmp_path / "extra.csv"), str(tmp_path / "data")])
    assert len(source.read("train")) == 2
    for choose in (evaluation_split, lambda found: inference_split(found, None, True)):
        with pytest.raises(ValueError, match="extra.csv belongs to no split, .* the splits train, test"):
            choose(source)
    assert inference_split(source, "test", True) == "test"
    assert evaluation_split(sources.find(str(tmp_path / "data"))) == "test"

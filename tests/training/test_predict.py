"""predict and evaluate on a finished run, against transformers and on two ranks."""

import csv
import datetime
import json
import os
import shutil
import uuid
from unittest.mock import Mock

import chat_toys
import pytest
import torch
from safetensors.torch import load_file, save_file
from toydata import command, flags, make_rows, make_tokenizer, read_jsonl, write_folder, write_jsonl
from toyruns import read_summary

from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.readers import read_file
from modelcenter.training.config import ClassificationConfig
from modelcenter.training.inference.output_file import check_output, write_lines, write_rows
from modelcenter.training.output.json_text import finite
from modelcenter.training.tasks.classification import Classification
from modelcenter.training.trained import TrainedModel, class_names
from scripts.finetune_classification import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a few steps, at folder/run."""
    folder = write_folder(tmp_path_factory.mktemp("predict"), train=24)
    main(command(flags(folder, max_steps=3)))
    return folder


def chances(folder, texts: list[str], pairs: list[str] | None = None):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = str(folder / "run" / "model")
    batch = AutoTokenizer.from_pretrained(path)(texts, pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        return AutoModelForSequenceClassification.from_pretrained(path).eval()(**batch).logits.softmax(-1)


@pytest.mark.parametrize("model", ["gpt2", "gpt2 with types", "llama", "distilbert"])
def test_two_texts_of_a_model_without_token_types(tmp_path, model, monkeypatch):
    """It is given none: neither those of GPT-2's own tokenizer, which does not name them, nor those of one that does,
    as BERT's, with which some DistilBERTs come, or of a tokenizer.json alone."""
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    make = {"llama": chat_toys.make_tokenizer, "distilbert": make_tokenizer}.get(model, chat_toys.make_gpt2_tokenizer)
    made = make()
    if model == "gpt2 with types":  # as that of Chinese GPT-2s, whose rows 0 and 1 GPT-2 would add
        made.model_input_names = made.init_kwargs["model_input_names"] = ["input_ids", "token_type_ids"]
    model = model.partition(" ")[0]
    made.save_pretrained(tmp_path / "tokenizer")
    texts = [("Aromi serves", "Indian food"), ("Zizzi", "Italian food by the river"), ("Cocum food", "French")] * 2
    rows = [{"premise": a, "hypothesis": b, "label": i % 2} for i, (a, b) in enumerate(texts)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    if model == "llama":
        sizes["num_kv_heads"] = 2
    main(command(flags(tmp_path, model=f"tiny/{model}", train_data=str(data), max_steps=1, model_config=sizes)))
    cli(["predict", str(tmp_path / "run"), str(data), "--output", str(tmp_path / "out.jsonl")])
    found = [list(row["probabilities"].values()) for row in read_jsonl(tmp_path / "out.jsonl")]
    expected = chances(tmp_path, *map(list, zip(*texts, strict=True))).tolist()
    assert len({values[0] for values in found}) == 3
    for values, others in zip(found, expected, strict=True):
        assert values == pytest.approx(others, abs=2e-6)


def test_a_line_per_row_in_order(folder, tmp_path, capsys):
    rows = make_rows(21, seed=4)
    data = write_jsonl(tmp_path / "new.jsonl", [{"id": i, "text": row["text"]} for i, row in enumerate(rows)])
    cli(["predict", str(folder / "run"), str(data), "--output", str(tmp_path / "out.jsonl"), "--batch_size", "4"])
    assert capsys.readouterr().err.splitlines()[-1] == f"{tmp_path / 'out.jsonl'}: 21 rows"
    found, expected = read_jsonl(tmp_path / "out.jsonl"), chances(folder, [row["text"] for row in rows])
    assert [list(row) for row in found] == [["label", "score", "probabilities"]] * 21
    saved = json.loads((folder / "run" / "model" / "tokenizer_config.json").read_text())
    assert saved["model_max_length"] == 32  # the positions of the model: transformers cuts there
    for row, values in zip(found, expected.tolist(), strict=True):
        assert list(row["probabilities"].values()) == pytest.approx(values, abs=2e-6)
        assert list(row["probabilities"]) == ["bad", "good"]
        assert row["label"] == ["bad", "good"][values[1] > values[0]] and row["score"] == max(
            row["probabilities"].values()
        )
    on_ranks(lambda: cli(["predict", str(folder / "run"), str(data), "--output", str(tmp_path / "two.jsonl")]), 2)
    for row, other in zip(found, read_jsonl(tmp_path / "two.jsonl"), strict=True):
        assert other["probabilities"] == pytest.approx(row["probabilities"], abs=2e-6)


def test_texts_that_are_cut_are_told_of(folder, tmp_path, caplog):
    data = write_jsonl(tmp_path / "new.jsonl", rows := make_rows(9))
    cut = sum(len(row["text"].split()) > 4 for row in rows)
    for verb in ("predict", "evaluate"):
        caplog.clear()
        cli([verb, str(folder / "run"), str(data), "--output", str(tmp_path / "out.jsonl"), "--max_length", "6"])
        assert cut and [r.getMessage() for r in caplog.records] == [f"{data}: {cut} texts truncated at max_length 6"]
    caplog.clear()
    cli(["predict", str(folder / "run"), str(data), "--output", str(tmp_path / "out.jsonl")])
    assert not caplog.records


def test_texts_of_another_form_and_the_terminal(folder, tmp_path, capsys):
    (tmp_path / "new.txt").write_text("a fine film\nboring\n")
    cli(["predict", str(folder / "run" / "model"), str(tmp_path / "new.txt")])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = chances(folder, ["a fine film", "boring"])
    assert [line["probabilities"]["good"] for line in lines] == pytest.approx(expected[:, 1].tolist(), abs=2e-6)


def test_evaluate_is_the_runs_own_evaluation_on_any_number_of_ranks(folder, capsys):
    last = read_summary(folder)["last"]
    expected = {name.removeprefix("eval_"): v for name, v in last.items() if name.startswith("eval_")}
    del expected["seconds"]
    words = ["evaluate", str(folder / "run"), str(folder / "data"), "--json", "--output", str(folder / "scores.json")]
    cli(words)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((folder / "scores.json").read_text())
    assert found.pop("rows") == 11 and found == pytest.approx(expected, abs=1e-6)
    on_ranks(lambda: cli([*words, "--batch_size", "2"]), 2)
    two = json.loads((folder / "scores.json").read_text())
    assert two.pop("rows") == 11 and two == pytest.approx(expected, abs=1e-6)
    cli(words[:3])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rows", "11"] and [line.split()[0] for line in lines[1:]] == list(found)
    assert len({len(line) - len(line.split()[1]) for line in lines}) == 1  # all values begin in one column


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_other_kinds(folder, tmp_path, kind, capsys):
    rows = make_rows(16)
    for row in rows:
        row["label"] = [row["label"]] if kind.startswith("multi") else 0.25 + len(row["text"]) / 10
    data = write_jsonl(tmp_path / "x.jsonl", rows)
    main(
        command(flags(folder, train_data=str(data), eval_data=str(data), max_steps=2, output_dir=str(tmp_path / "run")))
    )
    last = read_summary(tmp_path)["last"]
    capsys.readouterr()
    cli(["evaluate", str(tmp_path / "run"), str(data), "--json"])
    found = json.loads(capsys.readouterr().out)
    main_metric = "mse" if kind == "regression" else "f1"
    assert found[main_metric] == pytest.approx(last[f"eval_{main_metric}"], abs=1e-6)
    cli(["predict", str(tmp_path / "run"), str(data)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    if kind == "regression":
        squares = [(line["score"] - row["label"]) ** 2 for line, row in zip(lines, rows, strict=True)]
        assert sum(squares) / 16 == pytest.approx(found["mse"], rel=1e-4)
        config = tmp_path / "run" / "model" / "config.json"  # of one score it need not say so, as Hugging Face's
        config.write_text(json.dumps({**json.loads(config.read_text()), "problem_type": None}))
        cli(["predict", str(tmp_path / "run"), str(data)])
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    else:
        assert all(line["labels"] == [n for n, p in line["probabilities"].items() if p > 0.5] for line in lines)


def test_a_run_without_a_model_says_how_it_goes_on(folder, tmp_path):
    data = str(folder / "data")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("lr: 1\n")
    with pytest.raises(ValueError, match="unfinished is a run without a model.* continues it$"):
        cli(["predict", str(tmp_path / "unfinished"), data])
    (tmp_path / "unfinished" / "checkpoints" / "last").mkdir(parents=True)
    with pytest.raises(ValueError, match="continues it; its newest checkpoint is .*unfinished/checkpoints/last"):
        cli(["predict", str(tmp_path / "unfinished"), data])


def test_a_place_that_cannot_hold_the_predictions_is_named(folder, tmp_path):
    data, run = str(folder / "data"), str(folder / "run")
    with pytest.raises(OSError, match="output: cannot write .*no/such/out: No such file"):
        cli(["predict", run, data, "--output", str(tmp_path / "no/such/out")])
    for place in (str(tmp_path), "."):
        with pytest.raises(OSError, match=r"output: .* is a directory; give the name of a file, such as .*out\.jsonl$"):
            cli(["evaluate", run, data, "--output", place])


def test_rows_that_do_not_fit_the_run_are_named(folder, tmp_path):
    data, run = str(folder / "data"), str(folder / "run")
    with pytest.raises(ValueError, match="no column 'body', it has 'text', 'label'"):
        cli(["predict", run, data, "--text_column", "body"])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "x", "label": "good"}, {"text": "y", "label": "so-so"}])
    with pytest.raises(
        ValueError,
        match=r"line 2: label 'so-so' is not one of the labels of the .*'good'\); read from column 'label'",
    ):
        cli(["evaluate", run, str(bad)])
    none = write_jsonl(tmp_path / "none.jsonl", [{"text": "x y"}, {"text": "y z"}])
    with pytest.raises(ValueError, match="no column is called a label"):
        cli(["evaluate", run, str(none)])


PREDICTIONS = [
    {"id": 1, "text": 'a, "b"\r\nc\td', "labels": ["x", "y"], "chances": {"x": 0.25, "y": None}, "spans": [{"at": 3}]},
    {"id": "2", "text": "", "labels": [], "chances": {"x": 1e-7, "y": float("nan")}, "right": True, "spans": []},
]
FLAT = {
    "id": ["1", "2"],
    "text": ['a, "b"\r\nc\td', ""],
    "labels": ['["x", "y"]', "[]"],
    "chances.x": ["0.25", "1e-07"],
    "chances.y": ["", ""],
    "spans": ['[{"at": 3}]', "[]"],
    "right": ["", "true"],
}


@pytest.mark.parametrize(
    "text, says",
    [
        ("- a", "holds a list, expected lines such as"),
        ("task: [a]", r"unknown task \['a'\]"),
        ("a: \0", "is not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("{" * 5000, "is nested too deeply"),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_config_of_a_run(tmp_path, text, says):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"config.yaml.*{says}"):
        TrainedModel.find(str(tmp_path))


@pytest.mark.parametrize("ending", ["jsonl", "NDJSON", "json", "csv", "tsv", "parquet", "txt", ""])
def test_the_ending_of_a_file_names_its_format(tmp_path, ending):
    """What is written is what this project's readers, csv's and pyarrow's make of it."""
    path = tmp_path / f"out{'.' if ending else ''}{ending}"
    check_output(str(path))
    assert write_rows(str(path), iter(PREDICTIONS)) == 2 and os.listdir(tmp_path) == [path.name]
    nested = [finite(row) for row in PREDICTIONS]
    if ending in ("csv", "tsv"):
        with path.open(newline="", encoding="utf-8") as file:
            names, *rows = csv.reader(file, delimiter="," if ending == "csv" else "\t")
        assert dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) == FLAT
        assert read_file(path).columns == FLAT
    elif ending == "json":
        assert json.loads(path.read_text()) == nested
    elif ending == "parquet":
        columns = read_file(path).columns
        assert columns.pop("id") == ["1", '"2"']  # of several types: JSON
        assert columns == {name: [row.get(name) for row in nested] for name in columns} and len(columns) == 5
    else:
        assert read_jsonl(path) == nested


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_values_that_json_has_no_type_for(tmp_path, ending):
    """Rows of parquet files have dates, and `mine` writes rows as they were; it does so when all is found."""
    day, time, number = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4), uuid.UUID(int=7)
    row = {"day": day, "all": [time, None], "number": number, "in": {"day": day}, "raw": b"\xff"}
    path = tmp_path / f"out.{ending}"
    write_rows(str(path), [row])
    found = {name: values[0] for name, values in read_file(path).columns.items()}
    if ending == "parquet":  # which has types for them
        assert found | {"number": number} == row
        return
    as_texts = {"day": str(day), "all": [str(time), None], "number": str(number), "in": {"day": str(day)}}
    as_texts["raw"] = r"b'\xff'"
    if ending == "csv":
        inner = as_texts.pop("in")
        as_texts |= {"all": json.dumps(as_texts["all"]), "in.day": inner["day"]}
    assert found == as_texts


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no file that is always full")
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_a_full_disk_is_said_with_the_file(tmp_path, name):
    (tmp_path / f".{name}.writing").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '.*/{name}'"):
        write_rows(str(tmp_path / name), PREDICTIONS)
    assert not list(tmp_path.iterdir())


def test_files_of_no_rows_and_of_unknown_formats(tmp_path, folder):
    write_rows(str(tmp_path / "none.json"), [])
    assert json.loads((tmp_path / "none.json").read_text()) == []
    for name in ("none.csv", "none.tsv"):
        write_rows(str(tmp_path / name), iter([]))
        assert (tmp_path / name).read_bytes() == b""
        (tmp_path / name).unlink()
    for name in ("preds.out", "run.v2", "results.2024-01-05"):
        check_output(str(tmp_path / name))
        check_output(str(tmp_path / name), (".json", ".jsonl", ".ndjson"))
        write_rows(str(tmp_path / name), PREDICTIONS)
        assert read_jsonl(tmp_path / name) == [finite(row) for row in PREDICTIONS]
        (tmp_path / name).unlink()
    for name in ("out.jsonl.gz", "out.xlsx", "out.pq"):
        with pytest.raises(
            ValueError, match=rf"output: .*{name} has the extension \.\w+, expected \.jsonl, .*\.parquet, which gives"
        ):
            cli(["predict", str(folder / "run"), str(folder / "data"), "--output", str(tmp_path / name)])
    with pytest.raises(ValueError, match=r"scores.csv has the extension .csv, expected .json, .jsonl, .ndjson, which"):
        cli(["evaluate", str(folder / "run"), str(folder / "data"), "--output", str(tmp_path / "scores.csv")])
    assert os.listdir(tmp_path) == ["none.json"]


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ([{}, {"a": 1}, None], {"p.a": ["", "1", ""]}),
        ([{"a": 1}, {"a": [2]}, {"b": None}], {"p": ['{"a": 1}', '{"a": [2]}', '{"b": null}']}),
        ([{"a": 1}, "b", 2], {"p": ['{"a": 1}', "b", "2"]}),
        ([{}, None, {}], {"p": ["{}", "", "{}"]}),
    ],
)
def test_a_field_is_one_column_or_several_in_all_rows(tmp_path, values, columns):
    write_rows(str(tmp_path / "out.csv"), [{"id": i, "p": value} for i, value in enumerate(values)])
    assert read_file(tmp_path / "out.csv").columns == {"id": ["0", "1", "2"], **columns}


def test_predictions_in_a_table(folder, tmp_path):
    data = write_jsonl(tmp_path / "new.jsonl", [{"text": row["text"]} for row in make_rows(5, seed=4)])
    for name in ("out.jsonl", "out.csv"):
        cli(["predict", str(folder / "run"), str(data), "--output", str(tmp_path / name)])
    lines, table = read_jsonl(tmp_path / "out.jsonl"), read_file(tmp_path / "out.csv").columns
    assert list(table) == ["label", "score", "probabilities.bad", "probabilities.good"]
    assert table["label"] == [row["label"] for row in lines]
    assert table["probabilities.bad"] == [str(row["probabilities"]["bad"]) for row in lines]


def test_half_a_result_is_not_left_behind(tmp_path):
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(ZeroDivisionError):
        write_lines(str(tmp_path / "out.jsonl"), (str(1 // n) for n in (1, 0)))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "old"


def test_a_pipe_stays_one_and_a_link_leads_where_it_did(tmp_path):
    """A device such as /dev/null is no file that another could take the place of, either."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_output(str(pipe))
    assert write_lines(str(pipe), ["a", "b"]) == 2
    assert os.read(reader, 100) == b"a\nb\n"
    os.close(reader)
    assert pipe.is_fifo()
    (tmp_path / "out.jsonl").write_text("old")
    link.symlink_to("out.jsonl")
    check_output(str(link))
    write_lines(str(link), ["new"])
    assert link.is_symlink() and (tmp_path / "out.jsonl").read_text() == "new\n"


def test_what_is_no_number_is_null(folder, tmp_path, capsys):
    """JSON has no NaN; other programs cannot read it."""
    shutil.copytree(folder / "run" / "model", tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    save_file({name: torch.full_like(value, torch.nan) for name, value in load_file(file).items()}, file)
    out = tmp_path / "out.json"
    cli(["evaluate", str(tmp_path / "broken"), str(folder / "data"), "--json", "--output", str(out)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)["loss"] is None
    assert json.loads(out.read_text(), parse_constant=pytest.fail)["loss"] is None
    cli(["predict", str(tmp_path / "broken"), str(folder / "data"), "--output", str(out)])
    said = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert said[0]["probabilities"] == {"bad": None, "good": None}
    assert finite({"a": [1.0, float("inf"), {"b": (float("nan"),)}]}) == {"a": [1.0, None, {"b": [None]}]}


def test_a_run_is_a_model_to_start_from(folder, tmp_path):
    """Its weights are, and the first loss is that of the trained model."""
    again = flags(folder, model=str(folder / "run"), output_dir=str(tmp_path / "again"), max_steps=1, batch_size=24)
    again["tokenizer"] = again["model"]
    del again["from_scratch"], again["model_config"]
    main(command(again))
    first, *_ = read_jsonl(tmp_path / "again" / "metrics.jsonl")
    rows = make_rows(24, seed=1)
    right = [["bad", "good"].index(row["label"]) for row in rows]
    given = chances(folder, [row["text"] for row in rows])[range(24), right]
    assert first["loss"] == pytest.approx(-given.log().mean().item(), abs=1e-5)
    said = (tmp_path / "again" / "config.yaml").read_text()
    assert said.count(f"{folder}/run/model\n") == 2
    file = {"model": str(folder / "run" / "model" / "model.safetensors"), "output_dir": str(tmp_path / "file")}
    main(command(again | file))
    assert read_jsonl(tmp_path / "file" / "metrics.jsonl")[0]["loss"] == first["loss"]
    with pytest.raises(SystemExit) as ended:
        cli(["compare", str(folder / "run"), str(folder / "run" / "model")])
    assert ended.value.code == 0
    # A head that numbers the same classes otherwise keeps their meaning, in other capitals too.
    other = turned(folder, tmp_path)
    labels = {"good": "bad", "bad": "good"}  # what its classes are called, by what they mean
    data = write_jsonl(tmp_path / "turned.jsonl", [row | {"label": labels[row["label"]]} for row in rows])
    changes = {"model": str(other), "output_dir": str(tmp_path / "turned-run")}
    main(command(again | changes | {"train_data": str(data), "eval_data": str(data)}))
    assert read_jsonl(tmp_path / "turned-run" / "metrics.jsonl")[0]["loss"] == pytest.approx(first["loss"], abs=1e-6)
    saved = json.loads((tmp_path / "turned-run" / "model" / "config.json").read_text())
    assert saved["id2label"] == {"0": "good", "1": "bad"}


def test_several_labels_keep_their_meaning(tmp_path):
    rows = [{"text": "a", "label": labels} for labels in (["x", "z"], ["y"], [])]
    data = str(write_jsonl(tmp_path / "a.jsonl", rows))
    task = Classification.from_flags(ClassificationConfig(train_data=[data], eval_data=[data]))
    task.adopt_label_order(["Z", "x", "y"])
    assert task.labels.names == ("z", "x", "y")
    assert task.targets.tolist() == task.eval_targets.tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_several_scores_keep_their_meaning(tmp_path):
    data = str(
        write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": scores} for scores in ([0.5, 1.0], [2.5, 3.0])])
    )
    task = Classification.from_flags(ClassificationConfig(train_data=[data]))
    task.adopt_label_order(["score_1", "score_0"])
    assert task.labels.problem_type == "regression" and task.labels.names == ("score_1", "score_0")
    assert task.targets.tolist() == [[1.0, 0.5], [3.0, 2.5]]


def test_names_that_only_label2id_has_decide_the_order_too():
    """Else a run that starts from such a checkpoint would give its rows of the head to other classes."""
    assert class_names({"label2id": {"x": 1, "y": 0}, "num_labels": 2}) == ["y", "x"]
    assert class_names({"label2id": {"x": 1, "y": 0}, "id2label": {"1": "b", "0": "a"}}) == ["a", "b"]
    assert class_names({"label2id": {"x": 1, "y": 0}, "num_labels": 3}) == class_names({}) == []


def turned(folder, tmp_path):
    """The model of the run, whose first class is called Good and whose second Bad."""
    other = tmp_path / "other"
    shutil.copytree(folder / "run" / "model", other)
    config = json.loads((other / "config.json").read_text())
    config |= {"id2label": {"0": "Good", "1": "Bad"}, "label2id": {"Good": 0, "Bad": 1}}
    (other / "config.json").write_text(json.dumps(config))
    return other


@pytest.mark.parametrize("names", [["Good", "Bad"], ["bad", "good"]])
def test_numbers_of_a_source_mean_what_it_calls_them(folder, tmp_path, names, capsys):
    """Not what the model calls the class of that number."""
    import pyarrow
    import pyarrow.parquet

    rows = make_rows(24, seed=1)
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    columns = {
        "text": [row["text"] for row in rows],
        "label": [[n.lower() for n in names].index(r["label"]) for r in rows],
    }
    about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    table = pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(about)})
    pyarrow.parquet.write_table(table, str(tmp_path / "a.parquet"))
    scores = []
    for data in (plain, tmp_path / "a.parquet"):
        cli(["evaluate", str(folder / "run"), str(data), "--json"])
        scores.append(json.loads(capsys.readouterr().out))
    assert scores[0] == scores[1] and scores[0]["accuracy"] != 0.5
    given = ClassificationConfig(train_data=[str(plain)], eval_data=[str(tmp_path / "a.parquet")])
    task = Classification.from_flags(given)
    assert task.eval_targets.tolist() == task.targets.tolist()


@pytest.mark.parametrize(
    ("verb", "row", "says"),
    [
        (
            "finetune seq2seq",
            {"source": "a", "target": "b"},
            "finetune seq2seq needs .*mt5, .*t5gemma, umt5. bert is for finetune c",
        ),
        ("pretrain span-corruption", {"text": "a"}, r"span-corruption needs .*t5gemma, umt5\. .*; pretrain mlm, lm$"),
    ],
)
def test_a_model_of_another_family_is_refused(folder, tmp_path, verb, row, says):
    """Before its tokenizer is looked at, whatever the model was trained for."""
    data, out = write_jsonl(tmp_path / "data.jsonl", [row]), str(tmp_path / "out")
    with pytest.raises(ValueError, match="^model: .*run/model is of the family bert, but .*" + says):
        cli([*verb.split(), "--model", str(folder / "run"), "--train_data", str(data), "--output_dir", out])


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_transformers_reads_batches_of_a_decoder_without_padding(folder, tmp_path, kind, capsys):
    """Neither its tokenizer nor its configuration names a token for it, as those of GPT-2 and Llama."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = chat_toys.make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "bytes")
    run = {"model": f"tiny/{kind}", "tokenizer": str(tmp_path / "bytes"), "output_dir": str(tmp_path / "run")}
    base = {name: value for name, value in flags(folder, max_steps=2, **run).items() if name != "model_config"}
    main(command(base))
    texts = ["fine", "a very dull and boring story with the plot"]
    data = write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    capsys.readouterr()
    cli(["predict", run["output_dir"], str(data)])
    said = [json.loads(line)["probabilities"]["bad"] for line in capsys.readouterr().out.splitlines()]
    path = str(tmp_path / "run" / "model")
    batch = AutoTokenizer.from_pretrained(path)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = AutoModelForSequenceClassification.from_pretrained(path).eval()(**batch).logits.softmax(-1)
    assert said == pytest.approx(theirs[:, 0].tolist(), abs=1e-5)
    write_jsonl(data, [{"text": "a", "label": "good"}, {"text": "", "label": "bad"}] * 2)
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: '' has no token, and this tokenizer adds no"):
        main(command(base | {"train_data": str(data), "output_dir": str(tmp_path / "none")}))


@pytest.mark.parametrize(("tokens", "padding"), [([5], "</s>"), ([5, 2], None), ([], "</s>")])
def test_a_token_that_ends_every_text_is_no_padding(tokens, padding):
    """transformers would read the token before it; and a tokenizer may know no Latin letter."""
    tokenizer = Mock(return_value={"input_ids": tokens}, pad_token=None, eos_token="</s>", eos_token_id=2)
    Classification.on_train_begin(Mock(), Mock(), tokenizer)
    assert tokenizer.pad_token == padding


def test_a_model_without_a_trained_head_is_refused(folder, tmp_path):
    import modelcenter

    model = modelcenter.from_config("tiny/bert", "base")
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match="a model for base, expected one that was trained for .*sequence-classification"
    ):
        cli(["predict", str(tmp_path / "base"), str(folder / "data"), "--tokenizer", str(folder / "tokenizer")])

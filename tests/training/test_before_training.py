"""What a run says before it trains: flags and rows that it cannot begin with, and all of a dry run."""

import pytest
from toydata import command, flags, make_rows, write_folder, write_jsonl
from toyruns import train_classifier

from scripts.finetune_classification import main


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, train=27)


def test_dry_run_writes_nothing(folder, capsys):
    before = {p for p in folder.rglob("*")}
    values = flags(folder, dry_run=True, global_batch_size=16)
    del values["output_dir"]
    main(command(values))
    shown = capsys.readouterr().out
    for text in (
        "27 rows",
        "11 rows",
        "bad, good",
        "text 'text', label 'label' with 2 classes",
        "2 per epoch",
        "One step: loss 0.6",
        "[CLS] ",
        "line ",
        "Nothing was written",
    ):
        assert text in shown, text
    assert {p for p in folder.rglob("*")} == before


def test_a_run_without_rows_to_evaluate_on(folder):
    """Flags that say so are no mistake, nor are those of a file."""
    (folder / "flags.yaml").write_text("eval_every: 2\neval_batch_size: 3")
    rows = train_classifier(
        folder, config=str(folder / "flags.yaml"), train_data=str(folder / "data" / "train.jsonl"), max_steps=1
    )
    assert [row["step"] for row in rows] == [1]


def test_needed_flags(folder):
    for name in ("model", "train_data", "output_dir"):
        values = flags(folder)
        del values[name]
        with pytest.raises(ValueError, match=f"--{name} is needed"):
            main(command(values))
    values = flags(folder)
    del values["tokenizer"]
    with pytest.raises(ValueError, match="--tokenizer is needed: with --from_scratch"):
        main(command(values))


def test_rows_without_text_and_unseen_labels(folder):
    rows = make_rows(12)
    write_jsonl(folder / "a.jsonl", [*rows, {"text": None, "label": "good"}])
    with pytest.raises(ValueError, match="a.jsonl, line 13: the row has no text in column 'text'"):
        train_classifier(folder, train_data=str(folder / "a.jsonl"))
    write_jsonl(folder / "b.jsonl", [*rows, {"text": "x", "label": "so-so"}])
    with pytest.raises(
        ValueError, match="b.jsonl, line 13: label 'so-so' is not one of the labels of the training data"
    ):
        train_classifier(folder, train_data=str(folder / "data" / "train.jsonl"), eval_data=str(folder / "b.jsonl"))
    write_jsonl(folder / "c.jsonl", [{"review": row["text"], "label": row["label"]} for row in rows])
    says = "c.jsonl has no column 'text', it has 'review', 'label'. It was chosen for .*train.jsonl, and these"
    with pytest.raises(ValueError, match=says):
        train_classifier(folder, eval_data=str(folder / "c.jsonl"))

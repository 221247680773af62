"""The tasks of the benchmarks that fine-tune: their data, and that every contender trains on the same tokens."""

import argparse
import math
from pathlib import Path

import pytest
from toydata import read_jsonl

from modelcenter import cli
from scripts.bench.lib.finetuning import contenders, prepare
from scripts.bench.lib.finetuning.tasks import TASKS

ROWS = 12
SETTINGS = {
    "data": None, "seed": 0, "rows": ROWS, "hidden": 64, "layers": 1, "vocabulary": "data", "dev_rows": 2
}  # fmt: skip
PAIR = {"mr": "name[Blue Spice], food[Thai], near[Blue Spice Bar]", "ref": "Blue Spice, by Blue Spice Bar: Thai food."}


@pytest.mark.parametrize("name", TASKS)
def test_samples_stand_in_for_data_sets(name: str, tmp_path: Path):
    task = TASKS[name]
    rows = task.read(None, "train")
    task.write(rows, tmp_path / "train")
    assert task.read_back(tmp_path / "train") == rows
    # Of rows for embeddings no text is in two of them.
    texts = {text for row in rows for text in row.values()} if name.endswith(("embedding", "multi_vector")) else ()
    assert len(rows) == (len(texts) / 2 if texts else 4000) > 200
    with pytest.raises(ValueError, match=r"(train.(tsv|csv)|input.txt) does not exist; the folder needs sst2"):
        task.read(str(tmp_path), "train")


@pytest.mark.parametrize("name", TASKS)
def test_both_sides_train_on_the_same_tokens(name: str, tmp_path: Path, monkeypatch):
    """One step over all rows, by this project's script and its flags, beside the batch that a peer makes of them."""
    import transformers

    task, read = TASKS[name], type(TASKS[name]).read
    monkeypatch.setattr(type(task), "read", lambda self, *words: read(self, *words)[:ROWS])
    about = prepare.prepare(tmp_path, {"task": name, **SETTINGS})
    start = tmp_path / "start"
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    rows = task.read_back(tmp_path / "train")
    model = task.load(start, rows).eval()
    batch = task.collator("default", tokenizer, model)(task.encode(tokenizer, rows))
    loss, count, right = task.judge(model, batch, start)
    assert loss > 0 and 0 <= right <= count > 0
    args = argparse.Namespace(batch_size=ROWS, steps=1, lr=None, microbatch=None, matmul_precision="highest")
    verb, _, rest = task.script.removesuffix(".py").partition("_")
    cli.main([verb, rest.replace("_", "-"), *contenders.our_flags(tmp_path, name, args)])
    trained = read_jsonl(tmp_path / "ours" / "metrics.jsonl")[-1]["tokens"]
    assert trained == task.tokens(batch) and round(trained / ROWS, 1) == about["tokens_per_row"]
    assert about["gflop_per_token"] > 0 and about["rows"] == ROWS


def test_words_of_a_slot_are_tagged_once():
    row = TASKS["token_classification"].of_pairs([PAIR])[0]
    tagged = [f"{word}/{tag}" for word, tag in zip(row["tokens"], row["tags"], strict=True) if tag != "O"]
    # The longer value is not tagged within the shorter one's words.
    assert tagged == ["Blue/B-name", "Spice/I-name", "Blue/B-name", "Spice/I-name", "Thai/B-food"]


def test_held_out_tags_have_the_numbers_of_those_that_were_trained_on():
    task = TASKS["token_classification"]
    known, held = task.of_pairs([PAIR]), task.of_pairs([{"mr": "food[Thai], area[here]", "ref": "Thai food is here"}])
    tokenizer = task.tokenizer(task.texts(known[0]) * 2 + task.texts(held[0]) * 2)
    names = task.head(known)["id2label"]
    labels = task.encode(tokenizer, held, known)[0]["labels"]
    # A tag that no row in training has is passed over, as are [CLS] and [SEP].
    assert [names.get(label) for label in labels if label != -100] == ["B-food", "O", "O"]


def test_answers_stand_where_rows_say_and_tokens_are_theirs():
    task = TASKS["qa"]
    rows = task.of_pairs([PAIR, {"mr": "name[Aromi], food[Fish]", "ref": "Aromi has Fish."}])
    tokenizer = task.tokenizer([text for row in rows for text in task.texts(row)] * 2)
    for row, encoded in zip(rows, task.encode(tokenizer, rows), strict=True):
        (text,), (at,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][at : at + len(text)] == text
        answer = encoded["input_ids"][encoded["start_positions"] : encoded["end_positions"] + 1]
        assert tokenizer.decode(answer) == text.lower()


def test_the_right_choice_is_the_rows_own():
    pairs = [{"mr": f"name[{name}]", "ref": f"{name} is here."} for name in "ABCDEFG"]
    rows = TASKS["multiple_choice"].of_pairs(pairs)
    assert [row["choices"][row["label"]] for row in rows] == [pair["ref"] for pair in pairs]
    assert {len(row["choices"]) for row in rows} == {4} and len({row["label"] for row in rows}) > 1


def test_a_preference_is_for_the_text_about_this(tmp_path: Path):
    """A model that is still the reference prefers nothing: log 2 for each pair. There are as many as the steps take."""
    import transformers

    task = TASKS["dpo"]
    rows = task.of_pairs([PAIR, {"mr": "name[Aromi]", "ref": "Aromi has Fish."}])
    assert [(row["prompt"], row["chosen"]) for row in rows] == [
        (f"{PAIR['mr']} ->", f" {PAIR['ref']}"), ("name[Aromi] ->", " Aromi has Fish.")
    ]  # fmt: skip
    assert prepare.prepare(tmp_path, {"task": "dpo", **SETTINGS})["rows"] == ROWS
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "start")
    model = task.load(tmp_path / "start", rows).eval()
    batch = task.collator("default", tokenizer, model)(task.encode(tokenizer, rows))
    assert task.judge(model, batch, tmp_path / "start") == (pytest.approx(2 * math.log(2)), 2, 0)

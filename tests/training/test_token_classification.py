"""Token classification from the command line: against transformers, against itself cut differently, and mistakes."""

import json
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from span_toys import TAGS, make_bytes_tokenizer, make_tagged, make_tokenizer, write_conll, write_folder
from toydata import SIZES, STILL, command, flags, read_jsonl, write_jsonl
from toyruns import assert_same_end, assert_same_steps, die_at, in_a_process, run_script, went_on_after

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.table import Origin, Table
from modelcenter.data.tokenization.words import tokenize_words
from modelcenter.training import metrics
from modelcenter.training.config import TokenClassificationConfig
from modelcenter.training.tasks import word_tags
from modelcenter.training.tasks.token_classification import TokenClassification, windows_of
from scripts.finetune_token_classification import main

LONG = SIZES | {"max_positions": 64}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path, "token-classification", train=27)


def finetune(folder, ranks: int = 1, **changes) -> list[dict]:
    return run_script(main, flags(folder, **{"model_config": LONG | STILL, **changes}), ranks)


def encoded(rows: list[dict], max_length: int = 64) -> dict[str, torch.Tensor]:
    """A padded batch as transformers' example script makes it: labels at the first token of each word."""
    batch = make_tokenizer()([r["tokens"] for r in rows], is_split_into_words=True, padding=True, return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], -100)
    for i, row in enumerate(rows):
        numbers = batch.word_ids(i)
        for at, number in enumerate(numbers):
            if number is not None and (at == 0 or numbers[at - 1] != number):
                labels[i, at] = TAGS.index(row["ner_tags"][number])
    return {**batch, "labels": labels}


def start_model(folder, **changes):
    """The model that a run starts from, in transformers."""
    from transformers import AutoModelForTokenClassification

    options = LONG | STILL | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0, "num_labels": len(TAGS)}
    start = modelcenter.from_config("tiny/bert", "token-classification", seed=42, **options | changes)
    start.save_pretrained(folder / "start")
    return AutoModelForTokenClassification.from_pretrained(str(folder / "start")).train()


def test_same_losses_as_a_plain_loop_over_the_transformers_model(folder):
    rows = finetune(folder, epochs=2, lr_scheduler="constant", warmup=0, weight_decay=0, max_grad_norm=0.5)
    ours = [row for row in rows if "loss" in row]
    model, data = start_model(folder), make_tagged(27, seed=1)
    lengths = encoded(data)["attention_mask"].sum(1).numpy()
    batches = [b for epoch in range(2) for b in EpochBatches(lengths, 8, 42).epoch(epoch)]
    assert_same_steps(ours, model, batches, lambda batch: model(**encoded([data[i] for i in batch])).loss)
    model.eval()
    dev = make_tagged(11, seed=2)
    batch = encoded(dev)
    with torch.no_grad():
        out = model(**batch)
    assert rows[-1]["eval_loss"] == pytest.approx(out.loss.item(), abs=1e-4)
    right = (out.logits.argmax(-1) == batch["labels"])[batch["labels"] != -100]
    assert rows[-1]["eval_accuracy"] == pytest.approx(right.float().mean().item())
    by_hand = metrics.TokenLabels(TAGS)
    by_hand.update(out.logits, batch["labels"])
    assert {n: rows[-1][f"eval_{n}"] for n in by_hand.result()} == pytest.approx(by_hand.result())


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(1, {"batch_size": 2, "global_batch_size": 8}), (2, {"batch_size": 2, "global_batch_size": 8, "zero": 3})],
)
def test_losses_do_not_depend_on_the_cut(folder, ranks, changes):
    """Microbatches and ranks have different numbers of words, and long rows come in several windows."""
    options = {"max_length": 16, "eval_batch_size": 3}
    whole = finetune(folder, output_dir=str(folder / "whole"), **options)
    rows = finetune(folder, ranks, **options, **changes)
    for row, expected in zip(rows, whole, strict=True):
        compared = {k: v for k, v in expected.items() if "second" not in k}
        assert {k: row[k] for k in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_killed_and_gone_on(folder, monkeypatch, capfd):
    values = flags(folder, epochs=2, save_every=2, model_config=LONG | {"dropout": 0.3}, max_length=16)
    assert in_a_process(main, values | {"output_dir": str(folder / "whole")}) == 0
    with monkeypatch.context() as patch:
        die_at(patch, 5)
        assert in_a_process(main, values) == -signal.SIGKILL
    assert in_a_process(main, values) == 0
    assert went_on_after(capfd) in (2, 4)  # step 4 may have been half written
    assert_same_end(folder, "run")


def test_predictions_are_those_of_transformers_pipeline(folder, tmp_path, capsys):
    from transformers import pipeline

    write_jsonl(folder / "data" / "train.jsonl", make_tagged(150, seed=6))
    finetune(folder, epochs=3, log_every=100)
    rows = make_tagged(13, seed=8)
    data = write_jsonl(tmp_path / "new.jsonl", [{"tokens": row["tokens"]} for row in rows])
    cli(["predict", str(folder / "run"), str(data), "--output", str(tmp_path / "out.jsonl"), "--batch_size", "4"])
    ours = read_jsonl(tmp_path / "out.jsonl")
    theirs = pipeline("token-classification", model=str(folder / "run" / "model"), aggregation_strategy="first")
    assert any(row["entities"] for row in ours)
    for row, given in zip(ours, rows, strict=True):
        assert row["words"] == given["tokens"] and len(row["tags"]) == len(row["words"])
        found = theirs(" ".join(given["tokens"]))
        assert [(e["text"], e["type"]) for e in row["entities"]] == [(e["word"], e["entity_group"]) for e in found]
        scores = [float(e["score"]) for e in found]
        assert [e["score"] for e in row["entities"]] == pytest.approx(scores, abs=1e-5)
        for entity in row["entities"]:
            assert " ".join(row["words"][entity["start"] : entity["end"]]) == entity["text"]
    two = str(tmp_path / "two.jsonl")
    words = ["predict", str(folder / "run"), str(data), "--output", two, "--batch_size", "2", "--max_length", "9"]
    on_ranks(lambda: cli(words), 2)  # several windows for each row
    assert [row["words"] for row in read_jsonl(two)] == [row["words"] for row in ours]
    assert all(len(row["tags"]) == len(row["words"]) for row in read_jsonl(two))
    capsys.readouterr()
    conll = write_conll(tmp_path / "new.conll", rows)
    cli(["evaluate", str(folder / "run" / "model"), str(conll), "--json"])
    judged = metrics.TokenLabels(TAGS)
    for row, true in zip(ours, rows, strict=True):
        judged.add([TAGS.index(t) for t in row["tags"]], [TAGS.index(t) for t in true["ner_tags"]])
    found = json.loads(capsys.readouterr().out)
    assert found.pop("rows") > 0 and found.pop("loss") > 0
    assert found == pytest.approx(judged.result())


def test_all_tags_of_the_model_tell_how_those_of_a_row_are_written():
    examples = SimpleNamespace(rows=[["Ada", "sleeps"]], names=("O", "B_P", "I_P", "E_P", "S_P"))
    found = TokenClassification.prediction(Mock(), examples, 0, [([4, 0], [0.9, 0.8])])
    assert found["entities"] == [{"text": "Ada", "type": "P", "start": 0, "end": 1, "score": 0.9}]


def test_rows_that_training_cuts_are_judged_whole(tmp_path):
    row = {"tokens": ["a"] * 9, "tags": ["O", "B-X", "O"] * 3}
    data = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    cfg = TokenClassificationConfig(train_data=[data], eval_data=[data], too_long="cut")
    trained, judged = TokenClassification.from_flags(cfg).tokenize(make_tokenizer(), 6)
    assert [len(words.lengths) for words in (trained, judged)] == [1, 3] and judged.owner.tolist() == [0, 0, 0]


def test_plain_texts_and_empty_rows(folder, tmp_path, capsys):
    finetune(folder, max_steps=1)
    capsys.readouterr()
    (tmp_path / "new.txt").write_text("Anna met (dmitri).\n\u5f20\u4e09\u5728\u5317\u4eac\n", encoding="utf-8")
    cli(["predict", str(folder / "run"), str(tmp_path / "new.txt")])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["words"] == ["Anna", "met", "(", "dmitri", ")", "."]
    assert lines[1]["words"] == list("\u5f20\u4e09\u5728\u5317\u4eac")
    data = write_jsonl(tmp_path / "new.jsonl", [{"words": []}, {"words": ["a"]}])
    cli(["predict", str(folder / "run"), str(data)])
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first == {"words": [], "tags": [], "entities": []}
    assert word_tags.joined(["\u5f20", "\u4e09", "a", "b", "\u5728"]) == "\u5f20\u4e09 a b \u5728"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902!",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902", "!"],
        ),
        ("a cafe\u0301-the\u0301's", ["a", "cafe\u0301-the\u0301's"]),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"]),
        ("I \u2764\ufe0f\u5317\u4eac.", ["I", "\u2764\ufe0f", "\u5317", "\u4eac", "."]),
        ("^a] \u0301", ["^", "a", "]", "\u0301"]),
    ],
    ids=["Hindi", "accents", "Persian", "signs", "alone"],
)
def test_marks_are_no_words(text, words):
    """Vowel signs, accents that are characters of their own, and joiners belong to the character before them."""
    assert word_tags.split_text(text) == words


def test_all_tokens_of_a_word(folder, capsys):
    names = ("B-PER", "I-PER", "B-LOC", "O")
    assert word_tags.inside_tags(names).tolist() == [1, 1, 2, 3]
    assert word_tags.inside_tags(tuple(name.replace("-", "_") for name in names)).tolist() == [1, 1, 2, 3]
    rows = [["zurich", "met"]]  # a word in pieces
    words = tokenize_words(make_tokenizer(), rows, max_length=20)
    pieces = int((words.word == 0).sum())
    assert pieces > 1
    table = Table({}, [])
    examples = windows_of(table, rows, words, names, np.array([0, 3]), word_tags.inside_tags(names))
    rest = (words.word == 1).sum() - 1
    assert examples.labels.tolist() == [-100, 0, *[1] * (pieces - 1), 3, *[3] * rest, -100]
    one = finetune(folder, max_steps=2, label_all_tokens=True)
    other = finetune(folder, max_steps=2, output_dir=str(folder / "first"))
    assert one[0]["loss"] != other[0]["loss"]  # more tokens are trained
    accuracy = 1 - round((1 - one[-1]["eval_accuracy"]) * words_in_dev()) / words_in_dev()
    assert one[-1]["eval_accuracy"] == pytest.approx(accuracy)  # each word is judged once all the same
    capsys.readouterr()
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == pytest.approx({name: one[-1].get(f"eval_{name}", value) for name, value in found.items()}, abs=1e-5)


def words_in_dev() -> int:
    return sum(len(row["tokens"]) for row in make_tagged(11, seed=2))


def test_a_tokenizer_of_bytes_puts_a_space_before_words(folder):
    from transformers import AutoTokenizer

    make_bytes_tokenizer().save_pretrained(folder / "tokenizer")
    finetune(folder, model="tiny/roberta", max_steps=1, model_config={"max_positions": 200})
    saved = AutoTokenizer.from_pretrained(str(folder / "run" / "model"))
    assert saved(["ab"], is_split_into_words=True)["input_ids"] == saved(" ab")["input_ids"] == saved("ab")["input_ids"]


@pytest.mark.parametrize("model", ["t5", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "llama"))])
def test_other_families(folder, model):
    rows = finetune(folder, model=f"tiny/{model}", max_steps=1, batch_size=2, model_config={"num_layers": 1})
    assert np.isfinite(rows[-1]["eval_loss"])


def test_numbers_and_their_names(folder):
    def from_flags(**changes) -> TokenClassification:
        return TokenClassification.from_flags(TokenClassificationConfig.from_args(command(flags(folder, **changes))))

    rows = [{**row, "ner_tags": [TAGS.index(t) for t in row["ner_tags"]]} for row in make_tagged(27, seed=1)]
    data = str(write_jsonl(folder / "numbers.jsonl", rows))
    with pytest.raises(
        ValueError, match="tag_names: .* has the tag [0-6] in column 'ner_tags', a number without a name"
    ):
        finetune(folder, train_data=data, max_steps=1)
    numbers = finetune(folder, train_data=data, max_steps=1, tag_names=TAGS)
    names = finetune(folder, max_steps=1, output_dir=str(folder / "names"))
    assert numbers[0]["loss"] == names[0]["loss"]
    saved = modelcenter.from_pretrained(str(folder / "run" / "model"), None)
    assert saved.config.id2label == dict(enumerate(TAGS))
    # Names that training rows have are in no order that numbers of other rows could be of.
    with pytest.raises(ValueError, match="tag_names: .*numbers.jsonl has the tag [0-6] in column 'ner_tags', a number"):
        from_flags(eval_data=data)
    assert from_flags(eval_data=data, tag_names=TAGS).eval_targets.tolist() == sum((r["ner_tags"] for r in rows), [])
    task = from_flags()
    meant = [[task.tag_names[tag] for tag in targets] for targets in (task.targets, task.eval_targets)]
    task.adopt_label_order([name.lower() for name in TAGS[::-1]])  # as a checkpoint that training starts from has them
    assert task.tag_names == tuple(TAGS[::-1])
    assert meant == [[task.tag_names[tag] for tag in targets] for targets in (task.targets, task.eval_targets)]
    rows[4]["ner_tags"][1] = 7
    write_jsonl(folder / "numbers.jsonl", rows)
    with pytest.raises(ValueError, match=r"numbers.jsonl, line 5, word 2 \(.*\): the tag 7 is not one of the tags"):
        finetune(folder, train_data=data, max_steps=1, tag_names=TAGS, overwrite_output_dir=True)


def test_lists_that_a_table_of_texts_holds():
    """What pandas makes of a column of lists in csv."""
    rows = [["it's", "[1]"], ["b"]]
    made = Table({"words": [str(row) for row in rows], "tags": ["['O' 'B-X']", '["O"]']}, [Origin("a.csv", 2, "")])
    assert word_tags.words_of(made, "words", tagged=True) == rows
    assert word_tags.tags_of(made, "tags", rows) == [["O", "B-X"], ["O"]]
    numbered = Table({"tags": [[1, 0], [0]]}, made.origins, {"tags": ["b-x", "o"]})
    # As the source calls them.
    assert word_tags.tags_of(numbered, "tags", rows, ("O", "B-X")) == [["O", "B-X"], ["B-X"]]
    assert word_tags.named_tags(numbered, "tags", [[1, 0], [0]]) == [["o", "b-x"], ["b-x"]]
    plain = Table({"words": ["[ 1 ]", "[x] b c"]}, made.origins)
    assert word_tags.words_of(plain, "words", tagged=True) == [["[", "1", "]"], ["[x]", "b", "c"]]
    broken = Table({"words": ["['EU', 'in']", "", "['a', nan]"]}, [Origin("a.csv", 3, "", range(2, 5))])
    for reader in (word_tags.words_of, word_tags.tags_of):
        with pytest.raises(ValueError, match=r"a.csv, line 4: got .\['a', nan\].*, expected a list .* such as .*EU.*;"):
            reader(broken, "words", [["a", "b"]] * 3)


def test_a_row_for_each_word(folder):
    """Words without their sentences would be trained on one by one."""
    rows = make_tagged(27, seed=1)
    data = folder / "words.tsv"

    def words_as(between: str, first: str = "token\ttag\n") -> TokenClassification:
        sentences = ("".join(map("{}\t{}\n".format, row["tokens"], row["ner_tags"])) for row in rows)
        data.write_text(first + between.join(sentences), encoding="utf-8")
        given = {} if first else {"words_column": "0", "tags_column": "1"}
        values = flags(folder, train_data=str(data), **given)
        return TokenClassification.from_flags(TokenClassificationConfig.from_args(command(values)))

    for first in ("token\ttag\n", ""):
        assert words_as("\n", first).words == [row["tokens"] for row in rows]
        with pytest.raises(ValueError, match=r"words.tsv: each of \d+ rows has one word in column '\w+', expected"):
            words_as("", first)


def test_entities_by_characters(folder, capsys):
    """As tools for annotation write them: the same run as on the words and tags that they mean."""
    rows = [row | {"tokens": [word.replace("-", "") for word in row["tokens"]]} for row in make_tagged(12, seed=1)]
    plain, spelt = [], []
    for row in rows:
        text, spans = " ".join(row["tokens"]), []
        ends = np.cumsum([len(word) + 1 for word in row["tokens"]]).tolist()
        for kind, start, end in metrics.entities(row["ner_tags"]):
            spans.append([ends[start - 1] if start else 0, ends[end - 1] - 1, kind])
        tags = ["O"] * len(row["tokens"])
        for kind, start, end in metrics.entities(row["ner_tags"]):
            tags[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
        plain.append({"tokens": row["tokens"], "ner_tags": tags})
        spelt.append({"text": text, "label": spans[::-1]})
    data = [str(write_jsonl(folder / f"{i}.jsonl", rows)) for i, rows in enumerate((plain, spelt))]
    losses = [
        finetune(folder, train_data=path, eval_data=path, max_steps=2, output_dir=str(folder / f"run{i}"))
        for i, path in enumerate(data)
    ]
    assert losses[0][-1]["eval_loss"] == losses[1][-1]["eval_loss"]
    capsys.readouterr()
    for run, path in (("run0", data[0]), ("run1", data[1])):
        cli(["evaluate", str(folder / run), path, "--json"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    none = write_jsonl(folder / "none.jsonl", [{"text": "anna met bernd", "label": []}])
    cli(["evaluate", str(folder / "run1"), str(none), "--json"])
    assert json.loads(capsys.readouterr().out)["rows"] == 1


def test_forms_and_mistakes_of_entities_by_characters():
    def made(*spans, text="Dr. Ada Lovelace \u4f4f\u5728\u4f26\u6566"):
        table = Table({"text": [text] * len(spans), "entities": list(spans)}, [Origin("a.jsonl", len(spans), "")])
        assert word_tags.find_word_columns(table, None, None) == ("text", "entities")
        return list(zip(*table.columns.values(), strict=True))

    words = ["Dr", ".", "Ada", "Lovelace", "\u4f4f", "\u5728", "\u4f26", "\u6566"]
    tags = ["O", "O", "B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC"]
    tool = {"start_offset": 19, "end_offset": 21, "labels": ["LOC"]}
    forms = [[4, 16, "PER"], [19, 21, "LOC"]], [tool, {"start": 4, "end": 16, "label": "PER"}]
    assert made(*forms, [], None) == [(words, tags)] * 2 + [(words, ["O"] * 8)] * 2
    assert made([], None) == [(words, ["O"] * 8)] * 2  # no row has an entity
    written = str(forms[0]), json.dumps(forms[1]), "[]", ""  # in the cells of a csv file
    assert made(*written) == [(words, tags)] * 2 + [(words, ["O"] * 8)] * 2
    assert made([[0, 2, "X"]], text="Berlin")[0] == (["Be", "rlin"], ["B-X", "O"])
    for wrong, says in (
        ([[4, 16, "PER"], [10, 20, "X"]], "row 1: the entity 'X' at characters 10 to 20 .* overlaps the one before"),
        ([[16, 17, "X"]], "'X' at characters 16 to 17 in column 'entities' of a text of 21 holds no word"),
        ([[4, 22, "X"]], "'X' at characters 4 to 22"),
        ([[4, 4, "X"]], "'X' at characters 4 to 4"),
        ([[4, "16", "X"]], r"row 1, column 'entities': got the entity \[4, '16', 'X'\], expected"),
        ([{"start": 4, "end": 16, "label": None}], "got the entity .* expected .start, end, type."),
    ):
        with pytest.raises(ValueError, match=says):
            made(wrong)
    with pytest.raises(ValueError, match="row 1: got None in column 'text', expected a text"):
        made(forms[0], text=None)
    with pytest.raises(ValueError, match=r"row 2: got .\[\[4, 16, X\]\]., expected a list .* such as .\[\[4, 16, "):
        made(str(forms[0]), "[[4, 16, X]]")


def test_rows_whose_words_and_tags_do_not_fit_are_named(folder):
    dev, rows = folder / "data" / "dev.jsonl", make_tagged(3, seed=2)
    wrong = [*rows[:1], {"tokens": ["a", "b"], "ner_tags": ["O", "B-XYZ"]}]
    write_jsonl(dev, wrong)
    with pytest.raises(
        ValueError, match=r"dev.jsonl, line 2, word 2 \('b'\): the tag 'B-XYZ' is not one of the tags of"
    ):
        finetune(folder)
    for row, says in (
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "line 2: got 1 tags in column 'ner_tags' for 2 words"),
        ({"tokens": ["a"], "ner_tags": [None]}, r"line 2, word 1 \('a'\): the tag None is not one of the tags of"),
        ({"tokens": ["a"], "ner_tags": None}, "line 2: got None in column 'ner_tags' for 1 words"),
        ({"tokens": None, "ner_tags": []}, "line 2: got None in column 'tokens', expected a list of non-empty words"),
        ({"tokens": ["a", ""], "ner_tags": ["O", "O"]}, r"line 2: got \['a', ''\] in column 'tokens', expected a list"),
    ):
        write_jsonl(dev, [*rows[:1], row])
        with pytest.raises(ValueError, match=says):
            finetune(folder)


def test_rows_that_teach_nothing_are_refused(folder):
    data = str(write_jsonl(folder / "empty.jsonl", [{"tokens": [], "ner_tags": []}]))
    with pytest.raises(ValueError, match="empty.jsonl: no row has a word in column 'tokens'"):
        finetune(folder, train_data=data)
    data = str(write_jsonl(folder / "one.jsonl", [{"tokens": ["a", "b"], "ner_tags": ["O", "O"]}] * 2))
    with pytest.raises(ValueError, match="one.jsonl: all words have the same tag, 'O', in column 'ner_tags', so there"):
        finetune(folder, train_data=data)


def test_columns_of_words_and_tags_that_are_not_found_are_asked_for(folder):
    for row, says in (
        ({"x": ["a"], "ner_tags": ["O"]}, "words_column: which column of .* has the words. None is called words or"),
        ({"tokens": ["a"], "y": ["O"]}, "tags_column: which column .* the columns are 'tokens', 'y'. Give tags_column"),
    ):
        data = str(write_jsonl(folder / "columns.jsonl", [row]))
        with pytest.raises(ValueError, match=says):
            finetune(folder, train_data=data)
    data = str(folder / "data" / "train.jsonl")
    with pytest.raises(ValueError, match="words_column: .* has no column 'token', it has 'tokens', .*did you mean"):
        finetune(folder, train_data=data, words_column="token")
    with pytest.raises(ValueError, match="tags_column: got 'tokens', which is already the column of the words"):
        finetune(folder, train_data=data, words_column="tokens", tags_column="tokens")


def test_a_dry_run_shows_tags_and_empty_rows_are_counted(folder, capsys):
    rows = [*make_tagged(6, seed=1), {"tokens": [], "ner_tags": []}]
    write_jsonl(folder / "data" / "train.jsonl", rows)
    finetune_flags = flags(folder, model_config=LONG | STILL, dry_run=True)
    main(command(finetune_flags))
    shown = capsys.readouterr().out
    assert "tags: B-LOC, B-ORG" in shown and "/B-" in shown and "train.jsonl, line" in shown
    finetune(folder)
    assert "1 rows without words are left out" in capsys.readouterr().out

"""Runs on published forms of rows: groups of answers in classification, label words in text to text."""

import random
import re

import numpy as np
import pytest
import seq2seq_toys
import torch
from toydata import WORDS, command, flags, make_tokenizer, read_jsonl, write_jsonl

from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.sources import find
from modelcenter.data.table import Origin, Table
from modelcenter.training.config import ClassificationConfig, EvaluateConfig, PredictConfig, Seq2SeqConfig
from modelcenter.training.metrics import Generation
from modelcenter.training.tasks.column_roles import groups_of
from modelcenter.training.tasks.seq2seq import SequenceToSequence
from modelcenter.training.tasks.splits import read_splits
from scripts.finetune_classification import main as classify
from scripts.finetune_lm import main as continue_texts
from scripts.finetune_seq2seq import main as write_texts


def passages(count: int, seed: int) -> list[dict]:
    """Rows as MultiRC's files have them: an answer with a good word is right."""
    rng = random.Random(seed)

    def answer() -> dict:
        kind = rng.choice(["good", "bad"])
        return {"text": rng.choice(WORDS[kind]), "label": int(kind == "good")}

    def question(i: int) -> dict:
        return {"idx": i, "question": "it was", "answers": [answer() for _ in range(rng.randint(1, 3))]}

    texts = [" ".join(rng.choices(WORDS["both"], k=4)) for _ in range(count)]
    return [{"idx": n, "passage": {"text": t, "questions": [question(0), question(1)]}} for n, t in enumerate(texts)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    for name, count, seed in (("train", 6, 1), ("val", 5, 2)):
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", passages(count, seed))
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def test_answers_of_a_question_are_held_out_together(folder):
    cfg = ClassificationConfig(train_data=[str(folder / "data" / "train.jsonl")], form="multirc", eval_fraction=0.4)
    sides = [[str(value) for value in table.columns["group"]] for table in read_splits(cfg)]
    assert not set(sides[0]) & set(sides[1]) and len(set(sides[0])) == 7 and len(set(sides[1])) == 5
    assert len(sides[0]) + len(sides[1]) > 12


@pytest.mark.parametrize("none", [None, "", float("nan")])
def test_rows_without_a_group_are_not_one(folder, none):
    says = "dev.jsonl, (row|line) 2: the row has no group in column 'q'; give it one or remove it"
    columns = {"source": ["a"] * 3, "target": ["b"] * 3, "q": ["x", none, none]}
    with pytest.raises(ValueError, match=says):
        groups_of(Table(columns, [Origin("dev.jsonl", 3, "")]), "q")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    data = {name: str(write_jsonl(folder / f"{name}.jsonl", rows)) for name in ("train", "dev")}
    given = {"group_column": "q", "metrics": ["accuracy"]}
    cfg = Seq2SeqConfig(train_data=[data["train"]], eval_data=[data["dev"]], model="m", **given)
    with pytest.raises(ValueError, match=says):
        SequenceToSequence.from_flags(cfg)
    table = find([data["dev"]]).read("train")
    with pytest.raises(ValueError, match=says):
        SequenceToSequence.for_inference(EvaluateConfig(run="m", data=[data["dev"]]), cfg, table, labelled=True)
    assert SequenceToSequence.for_inference(PredictConfig(run="m", data=["d"]), cfg, table, labelled=False)


def test_groups_are_needed_of_rows_that_are_judged(folder):
    rows = [{"text": word, "label": kind, "q": kind} for kind in ("good", "bad") for word in WORDS[kind][:3]]
    judged = write_jsonl(folder / "data" / "judged.jsonl", rows)
    alone = write_jsonl(folder / "data" / "alone.jsonl", [{**row, "q": None} for row in rows])
    given = {"train_data": str(alone), "eval_data": str(judged), "group_column": "q", "max_steps": 2}
    classify(command(flags(folder, **given)))
    assert any("eval_exact_match" in row for row in read_jsonl(folder / "run" / "metrics.jsonl"))
    cli(["predict", str(folder / "run"), str(alone), "--output", str(folder / "out.jsonl")])
    assert len(read_jsonl(folder / "out.jsonl")) == len(rows)
    with pytest.raises(ValueError, match="line 1: the row has no group in column 'q'"):
        cli(["evaluate", str(folder / "run"), str(alone)])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_questions_with_all_answers_right(folder, ranks):
    from transformers import BertForSequenceClassification

    classify(command(flags(folder, form="multirc", epochs=2)))
    logged = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "eval_loss" in row][-1]
    model = BertForSequenceClassification.from_pretrained(str(folder / "run" / "model")).eval()
    assert model.config.id2label == {0: "no", 1: "yes"}
    right, hit, said, true = {}, 0, 0, 0
    for row in passages(5, 2):
        for asked in row["passage"]["questions"]:
            for answer in asked["answers"]:
                texts = row["passage"]["text"], f"{asked['question']} {answer['text']}"
                with torch.no_grad():
                    guess = int(model(**make_tokenizer()(*texts, return_tensors="pt")).logits.argmax())
                key = row["idx"], asked["idx"]
                right[key] = right.get(key, True) and guess == answer["label"]
                hit, said, true = hit + guess * answer["label"], said + guess, true + answer["label"]
    expected = {"f1": 2 * hit / (said + true), "exact_match": sum(right.values()) / len(right)}
    assert len(right) == 10 and true
    assert {name: logged[f"eval_{name}"] for name in expected} == pytest.approx(expected)

    # Answers of a question lie in several batches, on several ranks.
    values = ["evaluate", str(folder / "run"), str(folder / "data"), "--batch_size", "2"]
    if ranks == 1:
        cli([*values, "--output", str(folder / "two.json")])
    else:
        on_ranks(lambda: cli([*values, "--output", str(folder / "two.json")]), ranks, timeout=90)
    (two,) = read_jsonl(folder / "two.json")
    assert {name: two[name] for name in expected} == pytest.approx(expected)
    cli(["predict", str(folder / "run"), str(folder / "data"), "--output", str(folder / "out.jsonl")])
    assert len(read_jsonl(folder / "out.jsonl")) == two["rows"] > 10
    with pytest.raises(ValueError, match=r"val.jsonl, line 1: the row is not of the form wic: it has no 'start1'"):
        cli([*values, "--form", "wic"])
    with pytest.raises(ValueError, match="label_column: which column of .* is the label"):
        cli([*values, "--form", "raw"])


def test_words_for_labels(folder):
    tokenizer = seq2seq_toys.make_tokenizer()
    tokenizer.add_tokens(["yes", "no", "multirc", "question:", "answer:", "paragraph:", *sum(WORDS.values(), [])])
    tokenizer.save_pretrained(folder / "tokenizer")
    own = {"form": "multirc", "prefix": "", "max_new_tokens": 3, "epochs": 8}
    write_texts(command(seq2seq_toys.flags(folder, **own)))
    logged = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "eval_loss" in row][-1]
    cli(["predict", str(folder / "run"), str(folder / "data"), "--output", str(folder / "out.jsonl")])
    said = read_jsonl(folder / "out.jsonl")
    assert said[0]["source"].startswith("multirc question: it was answer: ")
    rows = [(f"{p['idx']}-{q['idx']}", "no yes".split()[a["label"]])
            for p in passages(5, 2) for q in p["passage"]["questions"] for a in q["answers"]]  # fmt: skip
    hits = [row["prediction"] == truth for row, (_, truth) in zip(said, rows, strict=True)]
    wrong = {group for hit, (group, _) in zip(hits, rows, strict=True) if not hit}
    assert logged["eval_accuracy"] == pytest.approx(sum(hits) / len(hits)) and sum(hits)
    assert logged["eval_exact_match"] == pytest.approx(1 - len(wrong) / 10)
    cli(["evaluate", str(folder / "run"), str(folder / "data"), "--output", str(folder / "found.json")])
    (found,) = read_jsonl(folder / "found.json")
    assert [found[n] for n in ("accuracy", "exact_match")] == [logged[f"eval_{n}"] for n in ("accuracy", "exact_match")]


GOOD = [WORDS["good"][0], " ".join(WORDS["good"][1:3])]


def clozes(seed: int, count: int = 8) -> list[dict]:
    """Rows as ReCoRD has them on the Hub. Both good texts are right, the bad one is not."""
    rng = random.Random(seed)
    text = " ".join(rng.choices(WORDS["both"], k=3)) + ".\n@highlight\nit was"
    return [{"passage": text, "query": "it was @placeholder", "answers": GOOD, "idx": {"passage": n, "query": 0},
             "entities": rng.sample([*GOOD, WORDS["bad"][0]], 3)} for n in range(count)]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_clozes_with_several_right_texts(folder, ranks):
    """Answers in turn, epoch by epoch; SQuAD's exact match and F1 against all of them."""
    for name, seed in (("train", 1), ("val", 2)):
        write_jsonl(folder / "data" / f"{name}.jsonl", clozes(seed))
    tokenizer = seq2seq_toys.make_tokenizer()
    tokenizer.add_tokens(["record", "query:", "entities:", "passage:", ",", *sum(WORDS.values(), [])])
    tokenizer.save_pretrained(folder / "tokenizer")
    cfg = Seq2SeqConfig(**seq2seq_toys.flags(folder, form="record", prefix="", max_new_tokens=3, epochs=8))
    assert cfg.metrics == ["squad"]
    task = SequenceToSequence.from_flags(cfg)
    rows, _ = task.tokenize(tokenizer, 64)
    offered = [[text for text in row["entities"] if text in GOOD] for row in clozes(1)]
    for epoch in range(3):
        batch = rows.batch(np.array([1, 4]), epoch)
        asked = f"{offered[1][epoch % 2]} </s> {offered[4][epoch % 2]} </s>"
        assert tokenizer.decode(batch["labels"][0]).split() == asked.split()
    assert (rows.lengths == rows.tokens.lengths + 3).all()  # the longer one and its end
    write_texts(command(seq2seq_toys.flags(folder, form="record", prefix="", max_new_tokens=3, epochs=8)))
    logged = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "eval_loss" in row][-1]
    values = [str(folder / "run"), str(folder / "data"), "--output"]
    cli(["predict", *values, str(folder / "out.jsonl")])
    said = [row["prediction"] for row in read_jsonl(folder / "out.jsonl")]
    assert logged["eval_exact_match"] == sum(text in GOOD for text in said) / 8 > 0
    evaluate = ["evaluate", *values, str(folder / "two.json"), "--batch_size", "3"]
    cli(evaluate) if ranks == 1 else on_ranks(lambda: cli(evaluate), ranks, timeout=90)
    (two,) = read_jsonl(folder / "two.json")
    assert [two[n] for n in ("exact_match", "f1")] == [logged[f"eval_{n}"] for n in ("exact_match", "f1")]


def test_scores_of_words():
    """Two words as classification has them, a text that is no label's, and more words than two."""
    words = Generation(["accuracy"])
    words.update(["yes", "no", "maybe", "yes", "no"], ["yes", "yes", "yes", "no", "no"], ["a", "a", "b", "c", "d"])
    # Of yes: one of two that were said is right, of three that are true.
    assert words.result() == pytest.approx({"accuracy": 0.4, "f1": 2 / 5, "exact_match": 0.25})
    more = Generation(["accuracy"])
    more.update(["a", "b", "c", "x"], ["a", "c", "c", "b"])
    assert more.result() == pytest.approx({"accuracy": 0.5, "f1": (1 + 0 + 2 / 3) / 3}) and more.main == "accuracy"
    answers = Generation(["squad"])
    answers.update(["The dog", "cat", "red fox"], [["dog", "cat"], ["a dog"], ["fox", "the red hen house"]])
    assert answers.result() == pytest.approx({"exact_match": 1 / 3, "f1": (1 + 0 + 2 / 3) / 3})
    assert answers.main == "f1"
    with pytest.raises(ValueError, match="metrics: got accuracy and squad, which both report an f1"):
        Generation(["squad", "accuracy"])


@pytest.mark.full
def test_prompts_of_a_decoder(folder, capsys):
    tokenizer = seq2seq_toys.make_tokenizer(ends=False)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder / "tokenizer")
    own = {"model": "tiny/gpt2", "form": "multirc", "dry_run": True, "model_config": {"num_layers": 1}}
    continue_texts(command(flags(folder, **own, max_length=64, template="plain")))
    assert re.search(r"⟦\s*(yes|no)\W", capsys.readouterr().out)

"""Extractive question answering from the command line: against transformers, cut differently, and mistakes."""

import dataclasses
import datetime
import json
import math
import re
import signal
import uuid

import numpy as np
import pytest
import torch
from span_toys import make_asked, make_bytes_tokenizer, make_tokenizer, nested, write_folder
from toydata import SIZES, STILL, command, flags, read_jsonl, write_jsonl
from toyruns import assert_same_end, assert_same_steps, die_at, in_a_process, run_script, went_on_after

import modelcenter
from engine.testing import run as on_ranks
from modelcenter.cli import run as cli
from modelcenter.data.readers import read_file
from modelcenter.data.sampling import EpochBatches
from modelcenter.data.table import Origin, Table
from modelcenter.training import metrics
from modelcenter.training.config import EvaluateConfig, QAConfig
from modelcenter.training.inference.output_file import write_rows
from modelcenter.training.tasks import qa, questions
from modelcenter.training.tasks.answer_spans import Answer
from scripts.finetune_qa import main

LONG = SIZES | {"max_positions": 64}
SHAPE = {"max_length": 48, "doc_stride": 8}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELCENTER_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path, "qa", train=21, none=0.3, facts=4)


def finetune(folder, ranks: int = 1, **changes) -> list[dict]:
    return run_script(main, flags(folder, **{"model_config": LONG | STILL, **SHAPE, **changes}), ranks)


def test_metrics_to_choose_by_are_those_that_the_rows_have(folder):
    task = qa.QuestionAnswering.from_flags(
        QAConfig(train_data=[str(folder / "data" / "train.jsonl")], eval_fraction=0.5, doc_stride=8)
    )
    _, held = task.tokenize(make_tokenizer(), 48)
    every = {f"{of}{name}" for of in ("", "has_answer_", "no_answer_", "best_") for name in ("exact_match", "f1")}
    assert set(task.metric_names(held)) == {"loss", *every}
    answered = dataclasses.replace(held.questions, answers=[["x"] for _ in held.questions.questions])
    found = set(task.metric_names(dataclasses.replace(held, questions=answered)))
    assert found == {"loss", *(name for name in every if not re.match("has|no", name))}
    task.settings = dataclasses.replace(task.settings, null_threshold=None)  # --no_answer false
    assert set(task.metric_names(dataclasses.replace(held, questions=answered))) == {"loss", "exact_match", "f1"}


@pytest.mark.parametrize(
    ("id_", "text"), [(datetime.date(2026, 1, 2), "2026-01-02"), (uuid.UUID(int=7), str(uuid.UUID(int=7)))]
)
def test_ids_that_json_has_no_type_for(tmp_path, id_, text):
    """Parquet files have dates and UUIDs; predictions are written when the model has run on all rows."""
    columns = {"id": [id_], "question": ["what"], "context": ["a b c"]}
    table = Table(columns, [Origin("d.parquet", 1, "0")])
    asked = questions.read_questions(table, "question", "context", None)
    settings = qa.AnswerSettings.from_flags(QAConfig(doc_stride=8), None, asked.contexts)
    task = qa.QuestionAnswering(table=table, columns=("question", "context", None), questions=asked, settings=settings)
    line = task.prediction(task._windows(table, asked, make_tokenizer(), 48), 0, [])
    write_rows(str(tmp_path / "out.jsonl"), [line])
    assert read_jsonl(tmp_path / "out.jsonl")[0]["id"] == text


def encoded(rows: list[dict], targets: bool = True):
    """The windows as transformers' example script makes them."""
    batch = make_tokenizer()(
        [row["question"] for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=SHAPE["max_length"],
        stride=SHAPE["doc_stride"],
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=True,
        return_tensors="pt",
    )
    owner, offsets = batch.pop("overflow_to_sample_mapping").tolist(), batch.pop("offset_mapping").tolist()
    places = []
    for window, row in enumerate(owner):
        answers, place = rows[row]["answers"], (0, 0)
        inside = [i for i, side in enumerate(batch.sequence_ids(window)) if side == 1]
        if answers["text"]:
            start = answers["answer_start"][0]
            end = start + len(answers["text"][0])
            if offsets[window][inside[0]][0] <= start and offsets[window][inside[-1]][1] >= end:
                place = (
                    max(i for i in inside if offsets[window][i][0] <= start),
                    min(i for i in inside if offsets[window][i][1] >= end),
                )
        places.append(place)
    if targets:
        batch["start_positions"], batch["end_positions"] = torch.tensor(places).T
    return dict(batch), owner, offsets


def test_same_losses_as_a_plain_loop_over_the_transformers_model(folder):
    from transformers import AutoModelForQuestionAnswering

    rows = finetune(folder, epochs=2, lr_scheduler="constant", warmup=0, weight_decay=0, max_grad_norm=0.5)
    ours = [row for row in rows if "loss" in row]
    options = LONG | STILL | {"vocab_size": len(make_tokenizer()), "pad_token_id": 0}
    modelcenter.from_config("tiny/bert", "question-answering", seed=42, **options).save_pretrained(folder / "start")
    model = AutoModelForQuestionAnswering.from_pretrained(str(folder / "start")).train()
    whole, _, _ = encoded(make_asked(21, seed=1, none=0.3, facts=4))
    lengths = whole["attention_mask"].sum(1).numpy()
    assert len(lengths) > 21 and (whole["start_positions"] > 0).sum() > 9  # long contexts, and answers
    batches = [b for epoch in range(2) for b in EpochBatches(lengths, 8, 42).epoch(epoch)]

    def loss_of(batch):
        part = {name: value[batch.tolist()] for name, value in whole.items()}
        longest = int(part["attention_mask"].sum(1).max())
        part = {name: value[:, :longest] if value.dim() == 2 else value for name, value in part.items()}
        # transformers lets padding take part in the softmax; our head, and SQuAD's own scripts at no padding, do not.
        out = model(**{name: value for name, value in part.items() if "positions" not in name})
        hidden = part["attention_mask"] == 0
        losses = (
            torch.nn.functional.cross_entropy(
                out[f"{name}_logits"].masked_fill(hidden, -1e30), part[f"{name}_positions"]
            )
            for name in ("start", "end")
        )
        return sum(losses) / 2

    assert_same_steps(ours, model, batches, loss_of)


def answers_in_transformers(folder, rows: list[dict], longest: int = 30) -> list[tuple[str, float]]:
    """(best text, score of no answer over it) by every span of every window, from the exported model. longest: tokens
    of a text."""
    from transformers import AutoModelForQuestionAnswering

    batch, owner, offsets = encoded(rows, targets=False)
    with torch.no_grad():
        out = AutoModelForQuestionAnswering.from_pretrained(str(folder / "run" / "model")).eval()(**batch)
    best = [(-1e9, "")] * len(rows)
    null = [1e9] * len(rows)
    from transformers import BatchEncoding

    assert not isinstance(batch, BatchEncoding)
    for window, row in enumerate(owner):
        start, end = out.start_logits[window].tolist(), out.end_logits[window].tolist()
        null[row] = min(null[row], start[0] + end[0])
        types = batch["token_type_ids"][window].tolist()
        inside = [i for i, kind in enumerate(types) if kind == 1 and offsets[window][i][1]]
        for i in inside:
            for j in inside:
                if i <= j < i + longest:
                    text = rows[row]["context"][offsets[window][i][0] : offsets[window][j][1]]
                    best[row] = max(best[row], (start[i] + end[j], text))
    return [(text, none - score) for (score, text), none in zip(best, null, strict=True)]


def test_answers_are_those_of_transformers_and_metrics_those_of_the_answers(folder, tmp_path, capsys):
    write_jsonl(folder / "data" / "train.jsonl", make_asked(60, seed=1, none=0.3, facts=4))
    finetune(folder, epochs=2, log_every=100, null_threshold=0.1)
    assert QAConfig.from_yaml(folder / "run" / "config.yaml").no_answer is True
    rows = make_asked(12, seed=9, none=0.3, facts=4)
    data = tmp_path / "new.json"
    data.write_text(json.dumps(nested(rows)))
    out = str(tmp_path / "out.jsonl")
    cli(["predict", str(folder / "run"), str(data), "--output", out, "--batch_size", "5"])
    ours, theirs = read_jsonl(out), answers_in_transformers(folder, rows)
    assert len({row["answer"] for row in ours}) > 1
    for row, given, (text, null) in zip(ours, rows, theirs, strict=True):
        assert list(row) == ["id", "answer", "score", "start", "end", "null_score"] and row["id"] == given["id"]
        assert row["null_score"] == pytest.approx(null, abs=1e-4)
        assert row["answer"] == ("" if null > 0.1 else text) and 0 < row["score"] <= 1
        if row["answer"]:
            assert given["context"][row["start"] : row["end"]] == row["answer"]
    two = str(tmp_path / "two.jsonl")
    on_ranks(lambda: cli(["predict", str(folder / "run"), str(data), "--output", two, "--batch_size", "3"]), 2)
    assert [row["answer"] for row in read_jsonl(two)] == [row["answer"] for row in ours]
    cli(["predict", str(folder / "run"), str(data), "--output", out, "--null_threshold", "-100"])
    assert all(row["answer"] == "" and row["start"] == -1 for row in read_jsonl(out))
    cli(["predict", str(folder / "run"), str(data), "--output", out, "--null_threshold", "100"])
    best = [row["answer"] for row in read_jsonl(out)]
    assert best == [text for text, _ in theirs]
    few = ["--max_answer_length", "1", "--n_best", "1"]
    cli(["predict", str(folder / "run"), str(data), "--output", out, "--null_threshold", "100", *few])
    short = answers_in_transformers(folder, rows, longest=1)
    assert [row["answer"] for row in read_jsonl(out)] == [text for text, _ in short] != best
    chances = [1 / (1 + math.exp(null)) for _, null in short]  # beside no answer alone
    assert [row["score"] for row in read_jsonl(out)] == pytest.approx(chances, abs=1e-4)
    capsys.readouterr()
    cli(["evaluate", str(folder / "run"), str(data), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 12  # questions, not windows
    judged = metrics.ExtractiveAnswers("squad")
    judged.update([row["answer"] for row in ours], [row["answers"]["text"] for row in rows])
    for name, value in judged.result().items():
        assert found[name] == pytest.approx(value), name
    scored = metrics.ExtractiveAnswers("squad")
    scored.update(best, [row["answers"]["text"] for row in rows], [null for _, null in theirs])
    assert found["best_f1"] == pytest.approx(scored.result()["best_f1"])


def test_the_best_threshold_is_above_how_far_no_answer_is_behind():
    scores = qa.AnswerScores("squad", no_answer=True)
    scores.add(Answer("red", 0.9, 0, 3, null=-2.0, best_text="red"), ["red"])
    scores.add(Answer("", 0.9, -1, -1, null=3.0, best_text="blue"), [])
    found = scores.result()
    assert found["best_f1"] == found["best_exact_match"] == 1.0
    assert found["best_f1_threshold"] == found["best_exact_match_threshold"] == -2.0


@pytest.mark.parametrize("text", [[], ["b"]])
def test_a_model_without_its_flags_is_judged_by_what_the_rows_have(text):
    answers = [{"text": ["a"], "answer_start": [0]}, {"text": text, "answer_start": [2] * len(text)}]
    columns = {"question": ["what"] * 2, "context": ["a b c"] * 2, "answers": answers}
    table = Table(columns, [Origin("d.json", 2, "0")])
    task = qa.QuestionAnswering.for_inference(EvaluateConfig(run="m", data=["d"]), None, table, labelled=True)
    assert task.settings.null_threshold == (None if text else 0.0)


def test_questions_that_are_cut_are_told_of_and_contexts_are_not(folder, caplog):
    finetune(folder, max_steps=1, max_question_length=4)
    data, tokenizer = folder / "data" / "dev.jsonl", make_tokenizer()
    cut = sum(len(tokenizer.tokenize(row["question"])) > 4 for row in read_jsonl(data))
    caplog.clear()
    cli(["predict", str(folder / "run"), str(data)])
    assert cut and [r.getMessage() for r in caplog.records] == [
        f"{data}: {cut} texts truncated at max_question_length 4"
    ]


def test_losses_and_metrics_do_not_depend_on_the_cut(folder):
    whole = finetune(folder, output_dir=str(folder / "whole"), eval_batch_size=3)
    for ranks, changes in ((1, {"batch_size": 2}), (2, {"batch_size": 2, "zero": 3})):
        name = str(folder / f"run{ranks}")
        rows = finetune(folder, ranks, output_dir=name, global_batch_size=8, eval_batch_size=2, **changes)
        for row, expected in zip(rows, whole, strict=True):
            compared = {k: v for k, v in expected.items() if "second" not in k}
            assert {k: row[k] for k in compared} == pytest.approx(compared, rel=1e-3, abs=1e-4), ranks


@pytest.mark.full
def test_killed_and_gone_on(folder, monkeypatch, capfd):
    values = flags(folder, epochs=2, save_every=2, model_config=LONG | {"dropout": 0.3}, **SHAPE)
    assert in_a_process(main, values | {"output_dir": str(folder / "whole")}) == 0
    with monkeypatch.context() as patch:
        die_at(patch, 5)
        assert in_a_process(main, values) == -signal.SIGKILL
    assert in_a_process(main, values) == 0
    assert went_on_after(capfd) in (2, 4)  # step 4 may have been half written
    assert_same_end(folder, "run")


@pytest.mark.parametrize("model", ["gpt2", *(pytest.param(name, marks=pytest.mark.full) for name in ("roberta", "t5"))])
def test_other_families(folder, model, capsys):
    name = "GPT2Tokenizer" if model == "gpt2" else "RobertaTokenizer"  # GPT-2's numbers the texts; GPT-2 takes no types
    make_bytes_tokenizer(name).save_pretrained(folder / "tokenizer")
    config = {"dropout": 0.0} | ({} if model == "t5" else {"max_positions": 140})
    changes = {"max_length": 120, "doc_stride": 30, "model_config": config}
    rows = finetune(folder, model=f"tiny/{model}", max_steps=1, batch_size=2, **changes)
    assert np.isfinite(rows[-1]["eval_loss"])
    capsys.readouterr()
    cli(["predict", str(folder / "run"), str(folder / "data" / "dev.jsonl"), "--null_threshold", "1000"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    contexts = [row["context"] for row in read_jsonl(folder / "data" / "dev.jsonl")]
    for answer, context in zip(answers, contexts, strict=True):
        assert answer["answer"] and context[answer["start"] : answer["end"]] == answer["answer"]


@pytest.mark.full
def test_chinese(folder, tmp_path, capsys):
    context = "\u5f20\u4e09\u5728\u5317\u4eac\u5de5\u4f5c\uff0c\u674e\u56db\u53bb\u4e86\u4e0a\u6d77"
    answers = {"text": ["\u5317\u4eac"], "answer_start": [3]}
    row = {"id": "a", "question": "\u5f20\u4e09\u5728\u54ea\u91cc", "context": context, "answers": answers}
    data = str(write_jsonl(tmp_path / "c.jsonl", [row] * 4))
    rows = finetune(folder, train_data=data, eval_data=data, epochs=30, lr=2e-2, log_every=100)
    assert rows[-1]["eval_exact_match"] == 1.0
    capsys.readouterr()
    cli(["predict", str(folder / "run"), data])
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (found["answer"], found["start"], found["end"]) == ("\u5317\u4eac", 3, 5) and "null_score" not in found
    task = qa.QuestionAnswering.from_flags(QAConfig(train_data=[data]))
    assert task.settings.scoring == "cmrc"  # characters, found by the script of the contexts
    assert qa.QuestionAnswering.from_flags(QAConfig(train_data=[str(folder / "data")])).settings.scoring == "squad"


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("red", 4, 4), (" red", 3, 4), ("red ", 4, 4), ("red", 5, 4), ("red", 0, 4), ("red", 11, 12), ("red", 90, 12),
        ("red", -7, 4), ("red", -11, 4), (" red", 8, 12), ("blue", 4, questions.UNKNOWN),
    ],
)  # fmt: skip
def test_answers_are_looked_for_near_where_they_should_be(text, start, expected):
    assert questions.find_answer("the red car red", text, start) == expected


def test_the_first_answer_that_the_context_holds_is_learnt():
    rows = [
        {"text": ["blue", "red", "car"], "answer_start": [0, 4, 8]},
        {"text": ["blue", "red "], "answer_start": [0, 5]},
        {"text": ["blue", "green"], "answer_start": [0, 4]},
    ]
    columns = {"question": ["which?"] * 3, "context": ["the red car"] * 3, "answers": rows}
    found = questions.read_questions(Table(columns, [Origin("a.jsonl", 3, "1")]), "question", "context", "answers")
    assert found.starts == (4, 4, questions.UNKNOWN) and found.ends[:2] == (7, 7)
    assert found.wrong == (2,) and found.moved == 1
    assert found.answers[0] == ["blue", "red", "car"]  # all are right in an evaluation


def test_wrong_answers(folder, capsys):
    rows = make_asked(9, seed=1)
    rows[2]["answers"] = {"text": ["nowhere to be seen"], "answer_start": [3]}
    rows[4]["answers"]["answer_start"][0] += 1
    data = str(write_jsonl(folder / "wrong.jsonl", rows))
    changes = {"train_data": data, "eval_data": data, "max_steps": 1}
    with pytest.raises(
        ValueError, match=r"1 rows have answers .* not in their context, the first at .*wrong.jsonl, line 3; wrong"
    ):
        finetune(folder, wrong_answers="error", **changes)
    found = finetune(folder, **changes)
    shown = capsys.readouterr().out
    assert "windows of 8 questions; question 'question'" in shown
    assert "1 answers found at other positions than given" in shown
    assert "left out: 1 rows have answers that are not in their context, the first at" in shown
    assert np.isfinite(found[-1]["eval_loss"])  # all questions are judged, the wrong one has no place in the loss
    task = qa.QuestionAnswering.from_flags(QAConfig(train_data=[data]))
    assert len(task.questions.questions) == 8 and task.table.where(2).endswith("line 4")
    for row in rows:
        row["answers"] = {"text": ["nowhere"], "answer_start": [0]}
    data = str(write_jsonl(folder / "wrong.jsonl", rows))
    with pytest.raises(ValueError, match="9 rows have answers that are not in their context"):
        finetune(folder, train_data=data, overwrite_output_dir=True)


def test_rows_without_a_question_a_context_or_answers_are_named(folder):
    rows = make_asked(3, seed=2)
    for column, value, says in (
        ("answers", {"text": ["a"]}, r"line 2: got {'text': \['a'\]} in column 'answers', expected"),
        ("answers", ["a"], r"line 2: got \['a'\] in column 'answers', expected"),
        ("answers", {"text": ["a"], "answer_start": ["1"]}, "line 2: got .* in column 'answers', expected"),
        ("question", None, "line 2: the row has no text in column 'question'"),
        ("context", "  ", "line 2: the row has no text in column 'context'"),
    ):
        data = str(write_jsonl(folder / "bad.jsonl", [rows[0], rows[1] | {column: value}]))
        with pytest.raises(ValueError, match=says):
            finetune(folder, train_data=data)


def test_flags_that_do_not_fit_the_questions_are_named(folder):
    data = str(write_jsonl(folder / "bad.jsonl", [{"question": "a", "text": "b", "answers": {}}]))
    with pytest.raises(
        ValueError, match="context_column: which column of .* has the context. None is called context or"
    ):
        finetune(folder, train_data=data)
    with pytest.raises(
        ValueError, match="no_answer: got false, but the question at .*train.jsonl, line .* has no answer"
    ):
        finetune(folder, no_answer="false")
    for flag, value, says in (
        ("doc_stride", -1, "doc_stride: got -1, expected 0 or more"),
        ("n_best", 0, "n_best: got 0, expected a number above 0"),
        ("scoring", "bleu", "scoring: got 'bleu', expected one of auto, squad, cmrc"),
    ):
        with pytest.raises(ValueError, match=says):
            finetune(folder, **{flag: value})
    with pytest.raises(ValueError, match="doc_stride: got 128, but a max_length of 48 leaves"):
        finetune(folder, doc_stride=128)


def test_forms_of_answers(folder):
    rows = make_asked(4, seed=3)
    rows[0]["answers"]["answer_start"] = [float(start) for start in rows[0]["answers"]["answer_start"]]  # of pandas
    pairs = [[{"text": t, "answer_start": s} for t, s in zip(*row["answers"].values(), strict=True)] for row in rows]
    listed = write_jsonl(folder / "a.jsonl", [row | {"answers": p} for row, p in zip(rows, pairs, strict=True)])
    single = [row | {"answers": p[0]} for row, p in zip(rows, pairs, strict=True)]
    asked = [
        questions.read_questions(read_file(path), "question", "context", "answers")
        for path in (write_jsonl(folder / "b.jsonl", rows), listed, write_jsonl(folder / "c.jsonl", single))
    ]
    assert asked[0] == asked[1] == asked[2] and asked[0].starts[0] == rows[0]["answers"]["answer_start"][0]
    for number, none in enumerate((None, {"text": [""], "answer_start": [0]}, [{"text": " ", "answer_start": -1}])):
        table = read_file(write_jsonl(folder / f"none{number}.jsonl", [row | {"answers": none} for row in rows]))
        found = questions.read_questions(table, "question", "context", "answers")
        assert found.starts == (-1,) * 4 and found.answers == [[]] * 4


def test_answers_in_the_cells_of_a_csv_file():
    cells = [
        "{'text': array(['b'], dtype=object), 'answer_start': array([2], dtype=int32)}",  # of pandas
        "{'text': ['b'], 'answer_start': [2]}",
        '[{"text": "b", "answer_start": 2}]',
        "{'text': array([], dtype=object), 'answer_start': array([], dtype=int32)}",
        "b",
        "",
    ]
    six = {"question": ["q"] * 6, "context": ["a b"] * 6, "answers": cells}
    table = Table({**six, "answer_start": ["2"] * 6}, [Origin("a.csv", 6, "0")])
    asked = questions.read_questions(table, "question", "context", "answers")
    assert asked.answers == [["b"]] * 3 + [[], ["b"], []] and asked.starts == (2, 2, 2, -1, 2, -1)
    with pytest.raises(ValueError, match="row 5: got 'b' in column 'answers', expected"):
        questions.read_questions(Table(six, table.origins), "question", "context", "answers")


def test_spaces_before_a_question_are_no_part_of_it():
    """As in transformers' example: for RoBERTa's and Llama's tokenizers they are tokens."""
    columns = {"question": ["  what ", "\u3000q"], "context": [" a b", "c"]}
    asked = questions.read_questions(Table(columns, [Origin("a.csv", 2, "0")]), "question", "context", None)
    assert asked.questions == ["what ", "q"] and asked.contexts == [" a b", "c"]


def test_a_dry_run_shows_answers(folder, capsys):
    main(command(flags(folder, model_config=LONG | STILL, dry_run=True, **SHAPE)))
    shown = capsys.readouterr().out
    assert "no answer here]" in shown or any(f"[{value}]" in shown for value in ("red", "very red", "tiny"))
    assert "One step: loss" in shown and "train.jsonl, line" in shown

"""Published data sets by name: rows as their files have them, as the Hub has them, and rows that are wrong."""

import json

import numpy as np
import pytest

from modelcenter.data.batching.mixture import mixed
from modelcenter.data.readers import read_file
from modelcenter.data.schemas.forms import FORMS, apply_form
from modelcenter.data.sources import find
from modelcenter.data.table import Origin, Table, concatenate

WIC = {"word": "bank", "sentence1": "A bank.", "sentence2": "The banks of it", "start1": 2, "end1": 6, "start2": 4,
       "end2": 9, "label": False}  # fmt: skip
WSC = {"text": "Mark told Pete many lies, and he then told others.", "label": True,
       "target": {"span1_index": 0, "span1_text": "Mark", "span2_index": 6, "span2_text": "he"}}  # fmt: skip
MULTIRC = {
    "idx": 3,
    "passage": {
        "text": "P.",
        "questions": [
            {"idx": 0, "question": "q?", "answers": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]},
            {"idx": 1, "question": "r?", "answers": [{"text": "c"}]},
        ],
    },
}
CLUEWSC = {"text": "小明说他 病了。他走了。", "label": "false",
           "target": {"span1_index": 0, "span1_text": "小明", "span2_index": 8, "span2_text": "他"}}  # fmt: skip
C3 = [["甲：好。", "乙：不。"], [{"question": "谁？", "choice": ["2", "1"], "answer": "1"}], "1-1"]

# Form: (published row, rows of its first task, rows of text to text).
CASES = {
    "boolq": (
        {"question": "is it", "passage": "It is.", "label": True},
        [{"text": "is it", "text_pair": "It is.", "label": "yes"}],
        [{"source": "boolq question: is it passage: It is.", "target": "yes"}],
    ),
    "cb": (
        {"premise": "p", "hypothesis": "h", "label": "neutral"},
        [{"text": "p", "text_pair": "h", "label": "neutral"}],
        [{"source": "cb premise: p hypothesis: h", "target": "neutral"}],
    ),
    "copa": (
        {"premise": "p", "choice1": "0", "choice2": "y", "question": "effect", "label": 1, "idx": 0},
        [{"context": "p", "question": "effect", "choices": ["0", "y"], "label": "y"}],
        [{"source": "copa premise: p question: effect choice1: 0 choice2: y", "target": "choice2"}],
    ),
    "wic": (
        WIC,
        [{"text": "A *bank*.", "text_pair": "The *banks* of it", "label": "no"}],
        [{"source": "wic word: bank sentence1: A *bank*. sentence2: The *banks* of it", "target": "no"}],
    ),
    "wsc": (
        WSC,
        [{"text": WSC["text"].replace(" he ", " *he* "), "text_pair": "Mark", "label": "yes"}],
        [{"source": f"wsc text: {WSC['text'].replace(' he ', ' *he* ')} noun: Mark", "target": "yes"}],
    ),
    "multirc": (
        MULTIRC,
        [
            {"text": "P.", "text_pair": "q? a", "label": "yes", "group": "3-0"},
            {"text": "P.", "text_pair": "q? b", "label": "no", "group": "3-0"},
            {"text": "P.", "text_pair": "r? c", "label": None, "group": "3-1"},
        ],
        [
            {"source": "multirc question: q? answer: a paragraph: P.", "target": "yes", "group": "3-0"},
            {"source": "multirc question: q? answer: b paragraph: P.", "target": "no", "group": "3-0"},
            {"source": "multirc question: r? answer: c paragraph: P.", "target": None, "group": "3-1"},
        ],
    ),
    "lcqmc": (
        {"0": "甲", "1": "乙", "2": "1"},
        [{"text": "甲", "text_pair": "乙", "label": "yes"}],
        [{"source": "“甲”和“乙”问的是否相同？", "target": "相同"}],
    ),
    "tnews": (
        {"label": "108", "label_desc": "news_edu", "sentence": "高考"},
        [{"text": "高考", "label": "news_edu"}],
        [{"source": "新闻：高考 这条新闻属于哪一类？", "target": "教育"}],
    ),
    "csl": (
        {"abst": "文", "keyword": ["一", "二"], "label": "0"},
        [{"text": "一；二", "text_pair": "文", "label": "no"}],
        [{"source": "摘要：文 关键词：一；二 这些都是摘要的关键词吗？", "target": "不是"}],
    ),
    "cluewsc": (
        CLUEWSC,
        [{"text": "小明说他 病了。*他*走了。", "text_pair": "小明", "label": "no"}],
        [{"source": "小明说他 病了。*他*走了。 星号里的词指的是“小明”吗？", "target": "不是"}],
    ),
    "c3": (
        {"0": C3[0], "1": C3[1], "2": C3[2]},
        [{"context": "甲：好。\n乙：不。", "question": "谁？", "choices": ["2", "1"], "label": "1"}],
        [{"source": "甲：好。\n乙：不。 问题：谁？ 选项：1. 2 2. 1", "target": "2"}],
    ),
}


def table(*rows: dict) -> Table:
    tables = [
        Table({k: [v] for k, v in row.items()}, [Origin("a.jsonl", 1, "0", [i])]) for i, row in enumerate(rows, 1)
    ]
    return concatenate(tables)


def rows_of(found: Table) -> list[dict]:
    return [{name: values[i] for name, values in found.columns.items()} for i in range(len(found))]


@pytest.mark.parametrize("name", CASES)
def test_published_rows(name):
    row, expected, written = CASES[name]
    assert rows_of(apply_form(table(row), name, FORMS[name].tasks[0])) == expected
    assert rows_of(apply_form(table(row), name, "seq2seq")) == written


def test_rows_of_the_hub():
    flat = {name: value for name, value in WSC.items() if name != "target"} | WSC["target"]
    assert rows_of(apply_form(table(flat), "wsc", "classification")) == CASES["wsc"][1]
    one = {
        "paragraph": "P.",
        "question": "q?",
        "answer": "a",
        "label": 1,
        "idx": {"paragraph": 3, "question": 0, "answer": 0},
    }
    assert rows_of(apply_form(table(one), "multirc", "classification")) == CASES["multirc"][1][:1]
    rte = Table(
        {"premise": ["p"], "hypothesis": ["h"], "label": [0]},
        [Origin("hub", 1, "0")],
        {"label": ["entailment", "not_entailment"]},
    )
    assert apply_form(rte, "rte", "classification").columns["label"] == ["entailment"]
    c3 = {"context": C3[0], "question": "谁？", "choice": ["2", "1"], "answer": "1"}
    assert rows_of(apply_form(table(c3), "c3", "multiple-choice")) == CASES["c3"][1]


def test_entities_are_the_choices_of_a_cloze():
    text = "Ann met Bob.\n@highlight\nBob, Bob Ray"
    spans = [(0, 2), (8, 10), (29, 35), (24, 26)]
    published = {
        "source": "x", "idx": 0, "passage": {"text": text, "entities": [{"start": a, "end": b} for a, b in spans]},
        "qas": [{"idx": 0, "query": "@placeholder's dog", "answers": [{"start": 8, "end": 10, "text": "Bob"},
                 {"start": 29, "end": 35, "text": "Bob Ray"}]}, {"idx": 1, "query": "by @placeholder"}],
    }  # fmt: skip
    both = {"context": "Ann met Bob.\nBob, Bob Ray", "choices": ["Ann", "Bob", "Bob Ray"]}
    asked = both | {"question": "_'s dog", "label": "Bob", "answers": ["Bob", "Bob Ray"]}
    other = both | {"question": "by _", "label": None, "answers": None}
    assert rows_of(apply_form(table(published), "record", "multiple-choice")) == [asked, other]
    hub = {"passage": text, "query": "@placeholder's dog", "entities": ["Ann", "Bob", "Bob Ray", "Bob"],
           "answers": ["Bob Ray", "Bob"]}  # fmt: skip
    assert rows_of(apply_form(table(hub), "record", "multiple-choice")) == [asked]
    # As a text T5 has them: the placeholder stays, highlights are sentences.
    written = rows_of(apply_form(table(published), "record", "seq2seq"))
    source = "record query: @placeholder's dog entities: Ann, Bob, Bob Ray passage: Ann met Bob. Bob, Bob Ray"
    assert written[0] == {"source": source, "target": "Bob", "answers": ["Bob", "Bob Ray"]}
    assert (written[1]["target"], written[1]["answers"]) == (None, None)
    unended = published["passage"] | {"text": text.replace("Bob.", "Bobo")}
    said = apply_form(table(published | {"passage": unended}), "record", "lm").columns["source"][1]
    assert said == "record query: by @placeholder entities: Ann, Bob, Bob Ray passage: Ann met Bobo. Bob, Bob Ray"
    with pytest.raises(ValueError, match=r"form record: none of the answers \['Eve'\] is among the entities"):
        apply_form(table(hub | {"answers": ["Eve"]}), "record", "multiple-choice")


CHID = {"candidates": ["画蛇添足", "守株待兔"], "content": ["甲#idiom000001#乙#idiom000002#", "丙#idiom000003#"]}


def test_answers_in_a_file_of_their_own(tmp_path):
    for name, answers in (("train", [1, 0, 1]), ("dev", [0, 0, 0])):
        rows = "\n".join(json.dumps(CHID, ensure_ascii=False) for _ in range(2))
        (tmp_path / f"{name}.json").write_text(rows, encoding="utf-8")
        named = {f"#idiom{i:06}#": n for i, n in enumerate(answers, 1)}
        (tmp_path / f"{name}_answer.json").write_text(json.dumps(named))
    source = find(str(tmp_path))
    assert source.splits == ("validation", "train")
    read = source.read("train")
    found = apply_form(read, "chid", "multiple-choice")
    own = [{"context": text, "choices": CHID["candidates"], "label": CHID["candidates"][n]}
           for text, n in (("甲_乙…", 1), ("甲…乙_", 0), ("丙_", 1))]  # fmt: skip
    assert rows_of(found) == own * 2 and found.where(4).endswith("train.json, line 2")
    written = apply_form(read, "chid", "lm")
    assert written.columns["source"][2] == "丙_ 空格处应填哪个成语？ 选项：1. 画蛇添足 2. 守株待兔"
    assert written.columns["target"][:3] == ["2", "1", "2"]
    # The file of answers is a part of the data, and rows of several files keep their places.
    assert len(found.fingerprint()["sha256"]) == 2 and found.name.endswith("train.json")
    both = concatenate([found, apply_form(source.read("dev"), "chid", "multiple-choice")])
    assert both.where(5).endswith("train.json, line 2") and both.where(6).endswith("dev.json, line 1")
    share = mixed([found, both], [1, 2])
    assert np.bincount(share.part_of_rows()).tolist() == [6, 12]
    assert len(find(str(tmp_path / "*.json")).read("train")) == 4

    (tmp_path / "train_answer.json").write_text('{"#idiom000001#": 1}')
    with pytest.raises(ValueError, match="line 1: .* the file of answers has no answer for #idiom000002#"):
        apply_form(read, "chid", "multiple-choice")
    (tmp_path / "train_answer.json").write_text("[1]")
    with pytest.raises(ValueError, match="train_answer.json: expected an object of answers"):
        apply_form(read, "chid", "multiple-choice")
    (tmp_path / "train_answer.json").unlink()
    assert apply_form(read, "chid", "multiple-choice").columns["label"] == [None] * 6


def test_answers_of_blanks_elsewhere():
    """As the Hub has them, and as FewCLUE, whose rows have a blank each."""
    tags = {"text": ["#idiom000001#", "#idiom000002#", "#idiom000003#"], "candidate_id": [1, 0, 1]}
    found = apply_form(table(CHID | {"answers": tags}), "chid", "multiple-choice")
    assert found.columns["label"] == [CHID["candidates"][i] for i in (1, 0, 1)]
    few = {"candidates": CHID["candidates"], "content": "甲#idiom#", "answer": 0}
    assert apply_form(table(few), "chid", "multiple-choice").columns["label"] == ["画蛇添足"]
    with pytest.raises(ValueError, match="no text has a blank"):
        apply_form(table(few | {"content": "甲"}), "chid", "multiple-choice")


def test_rows_keep_their_places_and_unlabelled_pairs_are_left_out(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("-", "neutral", "entailment")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = apply_form(read_file(tmp_path / "t.jsonl"), "ocnli", "classification")
    assert found.columns["label"] == ["neutral", "entailment"]
    assert [found.where(i).rpartition(", ")[2] for i in range(2)] == ["line 2", "line 3"]
    assert found.take([1]).where(0).endswith("line 3") and found.fingerprint()["rows"] == 2
    (tmp_path / "m-train.json").write_text(json.dumps([C3, C3], ensure_ascii=False), encoding="utf-8")
    assert len(apply_form(read_file(tmp_path / "m-train.json"), "c3", "multiple-choice")) == 2


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("boolq", {"question": "q", "label": True}, "line 1: the row is not of the form boolq: it has no 'passage'"),
        ("cb", {"premise": "p", "hypothesis": "h", "label": "maybe"}, "form cb: label 'maybe', expected one of entail"),
        ("wsc", WSC | {"text": "Nobody."}, "form wsc: the text does not hold the span 'he'"),
        ("ocnli", {"sentence1": "a", "sentence2": "b", "label": "-"}, "a.jsonl: no row of the form ocnli has a label"),
    ],
)  # fmt: skip
def test_rows_of_another_form_are_named(name, row, says):
    with pytest.raises(ValueError, match=says):
        apply_form(table(row), name, "classification")

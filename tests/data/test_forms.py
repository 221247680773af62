"""Published data sets by name: rows as their files have them, as the Hub has them, and rows that are wrong."""

import json

import pytest

from modelcenter.data.forms import FORMS, apply_form
from modelcenter.data.readers import Origin, Table, concatenate, read_file

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
def test_mistakes(name, row, says):
    with pytest.raises(ValueError, match=says):
        apply_form(table(row), name, "classification")

"""SQuAD's nested questions as rows."""

import json

import pytest
from file_toys import write
from span_toys import make_asked, nested

from modelcenter.data.readers import read_file


@pytest.mark.parametrize("form", ["object", "list", "indented"])
def test_squad(tmp_path, form):
    rows = make_asked(6, none=0.4)
    whole = nested(rows)
    text = json.dumps(whole["data"] if form == "list" else whole, indent=1 if form == "indented" else None)
    table = read_file(write(tmp_path / "a.json", text))
    assert list(table.columns) == ["id", "title", "context", "question", "answers"] and len(table) == 6
    for i, row in enumerate(rows):
        assert {name: table.columns[name][i] for name in row} == row
    assert not all(row["answers"]["text"] for row in rows)


def test_squad_of_cmrc_and_without_answers(tmp_path):
    article = {"context_id": "T", "context_text": "\u6587", "qas": [{"query_text": "\u4f55", "query_id": "T_0"}]}
    table = read_file(write(tmp_path / "a.json", json.dumps([article])))
    assert table.columns == {"id": ["T_0"], "title": [None], "context": ["\u6587"], "question": ["\u4f55"]}
    for answers in (["\u6587"], [{"text": "\u6587"}]):
        article["qas"][0]["answers"] = answers
        with pytest.raises(ValueError, match="article 1, paragraph 1, question 1: answers .* expected"):
            read_file(write(tmp_path / "b.json", json.dumps([article])))
    with pytest.raises(ValueError, match="article 1, paragraph 1: got no context, expected a text"):
        read_file(write(tmp_path / "c.json", json.dumps([{"paragraphs": [{"qas": []}]}])))
    with pytest.raises(ValueError, match="question 1: got no question, expected a text"):
        read_file(write(tmp_path / "d.json", json.dumps([{"context": "a", "qas": [{}]}])))


@pytest.mark.parametrize(
    ("article", "says"),
    [
        ({"paragraphs": ["a text"]}, "article 1: got .* as paragraphs, expected a list of objects"),
        ({"context": "a", "qas": ["why"]}, "paragraph 1: got .* as qas, expected a list of objects"),
        ({"paragraphs": [{"context": "a", "qas": None}]}, "paragraph 1: got None as qas, expected"),
        ({"context": "a", "qas": [{"question": "b", "answers": 3}]}, "question 1: answers 3, expected"),
        ({"context": "a", "qas": [{"question": "b", "answers": {"text": "a"}}]}, "question 1: answers .*, expected"),
    ],
)
def test_something_else_in_squad(tmp_path, article, says):
    with pytest.raises(ValueError, match=f"a.json, article 1.*{says}|a.json, {says}"):
        read_file(write(tmp_path / "a.json", json.dumps([article])))


@pytest.mark.parametrize("paragraphs", [None, "a"])
def test_squad_with_null(tmp_path, paragraphs):
    """Exporters write null for what is not there; a paragraph may have something else under that name."""
    asked = [{"question": "b", "answers": None}, {"question": "c", "answers": [{"text": "a", "answer_start": 0}]}]
    article = {"paragraphs": paragraphs, "context": "a", "qas": asked}
    table = read_file(write(tmp_path / "a.json", json.dumps([article])))
    assert table.columns["answers"] == [None, {"text": ["a"], "answer_start": [0]}]

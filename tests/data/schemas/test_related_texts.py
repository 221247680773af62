"""Rows of texts that belong together: which columns they are in, and what the cells hold."""

import math

import numpy as np
import pytest
from file_toys import table

from modelcenter.data.schemas.related_texts import (
    RelatedColumns,
    find_columns_to_read,
    find_related_columns,
    read_lists,
    read_related_texts,
)

TEXTS = ["one two", "three"]


def columns(names, **more):
    return table(**dict.fromkeys(names.split(), TEXTS), **more)


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        ("id query positive negative", {}, ("query", "positive", "negative", None)),
        ("Anchor Positive Neg_1 neg2 HARD_NEGATIVES", {}, ("Anchor", "Positive", "Neg_1,neg2,HARD_NEGATIVES", None)),
        ("positive query anchor", {}, ("anchor", "positive", None, None)),
        ("Query query positive", {}, ("Query", "positive", None, None)),
        ("document query", {"anchor": "document"}, ("document", "query", None, None)),
        ("question answer label", {}, ("question", "answer", None, "label")),
        ("sentence1 sentence2 score similarity", {}, ("sentence1", "sentence2", None, "score")),
        ("sentence1 sentence2 score", {"score": "score"}, ("sentence1", "sentence2", None, "score")),
        ("a b neg score", {"anchor": "a", "positive": "b"}, ("a", "b", "neg", None)),  # not both
        ("a b neg score", {"anchor": "a", "positive": "b", "score": "score"}, ("a", "b", None, "score")),
        ("a b neg", {"anchor": "a"}, ("a", "b", "neg", None)),  # the only one that is left
        ("a b neg", {"positive": "a"}, ("b", "a", "neg", None)),
        ("text title", {"positive": "text"}, ("title", "text", None, None)),
        ("query positive pos x y", {"negative": "x, y"}, ("query", "positive", "x,y", None)),
        ("query positive document", {"negative": "positive"}, ("query", "document", "positive", None)),
        ("title body text", {"score": "body"}, ("title", "text", None, "body")),
        ("query positive negative", {"anchor": "negative"}, ("negative", "positive", None, None)),
        ("sentence1 sentence2 score", {"anchor": "sentence1", "positive": "score"}, ("sentence1", "score", None, None)),
    ],
)  # fmt: skip
def test_columns_by_name(names, given, expected):
    found = find_related_columns(columns(names), **given)
    assert tuple(found.roles().values()) == expected


def test_a_column_may_have_a_comma_in_its_name():
    data = table(query=TEXTS, positive=TEXTS, **{"x,y": TEXTS})
    assert find_related_columns(data, negative="x,y").negatives == ("x,y",)


@pytest.mark.parametrize(
    ("names", "given", "says"),
    [
        ("query positive", {"negative": "positiv"}, "negative_column: .* no column 'positiv', .*did you mean 'pos"),
        ("query positive", {"anchor": "query", "negative": "query"}, r"'query' has two roles \(anchor, negative\)"),
        ("query positive neg score", {"negative": "neg", "score": "score"}, "got neg together with score_column score"),
        ("a b", {}, "anchor_column: which column of a.jsonl is the anchor.*'a', 'b'"),
        ("a b c", {"anchor": "a"}, "positive_column: which column of a.jsonl is the positive"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there(names, given, says):
    with pytest.raises(ValueError, match=says):
        find_related_columns(columns(names), **given)


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        ("query answer", (None, None), ("query", "answer")),
        ("query answer", ("query", None), ("query", None)),
        ("query answer", (None, "answer"), (None, "answer")),
        ("query answer", ("answer", "query"), ("answer", "query")),
        ("id sentence", (None, None), (None, "sentence")),
        ("anything", (None, None), (None, "anything")),
    ],
)
def test_columns_that_a_trained_model_reads(names, given, expected):
    assert find_columns_to_read(columns(names), *given) == RelatedColumns(*expected)


def test_texts_of_lists_as_files_spell_them():
    """An empty list is none, also in a cell of a CSV; a text in brackets is a text."""
    data = table(a=["['x', 'y']", "[]", "[sic] z"], b=["", None, math.nan], c=[["u", None, ""], [], ("v", 3)])
    found = read_lists(data, ("a", "b", "c"), needed=False)
    assert found.texts == ["x", "y", "u", "[sic] z", "v", "3"]
    assert found.first.tolist() == [0, 3, 3, 6] and found.counts.tolist() == [3, 0, 3]
    assert read_lists(data, (), needed=False).first.tolist() == [0, 0, 0, 0]


def test_rows_are_read():
    data = table(q=["a", "b"], p=[["c", "d"], "e"], n=["", ["f"]])
    texts = read_related_texts(data, RelatedColumns("q", "p", ("n",)))
    assert texts.anchors == ["a", "b"] and texts.scores is None
    assert (texts.positives.texts, texts.positives.counts.tolist()) == (["c", "d", "e"], [2, 1])
    assert (texts.negatives.texts, texts.negatives.counts.tolist()) == (["f"], [0, 1])
    scored = read_related_texts(table(q=["a", "b"], p=["c", "d"], s=["1", 0.5]), RelatedColumns("q", "p", score="s"))
    assert np.array_equal(scored.scores, [1, 0.5])
    none = read_related_texts(table(q=[], p=[], s=[]), RelatedColumns("q", "p", score="s"))
    assert len(none.anchors) == len(none.scores) == 0


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"q": ["a", ["b", "c"]]}, "line 2: the row has 2 texts in column 'q', expected one$"),
        ({"p": ["c", ["d", "e"]]}, "line 2: the row has 2 texts in column 'p', expected one in a row with a score"),
        ({"p": ["c", []]}, "line 2: the row has no text in column 'p'"),
        ({"q": ["a", {"x": 1}]}, "line 2: the row has {'x': 1}, expected texts, in column 'q'"),
        ({"s": [1, "inf"]}, "line 2: the row has 'inf', expected a number, in column 's'"),
        ({"s": [1, None]}, "line 2: the row has None, expected a number"),
        ({"s": [1, 1.0]}, "all rows of a.jsonl have 1 in column 's', which says nothing about similarity"),
    ],
)
def test_rows_that_cannot_be_read(cells, says):
    data = table(**{"q": ["a", "b"], "p": ["c", "d"], "s": [1, 2], **cells})
    with pytest.raises(ValueError, match=says):
        read_related_texts(data, RelatedColumns("q", "p", score="s"))


def test_classes_are_scores_where_there_are_two():
    data = table(q=["a", "b"], p=["c", "d"], s=[1, 0])
    data.classes["s"] = ["not_duplicate", "duplicate"]
    assert read_related_texts(data, RelatedColumns("q", "p", score="s")).scores.tolist() == [1, 0]
    data.classes["s"] = ["entailment", "neutral", "contradiction"]
    with pytest.raises(ValueError, match="'s' of a.jsonl holds classes .entailment, neutral, contradiction."):
        read_related_texts(data, RelatedColumns("q", "p", score="s"))

"""Which columns are read and written, and what they hold."""

import pytest
from file_toys import table

from modelcenter.data.schemas.text_pairs import PairColumns, column_texts, find_pair_columns

TEXTS = ["one two", "three"]
BOTH = [{"en": "one", "de": "eins"}, {"en": "two", "de": "zwei"}]


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        ("id document summary", {}, ("document", "summary")),
        ("id highlights article", {}, ("article", "highlights")),
        ("mr ref", {}, ("mr", "ref")),
        ("Source Target", {}, ("Source", "Target")),
        ("summary text", {}, ("text", "summary")),
        ("dialogue id summary", {}, ("dialogue", "summary")),
        ("document summary title", {"target": "title"}, ("document", "title")),
        ("a b", {"source": "b"}, ("b", "a")),
        ("a b", {"target": "b"}, ("a", "b")),
        ("a b c", {"source": "c", "target": "a"}, ("c", "a")),
        ("en de", {"source_lang": "de", "target_lang": "en"}, ("de", "en")),
        ("document summary", {"labelled": False}, ("document", None)),
        ("text", {"labelled": False}, ("text", None)),
        ("anything", {"labelled": False}, ("anything", None)),
        ("id sentence", {"labelled": False}, ("sentence", None)),
    ],
)
def test_columns_by_name(names, given, expected):
    found = find_pair_columns(table(**dict.fromkeys(names.split(), TEXTS)), **given)
    assert (found.source, found.target) == expected and found.source_lang is None


def test_translations():
    data = table(id=["a", "b"], translation=BOTH)
    found = find_pair_columns(data, source_lang="de", target_lang="en")
    assert found == PairColumns("translation", "translation", "de", "en")
    assert list(column_texts(data, found.source, "de")) == ["eins", "zwei"]
    assert list(column_texts(data, found.target, "en")) == ["one", "two"]
    assert found.shown() == "source 'translation'['de'], target 'translation'['en']"
    # What a run found is found again, in rows that lack the translation too.
    assert find_pair_columns(data, "translation", "translation", "de", "en") == found
    new = table(translation=[{"de": "drei"}])
    given = {"source_lang": "de", "target_lang": "en", "labelled": False}
    assert find_pair_columns(new, "translation", **given) == PairColumns("translation", None, "de", None)
    assert find_pair_columns(new, **given) == PairColumns("translation", None, "de", None)


@pytest.mark.parametrize(
    ("columns", "given", "says"),
    [
        ({"mr": TEXTS, "ref": TEXTS}, {"source": "m"}, "source_column: a.jsonl has no column 'm', .*did you mean 'mr'"),
        ({"a": TEXTS, "b": TEXTS}, {}, "source_column: which column of a.jsonl is the source.*'a', 'b'"),
        ({"a": TEXTS, "b": TEXTS, "c": TEXTS}, {"source": "a"}, "target_column: which column of a.jsonl is the target"),
        ({"a": TEXTS}, {"source": "a", "target": "a"}, "'a' is both source and target"),
        ({"a": TEXTS, "b": TEXTS}, {"labelled": False}, "source_column: which .*Give source_column$"),
        ({"translation": BOTH}, {}, "source_lang: is needed: column 'translation' of a.jsonl holds de, en"),
        ({"translation": BOTH}, {"source_lang": "de", "target_lang": "fr"}, "target_lang: got 'fr': .* holds de, en"),
        ({"translation": BOTH}, {"source_lang": "de", "target_lang": "de"}, "is both source and target"),
    ],
)
def test_columns_and_languages_that_are_not_found_are_asked_for(columns, given, says):
    with pytest.raises(ValueError, match=says):
        find_pair_columns(table(**columns), **given)


def test_what_rows_hold():
    assert list(column_texts(table(a=["x", None, 3]), "a")) == ["x", None, "3"]
    assert list(column_texts(table(a=[{"en": "x"}, None, {"de": "y"}]), "a", "en")) == ["x", None, None]
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the row has \['y'\], expected a text, in column 'a'"):
        list(column_texts(table(a=["x", ["y"]]), "a"))
    with pytest.raises(ValueError, match="line 1: the row has 'x', expected texts by language, one of them en"):
        list(column_texts(table(a=["x"]), "a", "en"))

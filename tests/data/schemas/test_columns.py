"""Which column is which: by name, by content, or asked for."""

import pytest

from modelcenter.data.schemas.columns import Columns, find_columns
from modelcenter.data.table import Origin, Table


def table(**columns) -> Table:
    rows = len(next(iter(columns.values())))
    return Table(columns, [Origin("a.csv", rows, "")])


TEXTS = [f"a text of some length, number {i}" for i in range(30)]
BINARY = [str(i % 2) for i in range(30)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": TEXTS, "label": BINARY}, Columns("text", None, "label")),
        ({"Sentence": TEXTS, "idx": list(range(30)), "Label": BINARY}, Columns("Sentence", None, "Label")),
        ({"0": BINARY, "1": TEXTS}, Columns("1", None, "0")),
        ({"0": TEXTS, "1": BINARY}, Columns("0", None, "1")),
        (
            {"id": [f"r{i}" for i in range(30)], "what": BINARY, "body of it": TEXTS},
            Columns("body of it", None, "what"),
        ),
        # Of long texts an id is none, and one of three times the length is the text.
        (
            {"id": [f"{i:060d}" for i in range(30)], "what": BINARY, "body of it": TEXTS},
            Columns("body of it", None, "what"),
        ),
        (
            {"note": [f"n{i}" for i in range(30)], "what": BINARY, "body of it": TEXTS},
            Columns("body of it", None, "what"),
        ),
        ({"premise": TEXTS, "hypothesis": TEXTS, "label": BINARY}, Columns("premise", "hypothesis", "label")),
        ({"question": TEXTS, "label": BINARY, "sentence": TEXTS}, Columns("question", "sentence", "label")),
        ({"label": BINARY, "passage": TEXTS, "query": TEXTS}, Columns("query", "passage", "label")),
        ({"context": TEXTS, "question": TEXTS, "label": BINARY}, Columns("question", "context", "label")),
        ({"text": TEXTS, "hypothesis": TEXTS, "label": BINARY}, Columns("text", "hypothesis", "label")),
        ({"content": TEXTS, "stars": [i % 5 + 1 for i in range(30)]}, Columns("content", None, "stars")),
        ({"text": TEXTS, "labels": [[0], [1]] * 15}, Columns("text", None, "labels")),
        ({"a": [None, *TEXTS[1:]], "b": [None, "x", "y"] * 10}, Columns("a", None, "b")),
    ],
)
def test_found(columns, expected):
    assert find_columns(table(**columns)) == expected


def test_columns_of_zeros_and_ones_are_labels():
    found = table(text=["a", "b", "c"], toxic=["1", "0", "0"], threat=[True, 0.0, 1])
    assert find_columns(found, label="toxic, threat") == Columns("text", None, "toxic, threat")
    assert found.columns["toxic, threat"] == [["toxic", "threat"], [], ["threat"]]
    assert found.classes == {"toxic, threat": ["toxic", "threat"]}
    with pytest.raises(ValueError, match=r"a\.csv, row 2: got 0\.5 in column 'threat', expected 0 or 1"):
        find_columns(table(text=["a", "b"], toxic=[1, 0], threat=[1, 0.5]), label="toxic,threat")
    with pytest.raises(ValueError, match="Give label_column, or toxic,threat if rows may have several"):
        find_columns(table(text=TEXTS, toxic=BINARY, threat=BINARY[::-1]))


def test_given_names_win():
    data = table(text=TEXTS, label=BINARY, sentence2=TEXTS, other=TEXTS, sentence1=TEXTS)
    assert find_columns(data, "other", None, None) == Columns("other", None, "label")
    assert find_columns(data, "other", "text", "label") == Columns("other", "text", "label")
    assert find_columns(data, "text", labelled=False) == Columns("text", None, None)


def test_errors_name_the_columns():
    data = table(text=TEXTS, label=BINARY)
    with pytest.raises(
        ValueError, match="text_column: a.csv has no column 'txt', it has 'text', 'label'; did you mean 'text'"
    ):
        find_columns(data, "txt")
    with pytest.raises(ValueError, match="label_column: a.csv has no column 'zzz', it has 'text', 'label'$"):
        find_columns(data, label="zzz")
    with pytest.raises(ValueError, match="text_pair_column: a.csv has no column"):
        find_columns(data, text_pair="b")
    with pytest.raises(ValueError, match="two roles"):
        find_columns(data, "text", "text")


def test_ambiguity_is_asked_about():
    with pytest.raises(
        ValueError, match=r"several columns have few distinct values: 'a' \(2\), 'b' \(3\). Give label_column"
    ):
        find_columns(table(text=TEXTS, a=BINARY, b=["x", "y", "z"] * 10))
    with pytest.raises(ValueError, match="no column is called a label or has between 2 and 3 distinct values"):
        find_columns(table(text=TEXTS, number=list(range(30))))
    # Of two rows every column has few values: a text is no label for it.
    with pytest.raises(ValueError, match="is the label.* has 2 distinct values; the only column is 'text'. Give"):
        find_columns(table(text=["a", "b"]))
    with pytest.raises(
        ValueError, match="is the label.* has 2 distinct values; the columns are 'text', 'review'. Give"
    ):
        find_columns(table(text=["a", "b"], review=["a", "b"]))
    with pytest.raises(ValueError, match="which column of a.csv is the text"):
        find_columns(table(label=BINARY, a=TEXTS, b=TEXTS))
    with pytest.raises(ValueError, match="has no column of texts"):
        find_columns(table(label=BINARY, a=list(range(30))))

"""Parquet: names of classes, texts stored as bytes, damaged files."""

import json
from datetime import date
from decimal import Decimal

import pytest
from file_toys import read

from modelcenter.data.readers import read_file
from modelcenter.data.readers.parquet import rows_from
from modelcenter.data.schemas.labels import find_labels
from modelcenter.data.schemas.text_pairs import column_texts
from modelcenter.data.streams import Cursor, FileRows
from modelcenter.training.tasks.column_roles import strings


def test_parquet_with_class_names(tmp_path):
    import pyarrow
    import pyarrow.parquet

    about = {
        "info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}, "text": {"_type": "Value"}}}
    }
    table = pyarrow.table({"text": ["a", "b"], "label": [1, 0]})
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(about)}), str(tmp_path / "a.parquet")
    )
    found = read_file(tmp_path / "a.parquet")
    assert found.columns == {"text": ["a", "b"], "label": [1, 0]}
    assert found.classes == {"label": ["no", "yes"]}
    assert found.where(1).endswith("a.parquet, row 2")
    whole = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(ValueError, match="b.parquet: not a parquet file, or a truncated or damaged one"):
        read(tmp_path, "b.parquet", whole[: len(whole) // 2])


def test_parquet_of_texts_as_bytes(tmp_path):
    """As Impala and Hive write texts; bytes that are no text stay bytes, for those who look."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    text = "\u597d film"
    columns = {
        "text": pyarrow.array([text.encode(), b"bad", None], pyarrow.binary()),
        "label": pyarrow.array([b"pos", b"neg", b"pos"], pyarrow.large_binary()),
        "words": pyarrow.array([[b"a", text.encode()], [], None], pyarrow.list_(pyarrow.binary())),
        "said": pyarrow.array([{"x": b"a", "n": 1}] * 3, pyarrow.struct({"x": pyarrow.binary(), "n": pyarrow.int64()})),
        "kind": pyarrow.array([b"x", b"y", None]).dictionary_encode(),
        "view": pyarrow.array([b"x", b"y", None], pyarrow.binary_view()),
        "many": pyarrow.array([[b"a"], [], None], pyarrow.large_list(pyarrow.binary())),
        "image": pyarrow.array([b"\xff\x00", b"a", b"b"], pyarrow.binary()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), str(tmp_path / "a.parquet"), row_group_size=2)
    expected = {
        "text": [text, "bad", None],
        "label": ["pos", "neg", "pos"],
        "words": [["a", text], [], None],
        "said": [{"x": "a", "n": 1}] * 3,
        "kind": ["x", "y", None],
        "view": ["x", "y", None],
        "many": [["a"], [], None],
    }
    table = read_file(tmp_path / "a.parquet")
    assert table.columns == {**expected, "image": [b"\xff\x00", b"a", b"b"]}
    rows = [row for row, _ in FileRows([tmp_path / "a.parquet"]).read(Cursor(0, 1))]
    assert [{name: row[name] for name in expected} for row in rows] == [
        {name: values[i] for name, values in expected.items()} for i in (1, 2)
    ]
    with pytest.raises(ValueError, match=r"a.parquet, row 1: the row has b'.xff.x00', expected a text, in column 'ima"):
        strings(table, "image")
    with pytest.raises(ValueError, match=r"row 1: the row has b'.xff.x00', expected a text, in column 'image'"):
        list(column_texts(table, "image"))
    with pytest.raises(ValueError, match=r"row 1: the label is b'.xff.x00', expected a text"):
        find_labels(table.columns["image"], table.where)


def test_decimals_are_numbers(tmp_path):
    """As databases export them: labels keep the order of numbers, and fractions are values to predict."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    numbers = [Decimal(i % 12) for i in range(48)]
    kinds = {"whole": pyarrow.decimal128(10, 0), "places": pyarrow.decimal128(10, 2)}
    columns = {name: pyarrow.array(numbers, kind) for name, kind in kinds.items()}
    columns["part"] = pyarrow.array([number / 4 for number in numbers], pyarrow.decimal128(10, 2))
    pyarrow.parquet.write_table(pyarrow.table(columns), str(tmp_path / "a.parquet"))
    table = read_file(tmp_path / "a.parquet")
    for name in kinds:
        assert find_labels(table.columns[name], table.where).names == tuple(map(str, range(12)))
    assert find_labels(table.columns["part"], table.where).problem_type == "regression"
    assert table.columns["part"][:3] == [0.0, 0.25, 0.5]
    assert [row["whole"] for row, _ in FileRows([tmp_path / "a.parquet"]).read(Cursor(0, 46))] == [10, 11]


def test_nan_is_no_value(tmp_path):
    """pandas and polars write it for what a row lacks; as a text it would be "nan"."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    nan = float("nan")
    columns = {
        "text": pyarrow.array([1.5, nan, None]),
        "half": pyarrow.array([1, nan, float("inf")], pyarrow.float32()),
        "kind": pyarrow.array([2.0, nan, 2.0]).dictionary_encode(),
        "choices": pyarrow.array([[1.0, nan], [], None]),
        "pair": pyarrow.array([{"en": nan, "many": [{"x": nan}]}] * 3),
        "spelt": pyarrow.array(["nan", "NaN", "a"]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), str(tmp_path / "a.parquet"))
    expected = {
        "text": [1.5, None, None],
        "half": [1.0, None, float("inf")],
        "kind": [2.0, None, 2.0],
        "choices": [[1.0, None], [], None],
        "pair": [{"en": None, "many": [{"x": None}]}] * 3,
        "spelt": ["nan", "NaN", "a"],
    }
    table = read_file(tmp_path / "a.parquet")
    assert table.columns == expected
    rows = [row for row, _ in FileRows([tmp_path / "a.parquet"]).read(Cursor(0, 1))]
    assert rows == [{name: values[i] for name, values in expected.items()} for i in (1, 2)]
    with pytest.raises(ValueError, match="a.parquet, row 2: the row has no text in column 'text'"):
        strings(table, "text")
    assert list(column_texts(table, "text")) == ["1.5", None, None]


def test_dates_that_python_cannot_hold(tmp_path):
    """Databases write the last or the first day of the calendar for what has no end or no beginning."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    second = 10**6
    columns = {
        "text": ["a", "b"],
        "valid_to": pyarrow.array([253402300799 * second, None], pyarrow.timestamp("us", tz="Asia/Shanghai")),
        "day": pyarrow.array([5_000_000, 1], pyarrow.date32()),
        "usual": pyarrow.array([1, 2], pyarrow.date32()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), str(tmp_path / "a.parquet"))
    found = read_file(tmp_path / "a.parquet").columns
    assert found["text"] == ["a", "b"] and found["usual"] == [date(1970, 1, 2), date(1970, 1, 3)]
    assert found["valid_to"][0].startswith("10000-01-01 07:59:59") and found["valid_to"][1] is None
    assert found["day"] == ["15659-07-15", "1970-01-02"]
    assert [row["text"] for row, _ in FileRows([tmp_path / "a.parquet"]).read()] == ["a", "b"]


def test_rows_of_large_groups_from_any_row_on(tmp_path):
    """Batches of 1,024 rows are read of a group, and those before the row left out."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(2600))}), str(path), row_group_size=2500)
    for start in (0, 1, 1024, 1100, 2048, 2300, 2499, 2500, 2599, 2600):
        assert [row["n"] for row in rows_from(path, start)] == list(range(start, 2600)), start


def test_two_columns_of_one_name(tmp_path):
    """pyarrow keeps the last of them in rows, and refuses to read the file whole."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([["a"], [1], ["b"]], names=["text", "label", "text"]), path)
    for reading in (lambda: read_file(path), lambda: next(FileRows([path]).read())):
        with pytest.raises(ValueError, match="a.parquet: 'text' names two columns"):
            reading()


def test_a_damaged_page_of_parquet_names_the_file(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"a film of {i * i} words" for i in range(500)]})
    pyarrow.parquet.write_table(table, str(path), use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + b"\xff" * 400 + whole[460:])
    for read_all in (read_file, lambda path: list(FileRows([path]).read())):
        with pytest.raises(ValueError, match="a.parquet: not a parquet file, or a truncated or damaged one"):
            read_all(path)
    path.write_bytes(whole[:-60] + b"\xff" * 40 + whole[-20:])
    with pytest.raises(ValueError, match=r"^[^\n]+a.parquet: not a parquet file, [^\n]+\)$"):
        read_file(path)
    with pytest.raises(ValueError, match="b.parquet.gz: parquet is streamed from uncompressed files"):
        FileRows([tmp_path / "b.parquet.gz"])

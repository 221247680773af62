"""Rows one after the other: the same from any cursor on, and the same as the readers that see whole files."""

import bz2
import gzip
import json
import lzma
import sys
import types

import pytest

from modelcenter.data.readers import read_file
from modelcenter.data.streams import START, Cursor, FileRows, HubRows, Texts, open_rows

ROWS = [{"text": f"row {i} caf\u00e9 \u2028", "label": i} for i in range(7)]


def parquet(path, rows, group=3):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path), row_group_size=group)


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("one\r\ntwo\n\n \nthree\nfour", encoding="utf-8", newline="")
    (tmp_path / "c.csv").write_bytes(b'text,label\n"a, b\nc ""d""",1\n\n"e\r\nf\r\n",1\r\nlast,0\r\n')
    (tmp_path / "d.tsv").write_text('1\t"a\n0\tb"\n1\tc\n')
    parquet(tmp_path / "e.parquet", ROWS)
    return tmp_path


def everything(source, cursor=START):
    return [row for row, _ in source.read(cursor) if row is not None]


NAMES = ["a.jsonl", "b.txt", "c.csv", "d.tsv", "e.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_the_reader(folder, name):
    table = read_file(folder / name)
    expected = [dict(zip(table.columns, values, strict=True)) for values in zip(*table.columns.values(), strict=True)]
    assert everything(FileRows([folder / name])) == expected


@pytest.mark.parametrize(
    "content",
    [
        'text\tlabel\n"say ""a"" to\tb"\t1\nplain\t0\n',
        '"text"\t"label"\r\n"a\u2028b"\t"1"\r\n""\t"0"\r\n',  # not a line end to csv
        "text\tlabel\n" + "a\t0\n" * 998 + '"b ""c""\nd\n"\t1\nlast\t0\n',  # a field that line 1,000 begins
        'text\tlabel\n"from the start\t1\nthe "middle" of it\t0\n"\t1\n',
        "text\tlabel\n" + "a\t0\n" * 998 + '"b\t1\nlast\t0\n',  # a stray quote in line 1,000
        'text\tlabel\n"say ""a"""\t 1\n',  # a space after a tab is text
        "text\tlabel\na\u2028b\t1\n",
        'text\tlabel\n"a, b"\t1\n \t \nc\t0\n',
        "\n",
    ],
)
def test_quotes_of_tsv_are_those_of_the_reader(content, tmp_path):
    (tmp_path / "a.tsv").write_bytes(content.encode())
    columns = read_file(tmp_path / "a.tsv").columns if content.strip() else {}
    expected = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    files = FileRows([tmp_path / "a.tsv"])
    assert everything(files) == expected
    rows = list(files.read())
    assert all(list(files.read(cursor)) == rows[i:] for i, (_, cursor) in enumerate(rows, 1) if i % 200 == 1)


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "no bytes"])
def test_from_every_cursor_on(folder, unit, plain):
    source = FileRows([folder / name for name in (NAMES if unit == "line" else ["b.txt", "b.txt"])], unit)
    rows = list(source.read())
    for i, (_, cursor) in enumerate(rows):
        start = cursor if plain else cursor._replace(byte=0)
        assert list(source.read(start)) == rows[i + 1 :], cursor


def test_units_of_text(folder):
    for unit, expected in [
        ("line", ["one", "two", "three", "four"]),
        ("paragraph", ["one\ntwo", "three\nfour"]),
        ("file", ["one\ntwo\n\n \nthree\nfour"]),
    ]:
        assert [row["text"] for row in everything(FileRows([folder / "b.txt"], unit))] == expected


def test_lines_of_spaces_and_a_line_without_an_end(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n \t\n{"a": 2}')
    assert everything(FileRows([tmp_path / "a.jsonl"])) == [{"a": 1}, {"a": 2}]
    (tmp_path / "a.txt").write_text("all there is")
    assert everything(FileRows([tmp_path / "a.txt"])) == [{"text": "all there is"}]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed(folder, suffix):
    raw = (folder / "a.jsonl").read_bytes()
    if suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        packed = pyarrow.compress(raw, "zstd", asbytes=True)
    else:
        packed = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(raw)
    path = folder / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    assert read_file(path).columns == read_file(folder / "a.jsonl").columns
    source = FileRows([path])
    rows = list(source.read())
    assert [row for row, _ in rows if row] == ROWS
    assert list(source.read(rows[4][1])) == rows[5:]
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=rf"a.jsonl{suffix}: the {suffix[1:]} data are damaged or truncated"):
        everything(source)
    with pytest.raises(ValueError, match="damaged or truncated"):
        read_file(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"ok\ncaf\xe9\n", r"a.txt, line 2, byte 6: not UTF-8 \(0xe9\); convert the line"),
        ("a.txt", "x".encode("utf-16"), "got UTF-16, but streams are read as UTF-8; convert it with `iconv"),
        ("a.txt", b"one\rtwo\r", r"a.txt: lines end with .* needs line feeds; convert them with `tr '.r' '.n'`"),
        ("a.csv", b"text,label\ra,1\rb,0", "a.csv: lines end with carriage returns, as on old Macs"),
        ("a.jsonl", b'{"a": 1}\n{"a"}\n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\\ud83d"}\n', r"a.jsonl, line 2: not valid JSON \(.ud83d is half a character"),
        ("a.json", b'[\n{"a": 1}]\n', "a JSON array cannot be streamed"),
        ("a.json", b'[{"a": 1}, {"a": 2}]', "expected one JSON object per line; a JSON array cannot be streamed"),
        ("a.jsonl", b"3\n", "a.jsonl, line 1: got 3, expected one JSON object"),
        ("a.csv", b"text,label\na,1\nb\n", "a.csv, row 3: 1 fields where the first row has 2"),
        ("a.csv", b'text,label\n"a,1\nb\n', "quoted field is not closed"),
        ("a.parquet", b"x", "not a parquet file"),
    ],
)
def test_wrong_content(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        everything(FileRows([tmp_path / name]))


def test_what_cannot_be_streamed(tmp_path):
    with pytest.raises(ValueError, match="rows are streamed from .jsonl, .ndjson, .json, .txt"):
        FileRows([tmp_path / "a.xls"])
    with pytest.raises(
        ValueError, match="document: got paragraph, which is for txt files, but .*b.csv is divided into rows"
    ):
        FileRows([tmp_path / "a.txt", tmp_path / "b.csv"], "paragraph")
    with pytest.raises(
        ValueError, match="document: got file, which is for txt files, but owner/set is divided into rows"
    ):
        open_rows(["owner/set"], None, "train", "file")


def test_rows_without_a_text_are_told_of(tmp_path):
    """Once for each reason, with the place; a file without the column is not lost in silence."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": " \\t"}\n{"text": ""}\n{"text": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"content": "c", "id": 1}\n{"content": "d", "id": 2}\n{"text": null}\n')
    files, told = FileRows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]), []
    texts = Texts(files, "text", told.append)
    rows = list(texts.read())
    assert [row and row["text"] for row, _ in rows] == ["a", None, None, None, "b", None, None, None]
    assert [after for _, after in rows] == [after for _, after in files.read()]
    assert told == [
        f"{tmp_path / 'a.jsonl'}, line 3: the row has no text in column 'text'; such rows are left out",
        f"{tmp_path / 'b.jsonl'}, line 1: the row has no column 'text' (it has content, id); such rows are left out",
    ]
    assert list(texts.read(rows[4][1])) == rows[5:] and len(told) == 2
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": ["b"]}\n')
    with pytest.raises(ValueError, match=r"b.jsonl, line 2: column 'text' holds \['b'\], expected a text"):
        everything(texts)


def test_places_and_fingerprint(folder):
    source = FileRows([folder / "a.jsonl", folder / "e.parquet"])
    assert source.where(Cursor(0, 2)).endswith("a.jsonl, line 3")
    assert source.where(Cursor(1, 2)).endswith("e.parquet, row 3")
    (folder / "t.tsv").write_text("text\tlabel\na\t\n\tb\n")
    told = []
    everything(Texts(FileRows([folder / "t.tsv"]), "text", told.append))
    assert told[0].startswith(f"{folder / 't.tsv'}, row 2: ")  # a header is a line, but no row
    before = source.fingerprint()
    text = (folder / "a.jsonl").read_text(encoding="utf-8")
    (folder / "a.jsonl").write_text(text[:-2], encoding="utf-8")
    assert source.fingerprint() != before


def test_a_data_set_that_is_not_there(monkeypatch):
    def load(*_, **__):
        raise ConnectionError("Couldn't reach 'nofile' on the Hub\nmore")

    library = types.SimpleNamespace(config=types.SimpleNamespace(HF_HUB_OFFLINE=True), load_dataset=load)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(
        ValueError, match="nofile: neither a local file or directory nor an accessible .* of the Hub: it is not in the"
    ):
        list(HubRows("nofile").read())


def test_a_misspelt_folder_without_the_library_of_hub_data_sets(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (folder / "corpus").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    says = r"corpsu: no such file or directory; .* `pip install datasets`\. Did you mean 'corpus'\?"
    with pytest.raises(ValueError, match=says):
        next(open_rows(["corpsu"], None, "train").read())


def test_hub_rows_of_the_library_itself(folder, monkeypatch):
    datasets = pytest.importorskip("datasets")
    of_files = datasets.load_dataset

    def load(name, config, split, streaming):
        assert (name, config, split, streaming) == ("owner/set", "sub", "train", True)
        return of_files("parquet", data_files=str(folder / "e.parquet"), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    source = HubRows("owner/set", "sub")
    rows = list(source.read())
    assert [row for row, _ in rows] == ROWS
    for i in range(len(rows)):
        assert list(source.read(rows[i][1])) == rows[i + 1 :]
    assert source.where(Cursor(0, 3)) == "owner/set/sub:train, row 4"

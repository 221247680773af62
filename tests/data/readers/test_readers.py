"""Files into columns: formats, headers, quotes, encodings, and where a message says the mistake is."""

import json

import pytest

from modelcenter.data.readers import read_file
from modelcenter.data.schemas.labels import find_labels
from modelcenter.data.schemas.text_pairs import column_texts
from modelcenter.data.streams import Cursor, FileRows
from modelcenter.data.table import Origin, Table, concatenate
from modelcenter.training.tasks.base import strings


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read(tmp_path, name: str, content) -> Table:
    return read_file(write(tmp_path / name, content))


ROWS = [{"text": "a b", "label": 1}, {"text": "caf\u00e9 \u2028 x", "label": 0}]


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),  # U+2028 unescaped: no line break of JSON lines
        "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in ROWS) + "\r\n",
        json.dumps(ROWS, indent=2),
        json.dumps({"version": "1", "data": ROWS}),
        json.dumps({"text": [r["text"] for r in ROWS], "label": [1, 0]}),
        "\n".join(json.dumps(row) for row in ROWS).encode("utf-16"),
        # What pandas' to_json writes, as is and with orient index, split.
        json.dumps({name: {str(3 * i): row[name] for i, row in enumerate(ROWS)} for name in ROWS[0]}),
        json.dumps({str(i): row for i, row in enumerate(ROWS)}, indent=1),
        json.dumps({"columns": list(ROWS[0]), "index": [0, 1], "data": [list(row.values()) for row in ROWS]}),
    ],
    ids=["lines", "bom-crlf-blank", "array", "nested", "columns", "utf-16", "pandas", "pandas-index", "pandas-split"],
)
@pytest.mark.parametrize("suffix", ["json", "ndjson"])
def test_json_forms(tmp_path, content, suffix):
    table = read(tmp_path, f"a.{suffix}", content)
    assert table.columns == {"text": ["a b", "caf\u00e9 \u2028 x"], "label": [1, 0]}


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "q"}], "id": 1},
        {"chosen": TURNS, "rejected": TURNS},
        {"question": "q", "context": "a b", "answers": [{"text": "b", "answer_start": 2}]},
    ],
    ids=["chat", "sharegpt", "pair", "answers"],
)
def test_a_file_of_one_row_with_a_list_of_objects(tmp_path, row, indent):
    table = read(tmp_path, "a.jsonl", json.dumps(row, indent=indent))
    assert table.columns == {name: [value] for name, value in row.items()}


def test_json_rows_may_lack_columns_and_know_their_line(tmp_path):
    table = read(tmp_path, "a.jsonl", '{"text": "a"}\n\n{"text": "b", "label": 2}\n')
    assert table.columns == {"text": ["a", "b"], "label": [None, 2]}
    assert table.where(1).endswith("a.jsonl, line 3")


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('{"text": "a"}\n{"text": "b",}\n', 2, "not valid JSON"),
        ('{"text": "a"\n{"text": "b"}\n', 1, "not valid JSON"),
        ('{"text": "a"}\n"b"\n', 2, "expected a JSON object"),
        ('[{"text": "a"},\n {"text": }]', 2, "not valid JSON"),
        ('["a", 1]\n["b", 0]\n', 2, "Extra data.*; expected one array, or one JSON object a line"),
    ],
)
def test_malformed_json_names_the_line(tmp_path, content, line, says):
    with pytest.raises(ValueError, match=rf"a\.jsonl, line {line}: .*{says}"):
        read(tmp_path, "a.jsonl", content)


def test_json_of_no_rows_and_of_no_objects(tmp_path):
    with pytest.raises(ValueError, match="expected one JSON object a line"):
        read(tmp_path, "a.json", "[1, 2]")
    for name, content in [
        ("a.json", "[]"),
        ("b.jsonl", "\n\n"),
        ("c.csv", "text,label\n"),
        ("d.tsv", ""),
        ("e.txt", ""),
    ]:
        with pytest.raises(ValueError, match=f"{name}: the file holds no rows"):
            read(tmp_path, name, content)


def test_csv_quotes_hold_separators_and_lines(tmp_path):
    table = read(tmp_path, "a.csv", 'text,label\n"one, two\nthree ""four""",1\nfive,0\n')
    assert table.columns == {"text": ['one, two\nthree "four"', "five"], "label": ["1", "0"]}
    assert [table.where(i).rsplit(" ")[-1] for i in (0, 1)] == ["2", "4"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_csv_separator_is_seen(tmp_path, separator):
    table = read(tmp_path, "a.csv", f"text{separator}label\na, b{separator}1\n")
    assert table.columns == {"text": ["a, b"], "label": ["1"]}


def test_csv_with_spaces_before_its_quotes(tmp_path):
    content = 'text, label\n"one, two", "good"\n"he said ""a, ""b""", "bad"\n'
    table = read(tmp_path, "a.csv", content)
    assert table.columns == {"text": ["one, two", 'he said "a, "b"'], "label": ["good", "bad"]}
    assert [row for row, _ in FileRows([tmp_path / "a.csv"]).read()] == [
        {"text": text, "label": label} for text, label in zip(*table.columns.values(), strict=True)
    ]
    # Elsewhere a space belongs to the text: that of "a," closes a field.
    kept = read(tmp_path, "b.csv", 'prompt,completion\n"a, ", b\n"say ""hi, ""x", c\n')
    assert kept.columns == {"prompt": ["a, ", 'say "hi, "x'], "completion": [" b", " c"]}


def test_lines_that_end_as_on_old_macs(tmp_path):
    for name in ("a.tsv", "a.csv"):
        assert read(tmp_path, name, "text\tlabel\ra b\t1\rc\t0").columns["text"] == ["a b", "c"]
    assert read(tmp_path, "a.txt", "one\rtwo\r").columns == {"text": ["one", "two"]}


def test_nan_is_no_value(tmp_path):
    """json.dumps writes it for what a row of pandas lacks; as a text it would be "nan"."""
    rows = '{"text": NaN, "x": Infinity}\n{"text": "NaN", "x": -Infinity}\n'
    expected = {"text": [None, "NaN"], "x": [float("inf"), float("-inf")]}
    assert read(tmp_path, "a.jsonl", rows).columns == expected
    assert read(tmp_path, "a.json", f"[{rows.replace(chr(10), ',')[:-1]}]").columns == expected
    assert next(FileRows([tmp_path / "a.jsonl"]).read())[0] == {"text": None, "x": float("inf")}


def test_csv_long_field(tmp_path):
    assert len(read(tmp_path, "a.csv", f"text,label\n{'x' * 300_000},1\n").columns["text"][0]) == 300_000


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("text,label\na,1\nb,c,0\n", 3, "3 fields where the first line has 2"),
        ('text,label\na,1\n"b,0\nc,1\n', 3, "not closed"),
        ('text,label\n"a" b,1\n', 2, "not closed"),
    ],
)
def test_malformed_csv_names_the_line(tmp_path, content, line, says):
    with pytest.raises(ValueError, match=rf"a\.csv, line {line}: .*{says}"):
        read(tmp_path, "a.csv", content)


def test_tsv_stray_quotes_do_not_merge_rows(tmp_path):
    lines = ['1\t"quoted from the start', '0\tthe "middle" of it', '1\t" it ends here "', "0\tplain", '1\t"']
    table = read(tmp_path, "a.tsv", "\n".join(lines) + "\n")
    assert table.columns["0"] == ["1", "0", "1", "0", "1"]
    assert table.columns["1"] == [line.split("\t")[1] for line in lines]


def test_tsv_with_real_quotes(tmp_path):
    table = read(tmp_path, "a.tsv", 'text\tlabel\n"say ""a"" to\tb"\t1\nplain\t0\n')
    assert table.columns == {"text": ['say "a" to\tb', "plain"], "label": ["1", "0"]}
    everything = read(tmp_path, "b.tsv", '"text"\t"label"\n"a b"\t"1"\n')
    assert everything.columns == {"text": ["a b"], "label": ["1"]}


def test_tsv_ragged_names_the_line(tmp_path):
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: 3 fields where the first line has 2"):
        read(tmp_path, "a.tsv", "1\ta\n0\tb\tc\n")


@pytest.mark.parametrize(
    ("content", "header"),
    [
        ("text\tlabel\na b c\t1\n", True),
        ("Sentence\tFoo\na b c\t1\n", True),
        ("review body\tverdict\na b c\tx\n", True),
        ("1\ta b c\n0\td e\n", False),  # a number names no column
        ("good\ta b c\nbad\td e\ngood\tf\n", False),  # its values come again below
        ("no film like this one was ever made\tx\nb c\ty\n", False),  # a sentence
        ("Good film!\tyes\nbad\tno\n", False),
        ("text\tgood\nmore\tgood\n", False),  # even a known name, if a value beside it comes again
        ("just one column of text\nand another\n", False),
        ("sentence\nand another\n", True),
        ("messages\n[1]\n", True),
        ("\tsay\tverdict\n0\ta b\tx\n1\tb\ty\n2\tb\ty\n", True),  # the index that pandas writes
        ("\tgood\n0\tbad\n0\tgood\n", False),  # no index: a row without its first field
        ("text\tlabel\t\na b\t1\t\n", True),  # a tab at the end of each line
        ("good film\t\nbad\t1\nso so\t0\nodd\t2\n", False),
        ("text\tlabel\nthe text\t1\ntext\t0\n", True),
    ],
)
def test_header_or_not(tmp_path, content, header):
    table = read(tmp_path, "a.tsv", content)
    assert list(table.columns)[0] == (header and content.split("\n")[0].split("\t")[0] or "0")
    assert len(table) == content.count("\n") - header


def test_the_header_once_more_is_an_error(tmp_path):
    """As `cat a.csv b.csv` leaves it: it is no row, and would make a class of its own."""
    content = "text,label\na b,1\nb c,0\ntext,label\nc d,1\n"
    with pytest.raises(ValueError, match=r"a\.csv, line 4: the header again"):
        read(tmp_path, "a.csv", content)
    with pytest.raises(ValueError, match=r"a\.csv, row 3: the header again"):
        list(FileRows([tmp_path / "a.csv"]).read())


def test_header_twice(tmp_path):
    with pytest.raises(ValueError, match="the header names 'text' twice"):
        read(tmp_path, "a.csv", "id,text ,text\n1,a,b\n")
    with pytest.raises(ValueError, match="the header names 'text' twice"):
        next(FileRows([tmp_path / "a.csv"]).read())


def test_latin1_names_file_line_and_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv, line 3: not UTF-8 \(byte 0xe9; 1 of 3 lines\).*iconv -f LATIN1"):
        read(tmp_path, "a.csv", b"text,label\nabc,1\ncaf\xe9,0\n")


def test_gb18030_is_guessed(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: not UTF-8.*iconv -f GB18030"):
        read(tmp_path, "a.jsonl", '{"text": "\u5f88\u597d\u7684\u7535\u5f71"}\n'.encode("gb18030"))


def test_mixed_encodings_are_called_so(tmp_path):
    content = "\u5f88\u597d\tp\n".encode() + "\u5f88\u5dee\tn\n".encode("gb18030")
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: not UTF-8.*mixes encodings"):
        read(tmp_path, "a.tsv", content)


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


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (r'{"text": "a"}' + "\n" + r'{"text": "nice \ud83d"}', "line 2: .*column 16"),
        (r'{"text": "\\\uDE00\ud83d"}', "line 1: .*column 13"),  # an escaped backslash, then the second half
        (r'[{"text": "a"},' + "\n" + r' {"text": "\ud83d\u0041"}]', "line 2: .*column 12"),
    ],
)
def test_half_a_character(tmp_path, content, place):
    with pytest.raises(ValueError, match=r"a.jsonl, " + place.replace(".*", r"not valid JSON \(.u\w+ is half.* ")):
        read(tmp_path, "a.jsonl", content)


def test_escapes_that_are_no_halves(tmp_path):
    row = {"text": "\U0001f600 \\ud83d \u00e9 \ud7ff\U0010ffff"}
    assert read(tmp_path, "a.jsonl", json.dumps(row) + "\n").columns == {"text": [row["text"]]}


def of_classes(values: list, classes: list[str] | None) -> Table:
    known = {} if classes is None else {"label": classes}
    return Table({"label": values}, [Origin("a", len(values), "")], known)


@pytest.mark.parametrize(
    "second, values, classes",
    [
        (([1, 0, -1], ["neg", "pos"]), [0, 1, 1, 0, -1], ["neg", "pos"]),
        (([1, 0, -1], ["pos", "neg"]), ["neg", "pos", "neg", "pos", None], ["neg", "pos"]),
        (([1, 0], ["Pos", "Neg"]), ["neg", "pos", "neg", "pos"], ["neg", "pos"]),
        (([1, 0], ["no", "yes"]), ["neg", "pos", "yes", "no"], None),  # other classes: none is another's number
        ((["pos", "bad"], None), ["neg", "pos", "pos", "bad"], None),
        (([1, 0], None), [0, 1, 1, 0], ["neg", "pos"]),
        ((["1", "0", ""], None), [0, 1, "1", "0", ""], ["neg", "pos"]),  # csv has numbers as texts
        (([[1, 0], [1]], ["pos", "neg"]), ["neg", "pos", ["neg", "pos"], ["neg"]], ["neg", "pos"]),
    ],
)
def test_tables_that_number_classes_differently(second, values, classes):
    table = concatenate([of_classes([0, 1], ["neg", "pos"]), of_classes(*second)])
    assert table.columns == {"label": values} and table.classes == ({} if classes is None else {"label": classes})


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
        "image": pyarrow.array([b"\xff\x00", b"a", b"b"], pyarrow.binary()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), str(tmp_path / "a.parquet"), row_group_size=2)
    expected = {
        "text": [text, "bad", None],
        "label": ["pos", "neg", "pos"],
        "words": [["a", text], [], None],
        "said": [{"x": "a", "n": 1}] * 3,
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
    with pytest.raises(ValueError, match="b.parquet.gz: parquet is streamed from uncompressed files"):
        FileRows([tmp_path / "b.parquet.gz"])


def test_txt(tmp_path):
    table = read(tmp_path, "a.txt", "one\r\n\ntwo\n")
    assert table.columns == {"text": ["one", "two"]}
    assert table.where(1).endswith("line 3")


def test_labels_as_fasttext_writes_them(tmp_path):
    table = read(tmp_path, "a.txt", "__label__good a b\n__label__bad c\r\n")
    assert table.columns == {"text": ["a b", "c"], "label": ["good", "bad"]}
    several = read(tmp_path, "a.txt", "__label__good __label__new a b\n__label__bad c")
    assert several.columns == {"text": ["a b", "c"], "label": [["good", "new"], ["bad"]]}
    assert read(tmp_path, "a.txt", "__label__good a b\nc").columns == {"text": ["__label__good a b", "c"]}


def test_a_row_for_each_word_of_a_sentence(tmp_path):
    """Its number in the first row alone, or in each."""
    words = {"Word": [["Anna", ","], ["Rome"]], "Tag": [["B-PER", "O"], ["B-LOC"]]}
    table = read(tmp_path, "a.csv", 'Sentence #,Word,Tag\nS: 1,Anna,B-PER\n,",",O\nS: 2,Rome,B-LOC\n')
    assert table.columns == {"Sentence #": ["S: 1", "S: 2"], **words}
    assert table.where(1).endswith("a.csv, line 4")
    every = read(tmp_path, "a.csv", "sentence_id,words,labels\n0,Anna,B-PER\n0,.,O\n1,Rome,B-LOC\n")
    assert every.columns["words"] == [["Anna", "."], ["Rome"]]
    whole = "sentence_id,words,labels\n0,Anna .,B-PER O\n0,Rome,B-LOC\n"
    assert read(tmp_path, "a.csv", whole).columns["words"] == ["Anna .", "Rome"]


def test_unknown_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"data files end in .json, .*, not in '.xls'"):
        read(tmp_path, "a.xls", "x")


def test_tables_together_and_in_part_keep_places_and_fingerprints(tmp_path):
    a = read(tmp_path, "a.tsv", "1\tx\n0\ty\n")
    b = read(tmp_path, "b.jsonl", '{"0": "1", "extra": 5}\n')
    table = concatenate([a, b])
    assert table.columns == {"0": ["1", "0", "1"], "1": ["x", "y", None], "extra": [None, None, 5]}
    import numpy as np

    part = table.take(np.array([2, 0])).take(np.array([1, 0]))
    assert part.columns["1"] == ["x", None]
    assert [part.where(i).split("/")[-1] for i in range(2)] == ["a.tsv, line 1", "b.jsonl, line 1"]
    assert table.fingerprint()["rows"] == 3 and len(set(table.fingerprint()["sha256"].values())) == 2

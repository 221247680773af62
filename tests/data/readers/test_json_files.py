"""json, jsonl and ndjson: their layouts, and where a message says the mistake is."""

import json
import re

import pytest
from file_toys import read

from modelcenter.data.readers.literals import parse_json, parse_objects
from modelcenter.data.streams import FileRows

ROWS = [{"text": "a b", "label": 1}, {"text": "caf\u00e9 \u2028 x", "label": 0}]


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),  # U+2028 unescaped: no line break of JSON lines
        "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in ROWS) + "\r\n",
        json.dumps(ROWS, indent=2),
        json.dumps({"version": "1", "instruction": "Rate", "data": ROWS}),
        json.dumps({"source": "the web", "items": ROWS}),
        json.dumps({"text": [r["text"] for r in ROWS], "label": [1, 0]}),
        "\n".join(json.dumps(row) for row in ROWS).encode("utf-16"),
        # What pandas' to_json writes, as is and with orient index, split.
        json.dumps({name: {str(3 * i): row[name] for i, row in enumerate(ROWS)} for name in ROWS[0]}),
        json.dumps({str(i): row for i, row in enumerate(ROWS)}, indent=1),
        json.dumps({"columns": list(ROWS[0]), "index": [0, 1], "data": [list(row.values()) for row in ROWS]}),
    ],
    ids="lines bom-crlf-blank array data items columns utf-16 pandas pandas-index pandas-split".split(),
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
        {"prompt": "q", "documents": [{"text": "a"}, {"text": "b"}]},
        {"my question": "q", "Tools": [{"type": "function", "function": {"name": "w"}}]},
        {"text": {"0": "a", "1": "b"}, "label": {"0": 1}},  # columns of pandas would have the same rows
        {"steps": [{"say": "a"}, {"say": "b"}], "tools": [{"type": "function", "function": {"name": "w"}}]},
    ],
    ids=["chat", "sharegpt", "pair", "answers", "documents", "tools", "uneven", "steps"],
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
        ('["a", 1]\n["b", 0]\n', 2, "Extra data.*; expected one array, or one JSON object per line"),
    ],
)
def test_malformed_json_names_the_line(tmp_path, content, line, says):
    with pytest.raises(ValueError, match=rf"a\.jsonl, line {line}: .*{says}"):
        read(tmp_path, "a.jsonl", content)


def test_columns_of_which_one_holds_objects(tmp_path):
    columns = {"question": ["q", "r"], "answers": [{"text": ["a"], "answer_start": [0]}] * 2}
    assert read(tmp_path, "a.json", json.dumps(columns)).columns == columns


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "depth"])
def test_values_that_python_cannot_hold_name_the_line(tmp_path, value):
    path = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not valid JSON \(a number has too many digits, or lists"):
        read(tmp_path, "a.jsonl", f'{{"n": 1}}\n{{"n": {value}}}')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not valid JSON \(a number has too many digits, or lists"):
        list(FileRows([path]).read())


def test_json_of_no_rows_and_of_no_objects(tmp_path):
    with pytest.raises(ValueError, match="expected one JSON object per line"):
        read(tmp_path, "a.json", "[1, 2]")
    for content in ("5", "null", '"text"'):
        with pytest.raises(ValueError, match=f"line 1: got {content}, expected a JSON object"):
            read(tmp_path, "a.json", content)
    for name, content in [
        ("a.json", "[]"),
        ("b.jsonl", "\n\n"),
        ("c.csv", "text,label\n"),
        ("d.tsv", ""),
        ("e.txt", ""),
    ]:
        with pytest.raises(ValueError, match=f"{name}: the file has no rows"):
            read(tmp_path, name, content)


def test_nan_is_no_value(tmp_path):
    """json.dumps writes it for what a row of pandas lacks; as a text it would be "nan"."""
    rows = '{"text": NaN, "x": Infinity}\n{"text": "NaN", "x": -Infinity}\n'
    expected = {"text": [None, "NaN"], "x": [float("inf"), float("-inf")]}
    assert read(tmp_path, "a.jsonl", rows).columns == expected
    assert read(tmp_path, "a.json", f"[{rows.replace(chr(10), ',')[:-1]}]").columns == expected
    assert next(FileRows([tmp_path / "a.jsonl"]).read())[0] == {"text": None, "x": float("inf")}


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


@pytest.mark.parametrize(
    "lines",
    [
        ['{"a": 1', '"b": 2}'],  # an object, with a comma between its lines
        ['{"a": 1', '"b": 2}', '{"c": 3}, {"d": 4}'],  # and as many objects as lines
        ['{"a": [{}', "{}]}", '{"c": 3}, {"d": 4}'],
        ['{"a": [{}', "{}]}", "{}, {}, {}"],
        ['{"a": "', '"}'],
        ['{"a": [1', "2]}"],
        ["{}], [{}"],
        ["{}", "1, 2"],
        ['{}, "", {}'],
        ["{}", "[]"],
        ["{}", "{} {}"],
        ["{}", "{},"],
        ["{}", '{"a": 1, }'],
        ["{}", '{"a": %s}' % ("9" * 5000)],
        ["{}", '{"a": %s}' % ("[" * 100_000 + "]" * 100_000)],
        ["{}", '{"a": "' + chr(92) + 'ud800"}'],
    ],
)
@pytest.mark.parametrize("before", [0, 2500])
def test_lines_are_read_as_if_by_themselves(tmp_path, lines, before):
    """Though many are parsed at once: the same rows, and the same line is named."""
    path, many = tmp_path / "a.jsonl", ['{"n": 1}', "", " {}\r"] * (before // 3)
    expected = None
    for number, line in enumerate(lines, len(many) + 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            expected = rf"a\.jsonl, line {number}: not valid JSON \({re.escape(error.msg)}, column {error.colno}\)"
            break
        if not isinstance(row, dict):
            expected = rf"a\.jsonl, line {number}: got {re.escape(line[:60])}, expected a JSON object"
            break
    assert expected is not None
    with pytest.raises(ValueError, match=expected):
        read(tmp_path, path.name, "\n".join([*many, *lines, "{}"]))


def test_rows_that_are_parsed_at_once(tmp_path):
    assert parse_objects(['{"a": [1, {}]}', ' {"b": NaN}\t', "{}"]) == [{"a": [1, {}]}, {"b": None}, {}]
    rows = [
        '{"a": 1, "a": 2, "b": NaN}',
        ' {"a": "b"}\t',
        '{"a": {"x": [1, {}]}}',
        "",
        '{"a": 1e400, "b": 12345678901234567890}',
    ]
    table = read(tmp_path, "a.jsonl", "\n".join(rows * 700))
    assert table.columns["a"] == [2, "b", {"x": [1, {}]}, float("inf")] * 700
    assert table.columns["b"] == [None, None, None, 12345678901234567890] * 700
    assert [int(table.where(i).rpartition(" ")[2]) for i in (0, 3, 4, 2799)] == [1, 5, 6, 3500]

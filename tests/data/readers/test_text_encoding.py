"""Bytes to text: line ends, and encodings that are named with their remedy."""

import pytest
from file_toys import read


def test_lines_that_end_as_on_old_macs(tmp_path):
    for name in ("a.tsv", "a.csv"):
        assert read(tmp_path, name, "text\tlabel\ra b\t1\rc\t0").columns["text"] == ["a b", "c"]
    assert read(tmp_path, "a.csv", "text,label\ra b,1\r".encode("utf-16")).columns["text"] == ["a b"]
    table = read(tmp_path, "a.csv", 'text;label\r"a, ""b""\nc\n";1\rc;0\r')
    assert table.columns == {"text": ['a, "b"\nc\n', "c"], "label": ["1", "0"]}
    assert read(tmp_path, "a.csv", "text,label\ra,1\rb,0\n").columns["text"] == ["a", "b"]  # an editor ended the file
    assert read(tmp_path, "a.txt", "one\rtwo\r").columns == {"text": ["one", "two"]}


def test_latin1_names_file_line_and_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv, line 3: not UTF-8 \(byte 0xe9; 1 of 3 lines\).*iconv -f LATIN1"):
        read(tmp_path, "a.csv", b"text,label\nabc,1\ncaf\xe9,0\n")


def test_utf_16_that_is_cut_off_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv: begins as UTF-16, but is damaged or truncated \(truncated data"):
        read(tmp_path, "a.csv", "text,label\nabc,1\n".encode("utf-16")[:-1])


def test_gb18030_is_guessed(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: not UTF-8.*iconv -f GB18030"):
        read(tmp_path, "a.jsonl", '{"text": "\u5f88\u597d\u7684\u7535\u5f71"}\n'.encode("gb18030"))


def test_mixed_encodings_are_called_so(tmp_path):
    content = "\u5f88\u597d\tp\n".encode() + "\u5f88\u5dee\tn\n".encode("gb18030")
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: not UTF-8.*mixes encodings"):
        read(tmp_path, "a.tsv", content)

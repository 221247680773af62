"""CoNLL's files as rows."""

import pytest
from file_toys import write
from span_toys import make_tagged, write_conll

from modelcenter.data.readers import read_file


def test_conll(tmp_path):
    rows = make_tagged(5)
    table = read_file(write_conll(tmp_path / "a.conll", rows))
    assert table.columns == {"words": [row["tokens"] for row in rows], "tags": [row["ner_tags"] for row in rows]}
    assert table.where(0).endswith("a.conll, line 3")  # behind -DOCSTART- and an empty line
    assert table.where(1).endswith(f"a.conll, line {3 + len(rows[0]['tokens']) + 1}")


@pytest.mark.parametrize("name", ["a.txt", "a.bio", "a.conll"])
def test_chinese_tabs_comments_windows_lines_and_other_schemes(tmp_path, name):
    text = "# id 1\n\u4e2d\tS-LOC\r\n \u3000\r\n\r\n# id 2\r\n#\tO\r\nNew York\tB-LOC\n-DOCSTART-\tO\nx\tE-PER\n\n"
    table = read_file(write(tmp_path / name, text))
    assert table.columns["words"] == [["\u4e2d"], ["#", "New York"], ["x"]]
    assert table.columns["tags"] == [["S-LOC"], ["O", "B-LOC"], ["E-PER"]]
    assert list(table.origins[0].lines) == [2, 6, 9]


@pytest.mark.parametrize("space", [" ", "\t"])
def test_spaces_of_other_kinds_are_words(tmp_path, space):
    """Chinese corpora tag U+3000 and U+00A0 like any other character."""
    words = ["\u4e2d", "\u3000", "\u00a0", "New\u00a0York", "\u2003"]
    for name in ("a.txt", "a.conll"):
        table = read_file(write(tmp_path / name, "".join(f"{word}{space}O\n" for word in words) + " \u3000\n"))
        assert table.columns == {"words": [words], "tags": [["O"] * 5]}


def test_only_words_and_other_texts(tmp_path):
    assert read_file(write(tmp_path / "a.conll", "a\nb\n\nc\n")).columns == {"words": [["a", "b"], ["c"]]}
    texts = ["vitamin B-12", "and O"]
    assert read_file(write(tmp_path / "a.txt", "a text\nof words\n")).columns == {"text": ["a text", "of words"]}
    found = read_file(write(tmp_path / "b.txt", "\n".join([*texts, "plain"]))).columns
    assert found == {"text": [*texts, "plain"]}  # one line that is no tagged word, and it is a text


def test_ragged_lines(tmp_path):
    path = write(tmp_path / "a.conll", "a NN O\nb O\n")
    with pytest.raises(ValueError, match=r"a.conll, line 2: got 2 columns \('b O'\), expected 3 as in line 1"):
        read_file(path)
    with pytest.raises(ValueError, match="line 2: got 2 columns"):
        read_file(write(tmp_path / "b.conll", "a\tO\n\tO\n"))

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
    assert read_file(write(tmp_path / "c.txt", "O\nB-12\n")).columns == {"text": ["O", "B-12"]}  # a tag of no word


def test_ragged_lines(tmp_path):
    path = write(tmp_path / "a.conll", "a NN O\nb O\n")
    with pytest.raises(ValueError, match=r"a.conll, line 2: got 2 columns \('b O'\), expected 3 as in line 1"):
        read_file(path)
    with pytest.raises(ValueError, match="line 2: got 2 columns"):
        read_file(write(tmp_path / "b.conll", "a\tO\n\tO\n"))


def test_numbers_in_place_of_words(tmp_path):
    """CoNLL-U's first column, which is no word."""
    lines = [
        "# sent_id = 1",
        "1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_",
        "1\tde\tde\tADP\t_\t_\t2\tcase\t_\t_",
        "2\tle\tle\tDET\t_\t_\t0\troot\t_\tSpaceAfter=No",
        "2.1\tx\tx\tVERB\t_\t_\t_\t_\t_\t_",
        "",
        "1\tOui\toui\tINTJ\t_\t_\t0\troot\t_\t_",
        "",
    ]
    with pytest.raises(ValueError, match="a.conll, line 2: the first column numbers the words .*`cut -f 2,4`"):
        read_file(write(tmp_path / "a.conll", "\n".join(lines)))
    kept = ["\t".join(fields[i] for i in (1, 3) if i < len(fields)) for fields in (line.split("\t") for line in lines)]
    kept[0] = lines[0]  # as `cut` keeps it
    found = read_file(write(tmp_path / "b.conll", "\n".join(kept))).columns
    assert found == {"words": [["du", "de", "le", "x"], ["Oui"]], "tags": [["_", "ADP", "DET", "VERB"], ["INTJ"]]}
    for text in ("1 CD O\n2 CD O\n\na DT O\n", "1 CD O\n\n1 CD O\n", "1\tO\n2\tO\n"):  # words all the same
        assert read_file(write(tmp_path / "c.conll", text)).columns["words"][0][0] == "1"

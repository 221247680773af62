"""txt files: a text a line, and the labels of fastText."""

from file_toys import read


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

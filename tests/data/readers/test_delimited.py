"""csv and tsv: separators, quotes, headers, and where a message says the mistake is."""

import pytest
from file_toys import read

from modelcenter.data.streams import FileRows


def test_csv_quotes_hold_separators_and_lines(tmp_path):
    table = read(tmp_path, "a.csv", 'text,label\n"one, two\nthree ""four""",1\nfive,0\n')
    assert table.columns == {"text": ['one, two\nthree "four"', "five"], "label": ["1", "0"]}
    assert [table.where(i).rsplit(" ")[-1] for i in (0, 1)] == ["2", "4"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_csv_separator_is_seen(tmp_path, separator):
    table = read(tmp_path, "a.csv", f"text{separator}label\na, b{separator}1\n")
    assert table.columns == {"text": ["a, b"], "label": ["1"]}


@pytest.mark.parametrize("line", ["sep=;\n", '"sep=;"\r\n', "sep=\t\n", "\ufeffSEP=|\r\n"])
def test_a_first_line_for_excel_names_the_separator(tmp_path, line):
    separator = line.strip('"\r\n')[-1]
    content = line + f'text{separator}label\na, b{separator}1\n"c {separator}"{separator}0\n'
    table = read(tmp_path, "a.csv", content)
    assert table.columns == {"text": ["a, b", f"c {separator}"], "label": ["1", "0"]}
    assert table.where(0).endswith("line 3")
    assert [row for row, _ in FileRows([tmp_path / "a.csv"]).read() if row is not None] == [
        {"text": "a, b", "label": "1"},
        {"text": f"c {separator}", "label": "0"},
    ]


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


def test_csv_long_field(tmp_path):
    assert len(read(tmp_path, "a.csv", f"text,label\n{'x' * 300_000},1\n").columns["text"][0]) == 300_000


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("text,label\na,1\nb,c,0\n", 3, "3 fields where the first line has 2"),
        ('text,label\na,1\n"b,0\nc,1\n', 3, "not closed"),
        ('text,label\n"a" b,1\n', 2, "not closed"),
        (
            'text,label\n"a\nb",1\nc\rd,0\n',
            4,
            r"a carriage return \(.r\) outside quotes, .* feeds; replace it by a line feed",
        ),
        ("text\na\rb\n", 2, "a carriage return"),
        ('text,label\n"a\nb"\rc,1\n', 3, "a carriage return"),
    ],
)
def test_malformed_csv_names_the_line(tmp_path, content, line, says):
    with pytest.raises(ValueError, match=rf"a\.csv, line {line}: .*{says}"):
        read(tmp_path, "a.csv", content)
    if "fields" not in says:  # of a row that is too wide the stream names the row
        with pytest.raises(ValueError, match=rf"a\.csv, line {line}: .*{says}"):
            list(FileRows([tmp_path / "a.csv"]).read())


def test_carriage_returns_in_quotes_are_text(tmp_path):
    table = read(tmp_path, "a.csv", 'text,label\r\n"a\rb",1\r\nc,0\r\n')
    assert table.columns == {"text": ["a\rb", "c"], "label": ["1", "0"]} and table.where(1).endswith("line 3")


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
    empty = read(tmp_path, "c.tsv", '"text"\t"label"\n"a b"\t"1"\n""\t"0"\n')
    assert empty.columns == {"text": ["a b", ""], "label": ["1", "0"]}


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
        ("just one text\n", False),
        ("sentence\nand another\n", True),
        ("messages\n[1]\n", True),
        ("\tsay\tverdict\n0\ta b\tx\n1\tb\ty\n2\tb\ty\n", True),  # the index that pandas writes
        ("\tgood\n0\tbad\n0\tgood\n", False),  # no index: a row without its first field
        ("text\tlabel\t\na b\t1\t\n", True),  # a tab at the end of each line
        ("good film\t\nbad\t1\nso so\t0\nodd\t2\n", False),
        ("text\tlabel\nthe text\t1\ntext\t0\n", True),
        ("Unnamed: 0\tsay\tverdict\n0\ta b\tx\n1\tb\ty\n2\tb\ty\n", True),  # an index that pandas has read and written
        ("Quality\t#1 ID\t#1 String\n1\t702876\tA b.\n0\t2108705\tC d.\n", True),  # of MRPC
        ("What did you say of it?\tIs it good (0/1)?\nfine\t1\nbad\t\nbad\t0\n", True),
        ("Good film!\tn/a\nbad\t0\nso so\t1\n", False),
        ("Good film!\tgreat\nbad\t0\n", False),  # one row tells nothing
    ],
)
def test_header_or_not(tmp_path, content, header):
    table = read(tmp_path, "a.tsv", content)
    assert list(table.columns)[0] == (header and content.split("\n")[0].split("\t")[0] or "0")
    assert len(table) == content.count("\n") - header


def test_the_header_once_more_is_an_error(tmp_path):
    """As `cat a.csv b.csv` leaves it: it is no row, and would make a class of its own."""
    content = "text,label\na b,1\nb c,0\ntext,label\nc d,1\n"
    with pytest.raises(ValueError, match=r"a\.csv, line 4: the header is repeated"):
        read(tmp_path, "a.csv", content)
    with pytest.raises(ValueError, match=r"a\.csv, row 3: the header is repeated"):
        list(FileRows([tmp_path / "a.csv"]).read())


def test_header_twice(tmp_path):
    with pytest.raises(ValueError, match="the header names 'text' twice"):
        read(tmp_path, "a.csv", "id,text ,text\n1,a,b\n")
    with pytest.raises(ValueError, match="the header names 'text' twice"):
        next(FileRows([tmp_path / "a.csv"]).read())


def test_a_row_for_each_word_of_a_sentence(tmp_path):
    """Its number in the first row alone, or in each."""
    words = {"Word": [["Anna", ","], ["Rome"]], "Tag": [["B-PER", "O"], ["B-LOC"]]}
    table = read(tmp_path, "a.csv", 'Sentence #,Word,Tag\nS: 1,Anna,B-PER\n,",",O\nS: 2,Rome,B-LOC\n')
    assert table.columns == {"Sentence #": ["S: 1", "S: 2"], **words}
    assert table.where(1).endswith("a.csv, line 4")
    spaces = read(tmp_path, "a.csv", "Sentence #,Word,Tag\nS: 1,Anna,B-PER\n  ,met,O\nS: 2 ,in,O\nS: 2,Rome,B-LOC\n")
    assert spaces.columns["Word"] == [["Anna", "met"], ["in", "Rome"]]
    every = read(tmp_path, "a.csv", "sentence_id,words,labels\n0,Anna,B-PER\n0,.,O\n1,Rome,B-LOC\n")
    assert every.columns["words"] == [["Anna", "."], ["Rome"]]
    whole = "sentence_id,words,labels\n0,Anna .,B-PER O\n0,Rome,B-LOC\n"
    assert read(tmp_path, "a.csv", whole).columns["words"] == ["Anna .", "Rome"]


TAGGED = [["Anna", "B-PER"], ["met", "O"], [], ["Bob", "B-PER"], ["left", "O"], [",", "O"]]


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("header", [["token", "tag"], ["id", "Word", "NER"], None])
def test_a_row_for_each_word_and_empty_lines_between_sentences(tmp_path, separator, header):
    rows = [["7", *row] if row and header and len(header) > 2 else row for row in TAGGED]
    lines = [separator.join(f'"{value}"' if value == "," else value for value in row) for row in [header or [], *rows]]
    table = read(tmp_path, "a.tsv" if separator == "\t" else "a.csv", "\n".join(lines) + "\n\n")
    words, tags = list(table.columns.values())[-2:]
    assert list(table.columns) == (header or ["0", "1"])
    comma = '","' if separator == "\t" else ","  # in tsv quotes are characters
    assert (words, tags) == ([["Anna", "met"], ["Bob", "left", comma]], [["B-PER", "O"], ["B-PER", "O", "O"]])
    assert [table.where(i).rsplit(" ")[-1] for i in (0, 1)] == ["2", "5"]


def test_tags_of_one_kind_and_what_is_no_row_for_each_word(tmp_path):
    """As the corpora of biomedical names are, without a header and with bare letters for tags."""
    table = read(tmp_path, "a.tsv", "APC\tB\nprotein\tI\n.\tO\n\nWnt\tB\n-\tO\n")
    assert table.columns == {"0": [["APC", "protein", "."], ["Wnt", "-"]], "1": [["B", "I", "O"], ["B", "O"]]}
    for content in (
        "good\tyes\nbad\tno\n\nso\tyes\n",  # labels that are no tags
        "a b\tO\nc\tB-X\n\nd\tO\n",  # texts
        'word,tag,note\na,O,"x\n\ny"\nb,O,z\n',  # an empty line in quotes
        "word\ttag\n\na\tO\n\nb\tO\n",  # one between all rows
        "word\ttag\na\tO\nb\tO\n\n",  # or at the end
    ):
        table = read(tmp_path, "b.csv" if "," in content else "b.tsv", content)
        assert all(isinstance(value, str) for values in table.columns.values() for value in values)

"""From written labels to targets."""

import numpy as np
import pytest

from modelcenter.data.schemas.labels import Labels, find_labels, unsaid


def where(row: int) -> str:
    return f"a.csv, line {row + 1}"


def both(values, **given) -> tuple[Labels, list]:
    labels = find_labels(values, where, **given)
    return labels, labels.encode(values, where).tolist()


@pytest.mark.parametrize(
    ("values", "names", "ids"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (["1", "0", "1"], ("0", "1"), [1, 0, 1]),
        ([1, 0, "1", 1.0, True], ("0", "1"), [1, 0, 1, 1, 1]),
        ([5, 1, 3, 5], ("1", "3", "5"), [2, 0, 1, 2]),
        (["-1", "1", "1.0"], ("-1", "1"), [0, 1, 1]),
        ([" yes", "no ", "yes"], ("no", "yes"), [1, 0, 1]),
    ],
)
def test_single_label(values, names, ids):
    labels, found = both(values)
    assert (labels.problem_type, labels.names, found) == ("single_label_classification", names, ids)
    assert labels.encode(values, where).dtype == np.int64


def test_num_labels_keeps_ids_and_bounds_them():
    labels, ids = both([2, 0, 2], num_labels=4)
    assert labels.names == ("0", "1", "2", "3") and ids == [2, 0, 2]
    with pytest.raises(ValueError, match=r"a.csv, line 3: label 2 is outside num_labels 2 \(0 to 1\)"):
        find_labels([0, 1, 2, 2], where, num_labels=2)
    with pytest.raises(ValueError, match="line 2: label -1 is outside"):
        find_labels([0, -1], where, num_labels=2)
    assert both(["x", "y"], num_labels=3)[0].names == ("x", "y", "LABEL_2")
    with pytest.raises(ValueError, match="num_labels is 2, but the data has 3 labels: 'x', 'y', 'z'"):
        find_labels(["x", "y", "z"], where, num_labels=2)


def test_new_rows_must_use_known_labels():
    labels = find_labels(["a", "b"], where)
    with pytest.raises(
        ValueError, match="line 2: label 'c' is not one of the labels of the training data \\('a', 'b'\\)"
    ):
        labels.encode(["a", "c"], where)
    with pytest.raises(ValueError, match=r"line 1: label 2 is outside num_labels 2"):
        find_labels([0, 1], where).encode([2], where)
    with pytest.raises(ValueError, match="label 'b' is not one of the labels"):
        find_labels(["a", "None"] * 3, where).encode(["b"], where)


def test_names_from_the_source():
    labels, ids = both([1, 0], names=["no", "yes"])
    assert labels.names == ("no", "yes") and ids == [1, 0]
    assert both(["yes", "no"], names=["no", "yes"])[1] == [1, 0]
    with pytest.raises(ValueError, match="line 2: the row has no label"):  # the Hub's test sets
        find_labels([1, -1], where, names=["no", "yes"])


@pytest.mark.parametrize("missing", [None, "", float("nan"), "  "])
def test_rows_without_a_label(missing):
    with pytest.raises(ValueError, match=r"line 2: the row has no label \(2 of 3 rows have none\)"):
        find_labels(["a", missing, missing], where)
    with pytest.raises(ValueError, match="line 1: the row has no label"):
        find_labels(["a", "b"], where).encode([missing], where)


@pytest.mark.parametrize("missing", [None, "", float("nan"), "  "])
def test_lists_with_a_label_missing(missing):
    says = r"line 2: the row has no label at one position of its list \[.*\]; label these rows"
    for row in (["a", missing], [missing]):
        with pytest.raises(ValueError, match=says):
            find_labels([["b"], row], where)
        with pytest.raises(ValueError, match=says):
            find_labels([["a"], ["b"]], where).encode([["b"], row], where)
    for text in ("['a', None]", '["a", NaN]', '["a", ""]'):
        with pytest.raises(ValueError, match=says):
            find_labels(["b|a", text], where, problem_type="multi_label_classification")


def test_texts_that_spell_lists_but_for_one():
    """It must not make a single label of each of the others."""
    for given in ({}, {"problem_type": "multi_label_classification"}):
        with pytest.raises(ValueError, match=r"line 3: got .\['sad', nan\].*, expected a list .* such as .\['joy'\]"):
            find_labels(["['joy']", "", "['sad', nan]"], where, **given)
    labels = find_labels(["['joy']", "['sad']"], where)
    with pytest.raises(ValueError, match=r"line 1: got .\['joy', nan\].*, expected a list"):
        labels.encode(["['joy', nan]", "['sad']"], where)


@pytest.mark.parametrize("values", [["[ True False]", "[False  True]"], ["[1.e+00 0.0]", "[0. 1.]"]])
def test_zeros_and_ones_as_numpy_writes_them(values):
    labels, found = both(values)
    assert labels.problem_type == "multi_label_classification" and found == [[1, 0], [0, 1]]


def test_nan_among_numbers_is_no_label():
    """A file of texts alone, such as csv, has NaN as one; among words it is a word."""
    says = r"line 3: the row has no label \(2 of 4 rows have none\)"
    for values in (["0.0", "1.0", "nan", "NaN"], [0, "1", "NAN", ""], ["0.5", "1.5", "nan", "nan"]):
        with pytest.raises(ValueError, match=says):
            find_labels(values, where)
    with pytest.raises(ValueError, match="line 2: the row has no label;"):
        find_labels(["0", "1"], where).encode(["1", "nan"], where)
    assert both(["nan", "naan", "nan"])[0].names == ("naan", "nan")
    assert find_labels(["nan", "1", "a"] * 2, where).encode(["1", "nan"], where).tolist() == [0, 2]


def test_lists_and_objects_where_rows_have_one_label():
    labels = find_labels(["a", "b"], where)
    with pytest.raises(ValueError, match=r"line 2: the label is a list \(\['a'\]\), but problem_type is single_label"):
        labels.encode(["b", ["a"]], where)
    with pytest.raises(ValueError, match="line 1: the label is {'a': 1}, expected a text"):
        labels.encode([{"a": 1}], where)


def test_ids_mean_the_classes_of_their_source():
    named = find_labels(["bad", "good"], where)
    assert named.encode([1, 0, 1], where, classes=["bad", "good"]).tolist() == [1, 0, 1]
    assert named.encode([1, 0, 1], where, classes=["Good", "Bad"]).tolist() == [0, 1, 0]
    assert named.encode(["good", "bad"], where, classes=["good", "bad"]).tolist() == [1, 0]
    with pytest.raises(ValueError, match="line 2: the row has no label;"):
        named.encode([1, -1], where, classes=["bad", "good"])
    with pytest.raises(ValueError, match="line 1: label 2 is outside num_labels 2"):
        named.encode([2], where, classes=["bad", "good"])
    by_id = find_labels([1, 0], where, names=["bad", "good"])
    assert by_id.encode(["good", "bad"], where).tolist() == [1, 0]
    assert by_id.encode([1, 0], where, classes=["good", "bad"]).tolist() == [0, 1]
    lists = find_labels([["a", "b"], ["c"]], where)
    assert lists.encode([[2], [0, 1]], where, classes=["a", "b", "c"]).tolist() == [[0, 0, 1], [1, 1, 0]]
    assert lists.encode([[2], [0, 1]], where, classes=["c", "a", "b"]).tolist() == [[0, 1, 0], [1, 0, 1]]
    numbers = find_labels([0, 1], where, names=["1", "0"])
    assert numbers.encode([0, 1], where, classes=["1", "0"]).tolist() == [0, 1]


@pytest.mark.parametrize("names", [("True", "False"), ("false", "true"), ("no", "yes")])
def test_booleans_are_the_classes_that_are_called_so(names):
    labels = find_labels([True, False, True], str, names=names)
    expected = [1, 0, 1] if names != ("True", "False") else [0, 1, 0]
    assert labels.encode([True, False, True], str).tolist() == expected
    assert Labels("single_label_classification", names, by_id=True).encode([True], str).tolist() == expected[:1]


def test_a_label_that_is_none():
    for values in ([{"a": 1}] * 4, [["x"], [["y"]]], [["x"], [{"y": 1}]]):
        with pytest.raises(ValueError, match=r"row \d: the label is .*, expected a text, a number, or a list of these"):
            find_labels(values, lambda i: f"row {i}")


def test_minus_one_is_a_label_where_a_class_is_called_so():
    """As of sentiments: what was trained is evaluated by the names of the model's classes."""
    values = [-1, 0, 1, -1]
    labels = find_labels(values, where)
    again = find_labels(values, where, problem_type=labels.problem_type, num_labels=3, names=labels.names)
    assert again.encode(values, where).tolist() == labels.encode(values, where).tolist() == [0, 1, 2, 0]
    scores = find_labels([-1, -1.0, 0.5], where, problem_type="regression", num_labels=1, names=["LABEL_0"])
    assert scores.encode([-1, -1.0, 0.5], where).tolist() == [-1, -1, 0.5]
    with pytest.raises(ValueError, match="line 2: the row has no label"):
        find_labels([0, -1, 1], where, names=["0", "1"]).encode([0, -1], where)


@pytest.mark.parametrize("values", [["1.0", "2.0", "1.0"], [1.0, 2.0, 1.0], [[1.0], [2.0], ["1.0"]]])
def test_numbers_with_a_point_are_the_classes_called_so(values):
    """As pandas writes them into csv where another row had no value; the classes of a trained model are 1, 2 and 3."""
    labels = find_labels([1, 2, 3, 1], where)
    kind = "single_label_classification" if not isinstance(values[0], list) else "multi_label_classification"
    again = find_labels(values, where, problem_type=kind, num_labels=3, names=labels.names)
    targets = again.encode(values, where)
    assert (targets if targets.ndim == 1 else targets.argmax(1)).tolist() == [0, 1, 0]


def test_two_classes_as_zeros_and_ones():
    """A row with one of two labels, [1, 0], is not the list of both."""
    labels, found = both([[1, 1], [0, 1], [0, 0]])
    assert labels.encode([[1, 0], [0, 1]], where).tolist() == [[1, 0], [0, 1]]
    assert labels.encode([[0, 1], [0, 1]], where).tolist() == [[0, 1], [0, 1]]
    assert both([[1, 0], [0, 1]])[1] == [[1, 0], [0, 1]]
    assert both([[1, 0], [0, 1]], names=["x", "y"])[1] == [[1, 0], [0, 1]]
    assert both([[0], [1], [0, 1]])[1] == [[1, 0], [0, 1], [1, 1]]


def test_a_row_of_zeros_and_ones_that_is_too_short():
    """It does not make numbers of classes of the others, in training or in an evaluation."""
    says = r"line 1: the label \[1, 0, 0\] has 0 twice, expected each class once, or in all rows a list with"
    rows = [[1, 0, 0], [0, 1, 1], [0, 1]]
    with pytest.raises(ValueError, match=says):
        both(rows)
    with pytest.raises(ValueError, match=says):
        find_labels([[1, 0, 0], [0, 1, 1]], where).encode(rows, where)
    assert both([["a", "a"], ["b"]])[1] == [[1, 0], [0, 1]]  # a name that recurs says what it says


def test_how_two_classes_are_written_does_not_depend_on_the_rows_evaluated():
    ids, names = find_labels([[0], [1], [], [0, 1]], where), find_labels([["a"], ["b"], ["a", "b"]], where)
    again = {"problem_type": "multi_label_classification", "names": ["0", "1"]}
    for values in ([[0, 1], [0, 1]], [[0, 1], [1, 0]]):
        assert ids.encode(values, where).tolist() == [[1, 1], [1, 1]]
        assert names.encode(values, where).tolist() == values
        assert find_labels(values, where, **again).encode(values, where).tolist() == values


def test_regression():
    labels, values = both([0.5, "2", 3.25, 1])
    assert (labels.problem_type, labels.names, values) == ("regression", ("score",), [0.5, 2.0, 3.25, 1.0])
    assert both([1, 2], problem_type="regression")[1] == [1.0, 2.0]
    assert both([[1, 2.5], [0, 1]], problem_type="regression")[1] == [[1.0, 2.5], [0.0, 1.0]]
    for lists in ([[1, 2.5], [0, 1]], ["[1.0, 2.5]", "[0, 1]"]):
        labels, values = both(lists)
        assert (labels.problem_type, values) == ("regression", [[1.0, 2.5], [0.0, 1.0]])
    with pytest.raises(ValueError, match="line 2: label .* is not a list of 2 numbers"):
        find_labels([[1, 2.5], [1]], where)
    assert find_labels([["1.5"], ["2"]], where).names == ("1.5", "2")
    with pytest.raises(ValueError, match="line 2: label 'high' is not a number"):
        find_labels([1.5, "high"], where, problem_type="regression")
    with pytest.raises(ValueError, match=r"line 2: label 1e\+39 is beyond 3.4e\+38"):
        both([0.5, 1e39])  # infinite in 32 bits
    with pytest.raises(ValueError, match="line 2: label .* is not a list of 2 numbers"):
        find_labels([[1, 2.5], [1]], where, problem_type="regression")


@pytest.mark.parametrize(
    ("values", "names", "hot"),
    [
        ([["a", "c"], ["b"], []], ("a", "b", "c"), [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        ([[0, 2], [1], [2]], ("0", "1", "2"), [[1, 0, 1], [0, 1, 0], [0, 0, 1]]),
        ([[0, 0, 1], [1, 0, 1]], ("0", "1", "2"), [[0, 0, 1], [1, 0, 1]]),
        ([["0", "1"], ["1"]], ("0", "1"), [[1, 1], [0, 1]]),
        # Lists in the cells of a csv file, as Python, JSON and numpy write them.
        (["['a, x', 'c']", '["b"]', "[]"], ("a, x", "b", "c"), [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        (["[0, 2]", "[1]", "[2]"], ("0", "1", "2"), [[1, 0, 1], [0, 1, 0], [0, 0, 1]]),
        (["[0 0 1]", "[1. 0. 1.]"], ("0", "1", "2"), [[0, 0, 1], [1, 0, 1]]),
        (["['a' \"b\"]", "['b']"], ("a", "b"), [[1, 1], [0, 1]]),
    ],
)
def test_multi_label(values, names, hot):
    labels, found = both(values)
    assert (labels.problem_type, labels.names, found) == ("multi_label_classification", names, hot)
    assert labels.encode(values, where).dtype == np.float32


def test_multi_label_written_as_text():
    kind = "multi_label_classification"
    assert both(["a|c", "b", '["a", "b"]', "b, c"], problem_type=kind)[1] == [
        [1, 0, 1],
        [0, 1, 0],
        [1, 1, 0],
        [0, 1, 1],
    ]
    with pytest.raises(ValueError, match="line 1: label 'z' is not one of the labels"):
        find_labels(["a|b"], where, problem_type=kind).encode(["a|z"], where)
    assert both([[1], [0, 1]], names=["x", "y"])[1] == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([0, 1, 2], True),
        (list(range(3, 13)), True),
        (list(range(11)), False),
        ([str(i) for i in range(1000, 1020)], False),
        ([*range(11), 0], True),
        ([*range(101), *range(100)], False),
        ([*range(101), *range(101)], True),
        ([*range(11), "eleven"], None),  # texts: see below
    ],
)
def test_numbers_of_rows_are_no_labels(values, fits):
    if fits:
        assert len(find_labels(values, where).names) == len(set(values))
        return
    says = r"label_column: it has \d+ different whole numbers in \d+ rows, such as \S+ \(a.csv, line 1\), .* num_labels"
    with pytest.raises(ValueError, match="label_column: got 12 labels in 12 rows" if fits is None else says):
        find_labels(values, where)
    if fits is False:  # who says what they are is taken at their word
        for given in ({"problem_type": "single_label_classification"}, {"problem_type": "regression"}):
            assert find_labels(values, where, **given).problem_type == given["problem_type"]
    if values[0] == 0 and fits is False:
        assert len(find_labels(values, where, num_labels=101).names) == 101


@pytest.mark.parametrize(
    ("values", "given", "found"),
    [
        ([0, 1, 1], {}, ("single_label_classification", 2)),
        (range(20), {"problem_type": "single_label_classification"}, ("single_label_classification", 20)),
        (range(20), {"num_labels": 20}, ("single_label_classification", 20)),
        (range(20), {"num_labels": 30}, ("single_label_classification", 20)),
        (range(20), {"problem_type": "regression"}, ("single_label_classification", 1)),
        (["a|b", "a", "b"] * 2, {"problem_type": "multi_label_classification"}, ("single_label_classification", 2)),
        ([[1], [0, 1]], {"problem_type": "multi_label_classification"}, ("multi_label_classification", 2)),
        (["1.5", "2"], {"problem_type": "regression", "num_labels": 1}, ("regression", 1)),
        ([0, 0], {"num_labels": 2}, ("single_label_classification", None)),
        (["[1]", "[a b]"], {"problem_type": "single_label_classification"}, (None, 2)),
    ],
)
def test_what_would_have_been_found_without_flags(values, given, found):
    flags = {"problem_type": None, "num_labels": None, "names": None, **given}
    labels = find_labels(list(values), where, **flags)
    without = unsaid(list(values), where, labels, **flags)
    assert (without.get("problem_type"), without.get("num_labels")) == found


def test_one_label_or_several_is_asked():
    for values, line in ((["a", "b", "a|b"], 3), (["27", "2,27", "2"], 2), (["0,5", "1,5", "2,5"], 1)):
        with pytest.raises(ValueError, match=rf"line {line}: is the label .* one or several\? Give problem_type"):
            find_labels(values * 2, where)
        assert len(find_labels(values * 2, where, problem_type="single_label_classification").names) == 3
    assert both(["[x] y", "[z]", "a, b"] * 2)[0].names == ("[x] y", "[z]", "a, b")


def test_kind_that_does_not_fit():
    with pytest.raises(ValueError, match="line 2: the label is a list .* but problem_type is single_label"):
        find_labels(["a", ["b"]], where, problem_type="single_label_classification")
    with pytest.raises(ValueError, match=r"label_column: all lists .* in it are empty \(first at a.csv, line 1\)"):
        find_labels([[], []], where)
    with pytest.raises(ValueError, match="all rows have the same label, 'a'"):
        find_labels(["a", "a"], where)
    with pytest.raises(ValueError, match="label_column: got 5 labels in 5 rows .* is it the right column"):
        find_labels(["a", "b", "c", "d", "e"], where)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["0111", "0112", "2310"], ("0111", "0112", "2310")),  # codes of industries
        (["01", "1"], ("01", "1")),
        (["1e3", "1000", "+1", "1"], ("+1", "1", "1000", "1e3")),
        (["00", "01"], ("00", "01")),
        (["07", 7, "7"], ("07", "7")),
    ],
)
def test_labels_keep_their_spelling(values, names):
    labels = find_labels(values * 3, where)
    assert labels.names == names
    assert [labels.names[i] for i in labels.encode(values, where)] == [str(value) for value in values]
    with pytest.raises(ValueError, match="line 1: label '0x' is not one of"):
        labels.encode(["0x"], where)
    with pytest.raises(ValueError, match="label '02' is outside num_labels 2"):
        find_labels(["0", "1"], where).encode(["02"], where)


@pytest.mark.parametrize("value", [1, "1", "a", "01", 0])
def test_one_class_alone_is_nothing_to_learn(value):
    with pytest.raises(ValueError, match="all rows have the same label"):
        find_labels([value] * 3, where)

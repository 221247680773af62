"""Rows of multiple choice in the forms that data sets have, and rows that are wrong."""

import pytest
from file_toys import table

from modelcenter.data.schemas.choices import correct_choices, find_choice_columns, read_choices

FORMS = {
    "swag": (
        {"sent1": ["One."], "sent2": ["He"], "ending0": ["runs"], "ending1": ["sits"], "label": [1]},
        (["One.", "One."], ["He runs", "He sits"], [1]),
    ),
    "copa": (
        {"premise": ["Rain."], "choice1": ["a"], "choice2": ["b"], "question": ["cause"], "label": ["0"]},
        (["Rain.", "Rain."], ["What was the cause? a", "What was the cause? b"], [0]),
    ),
    "race": (
        {"article": ["T."] * 2, "question": ["It _.", "my_name?"], "options": [["a", "b"]] * 2, "answer": ["B", "A"]},
        (["T."] * 4, ["It a.", "It b.", "my_name? a", "my_name? b"], [1, 0]),
    ),
    "arc": (
        {"question": ["q"], "choices": [{"label": ["1", "2"], "text": ["x", "y"]}], "answerKey": ["2"]},
        (["q", "q"], ["x", "y"], [1]),
    ),
    "social-iqa": (
        {"context": ["c"], "question": ["q?"], "answerA": ["1"], "answerB": ["5"], "answerC": ["z"], "label": ["3"]},
        (["c"] * 3, ["q? 1", "q? 5", "q? z"], [2]),
    ),
    "c3": (
        {"context": [["甲。", "乙。"]], "question": ["谁？"], "choice": [["他", "她", "我"]], "answer": ["她"]},
        (["甲。\n乙。"] * 3, ["谁？他", "谁？她", "谁？我"], [1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    columns, (firsts, seconds, right) = FORMS[form]
    rows = table(**columns)
    found = find_choice_columns(rows)
    choices = read_choices(rows, found)
    assert choices.pairs() == (firsts, seconds)
    assert correct_choices(rows, found.label, choices)[0].tolist() == right


def test_choices_in_the_cells_of_a_csv_file():
    spelt = ["['a', 'b']", '["a", "b"]', "{'text': array(['a', 'b'], dtype=object), 'label': array(['A', 'B'])}"]
    for text in spelt:
        rows = table(question=["q"], options=[text], answer=["B"])
        columns = find_choice_columns(rows)
        assert read_choices(rows, columns).offered == [["a", "b"]]


def test_spaces_around_a_text_are_left_out():
    rows = table(premise=[" Rain.\n"], choice1=["a"], choice2=["b"], label=[0])
    assert read_choices(rows, find_choice_columns(rows)).pairs()[0] == ["Rain.", "Rain."]


def test_numbers_from_one_are_told_by_the_rows_or_given():
    rows = table(question=["q"] * 3, option1=["x"] * 3, option2=["y"] * 3, answer=[1, 2, 1])
    choices = read_choices(rows, find_choice_columns(rows))
    targets, first, kind = correct_choices(rows, "answer", choices)
    assert targets.tolist() == [0, 1, 0] and (first, kind) == (1, "number")
    with pytest.raises(ValueError, match=r"line 2: label '2' in column 'answer' is none of the 2 choices; .* 0 to 1"):
        correct_choices(rows, "answer", choices, first=0)


@pytest.mark.parametrize(
    ("labels", "right"),
    [([0.0, 1.0], [0, 1]), (["1.0", "2.0"], [0, 1]), ([False, True], [0, 1]), ([2.0, None], "line 2: the row has no")],
)
def test_whole_floats_and_truth_values_are_numbers(labels, right):
    rows = table(question=["q"] * 2, option1=["x"] * 2, option2=["y"] * 2, label=labels)
    choices = read_choices(rows, find_choice_columns(rows))
    if isinstance(right, list):
        assert correct_choices(rows, "label", choices)[0].tolist() == right
    else:
        with pytest.raises(ValueError, match=right):
            correct_choices(rows, "label", choices)


def test_labels_of_other_rows_are_of_the_same_kind():
    """The number of a choice that is a number, which rows without a 0 could also name by its text."""

    def read(labels, *known):
        rows = table(question=["q"] * len(labels), choices=[list("1234")] * len(labels), label=labels)
        targets, *found = correct_choices(rows, "label", read_choices(rows, find_choice_columns(rows)), *known)
        return targets.tolist(), *found

    assert read([0, 1, 2, 3]) == ([0, 1, 2, 3], 0, "number")
    assert read([1, 2, 3], 0, "number") == ([1, 2, 3], 0, "number")
    assert read([1, 2, 3]) == ([0, 1, 2], 0, "text")
    assert read(["B", "A"], 0, "number") == ([1, 0], 0, "letter")  # of another data set: none is a number
    with pytest.raises(ValueError, match="line 2: label '4' .* expected 0 to 3, .*; other rows are .* label_kind num"):
        read([1, 4], 0, "number")


GOOD = {"question": ["q", "r"], "choice1": ["x", "y"], "choice2": ["u", "v"], "label": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "given", "says"),
    [
        ({"choice2": None}, {}, "choices_column: which columns of a.jsonl hold the choices"),
        ({"label": None}, {}, "label_column: which column of a.jsonl has the correct choice"),
        ({"question": None, "about": ["a", "b"]}, {}, "context_column: which column .* do the choices belong to"),
        ({}, {"choices": "choice1,choice3"}, "choices_column: a.jsonl has no column 'choice3'.*did you mean 'choice"),
        ({}, {"choices": "choice1,choice1"}, "'choice1' has two roles"),
        ({}, {"question": "choice1", "choices": "choice1,choice2"}, "'choice1' has two roles"),
        ({"choice2": ["u", " "]}, {}, r"line 2: got \['y', ' '\] in column 'choice1', 'choice2', expected two or more"),
        ({"question": ["q", None]}, {}, "line 2: the row has no text in column 'question'"),
        ({"question": ["q", {"a": 1}]}, {}, r"line 2: the row has \{'a': 1\}, expected a text, in column 'question'"),
        ({"question": ["q", ["r", {"a": 1}]]}, {}, "line 2: the row has .*, expected a text, in column 'question'"),
        ({"label": [0, float("nan")]}, {}, "line 2: the row has no label in column 'label'"),
        ({"label": [0, None]}, {}, "line 2: the row has no label in column 'label'"),
        ({"label": [0, "third"]}, {}, "line 2: label 'third' .* is none of the 2 choices"),
    ],
)
def test_columns_and_rows_without_choices_are_named(changes, given, says):
    rows = table(**{name: values for name, values in (GOOD | changes).items() if values is not None})
    with pytest.raises(ValueError, match=says):
        columns = find_choice_columns(rows, **given)
        correct_choices(rows, columns.label, read_choices(rows, columns))

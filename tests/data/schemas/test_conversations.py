"""Columns of chats, instructions and texts; the turns they make; what is wrong with rows that make none."""

import json

import numpy as np
import pytest
from file_toys import table

from modelcenter.data.schemas.conversations import TOOLS, ChatColumns, conversations, find_chat_columns
from modelcenter.data.schemas.preferences import find_preference_columns, preferences


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("mr ref", {"prompt": "mr", "response": "ref"}),
        ("prompt completion", {"prompt": "prompt", "response": "completion"}),
        ("instruction input output", {"prompt": "instruction", "input": "input", "response": "output"}),
        (
            "instruction context response category",
            {"prompt": "instruction", "input": "context", "response": "response"},
        ),
        ("system question answer", {"prompt": "question", "response": "answer", "system": "system"}),
        ("id text", {"text": "text"}),
        ("lines", {"text": "lines"}),
    ],
)
def test_usual_columns(names, expected):
    data = table(**{name: ["a", "b"] for name in names.split()})
    assert find_chat_columns(data, {}) == ChatColumns(**expected)


def test_messages_win_but_a_column_that_is_given_decides():
    data = table(messages=[[user("a"), answer("b")]], prompt=["p"], completion=["c"], text=["t"])
    assert find_chat_columns(data, {}) == ChatColumns(messages="messages")
    assert find_chat_columns(data, {"prompt": "prompt"}) == ChatColumns(prompt="prompt", response="completion")
    assert find_chat_columns(data, {"text": "text"}) == ChatColumns(text="text")
    assert find_chat_columns(table(question=["a"]), {}, answered=False) == ChatColumns(prompt="question")
    two = table(messages=[[user("a"), answer("b")]], chat=[[user("c"), answer("d")]])
    assert find_chat_columns(two, {"messages": "chat"}) == ChatColumns(messages="chat")
    for counts in ([3], [None]):  # a column that is called so and holds none
        data = table(messages=counts, prompt=["p"], completion=["c"])
        assert find_chat_columns(data, {}) == ChatColumns(prompt="prompt", response="completion")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": "promt"}, "prompt_column: a.jsonl has no column 'promt', .*did you mean 'prompt'"),
        ({"prompt": "prompt", "text": "note"}, "prompt_column and text_column do not go together"),
        ({"prompt": "note"}, "response_column: which column of a.jsonl goes with 'note'"),
        ({"prompt": "note", "response": "note"}, r"'note' has two roles \(prompt, response\)"),
        ({}, "none of which has a usual name of messages, prompt and response, or text. Give messages_column"),
    ],
)
def test_columns_that_do_not_do(given, said):
    with pytest.raises(ValueError, match=said):
        find_chat_columns(table(prompt=["a"], note=["b"]), given)


def test_an_answer_without_its_question_asks_for_that():
    with pytest.raises(ValueError, match="prompt_column: which column of a.jsonl goes with 'note'"):
        find_chat_columns(table(other=["a"], note=["b"]), {"response": "note"})


def test_turns_of_all_forms():
    sharegpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    openai = [user("q"), {"role": "assistant", "content": [{"type": "text", "text": "a"}], "name": None}]
    written = [json.dumps([user("q")]), json.dumps([user("q")], indent=1), str([user("q")])]  # in a cell of a csv file
    found = conversations(table(x=[sharegpt, openai, *written]), ChatColumns(messages="x"))
    assert found == [
        [{"role": "system", "content": "s"}, user("q"), answer("a")],
        [user("q"), answer("a")],
        *[[user("q")]] * 3,
    ]
    for text in written:
        assert find_chat_columns(table(id=["1"], messages=[text]), {}).messages == "messages"
    alpaca = table(
        instruction=["do", "do", "do"], input=["it", "", None], output=["done", "  ", 4], system=["s", "", None]
    )
    found = conversations(alpaca, find_chat_columns(alpaca, {}))
    assert found[0] == [{"role": "system", "content": "s"}, user("do\nit"), answer("done")]
    assert found[1:] == [[user("do")], [user("do"), answer("4")]]
    trl = table(prompt=[[user("q")]], completion=[[answer("a")]])
    assert conversations(trl, find_chat_columns(trl, {})) == [[user("q"), answer("a")]]


def test_the_system_column_of_chats():
    """As ToolACE and LLaMA-Factory's ShareGPT have it; messages that begin with a system turn keep theirs."""
    own = [{"role": "system", "content": "own"}, user("q")]
    data = table(id=[1, 2, 3], System_Prompt=["s", None, " "], conversations=[[user("q")], [user("q")], own])
    columns = find_chat_columns(data, {})
    assert columns == ChatColumns(messages="conversations", system="System_Prompt")
    assert conversations(data, columns) == [[{"role": "system", "content": "s"}, user("q")], [user("q")], own]
    data.columns["System_Prompt"][2] = "s"
    assert conversations(data, columns)[2] == own


@pytest.mark.parametrize("cell", [["a", "b"], {"a": "b"}, b"a"])
@pytest.mark.parametrize("role", ["input", "system"])
def test_what_is_no_text_beside_a_prompt(role, cell):
    """It would be read as Python writes it."""
    data = table(prompt=["q", "q"], completion=["a", "a"], more=["b", cell])
    with pytest.raises(ValueError, match="a.jsonl, line 2: the row has .*, expected a text, in column 'more'"):
        conversations(data, find_chat_columns(data, {role: "more"}))
    data.columns |= {"chosen": ["a", "a"], "rejected": ["b", "b"]}
    with pytest.raises(ValueError, match="a.jsonl, line 2: the row has .*, expected a text, in column 'more'"):
        preferences(data, find_preference_columns(data, {role: "more"}))


def test_arrays_of_messages_in_the_cells_of_a_csv_file():
    """pandas writes the lists that it has read from parquet as numpy shows them, without commas."""
    asked, said = user("it's {a} {'b': 1}\n {c}"), answer('"} {" \\" \\\\')
    rows = [[asked, said], [said], [asked | {"name": None}, said, asked, said]]
    cells = [str(np.array(row)) for row in rows]
    assert "} {" in cells[0].replace("\n", "") and ", {" not in cells[0]
    found = [conversations(table(messages=[cell]), ChatColumns(messages="messages"))[0] for cell in cells]
    assert found == [[asked, said], [said], [asked, said, asked, said]]
    chosen, rejected = (str(np.array([user("q"), end])) for end in (said, answer("no")))
    pair = table(prompt=["q"], chosen=[chosen], rejected=[rejected])
    assert preferences(pair, find_preference_columns(pair, {})) == [[user("q"), said], [user("q"), answer("no")]]


def test_texts_that_begin_like_messages():
    whole = str([user("q"), answer("a")])
    broken = {"cut": whole[:-9], "nan": whole.replace("'a'", "nan"), "other": "[{x}] is a set in a list"}
    for name, cell in broken.items():
        rows = table(messages=[whole, cell])
        with pytest.raises(ValueError, match="line 2: got .* in column 'messages', which begins like a list"):
            conversations(rows, find_chat_columns(rows, {}))
        pair = table(prompt=["q"], chosen=["yes"], rejected=[cell])
        if name == "nan":
            with pytest.raises(ValueError, match="line 1: got .* in column 'rejected', which begins like a list"):
                preferences(pair, find_preference_columns(pair, {}))
        else:  # a text, in a column that may have any
            assert preferences(pair, find_preference_columns(pair, {}))[1] == [user("q"), answer(cell)]


def test_tools_of_a_row():
    tool = {"type": "function", "function": {"name": "open"}}
    filled = tool | {"strict": None}  # as parquet fills up fields that other rows have
    cells = [[tool], json.dumps([tool]), [json.dumps(tool)], str([tool]), [filled], "", None, []]
    rows = table(messages=[[user("q"), answer("a")]] * len(cells), tools=cells)
    columns = find_chat_columns(rows, {})
    assert columns.tools == "tools"
    found = conversations(rows, columns)
    assert found[:5] == [[user("q") | {TOOLS: [tool]}, answer("a")]] * 5
    assert found[5:] == [[user("q"), answer("a")]] * 3
    pair = table(prompt=["q"], chosen=["yes"], rejected=["no"], tools=[[tool]])
    found = preferences(pair, find_preference_columns(pair, {}))
    assert found == [[user("q") | {TOOLS: [tool]}, answer(said)] for said in ("yes", "no")]
    schema = {"name": "open", "parameters": {"unit": {"enum": ["m", None], "default": None}}}
    written = table(messages=[[user("q")]], tools=[json.dumps([schema])])  # nobody filled up what is a text
    assert conversations(written, find_chat_columns(written, {}))[0][0][TOOLS] == [schema]
    names = table(messages=[[user("q")]], tools=["hammer and saw"])  # of another meaning
    assert find_chat_columns(names, {}).tools is None
    with pytest.raises(ValueError, match="line 1: got 'hammer and saw' in column 'tools', expected a list of tools"):
        conversations(names, find_chat_columns(names, {"tools": "tools"}))


def test_calls_hold_what_was_said_in_them():
    """Parquet gives the arguments of a call those of all others, too, as None."""

    def call(**arguments):
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    filled = call(city="Paris", amount=None, more={"a": 1, "b": None}, days=[1, None]) | {"content": None}
    rows = table(messages=[[user("q"), filled], json.dumps([user("q"), call(city=None)])])
    first, second = conversations(rows, find_chat_columns(rows, {}))
    assert first[1] == call(city="Paris", more={"a": 1}, days=[1, None]) | {"content": ""}
    assert second[1] == call(city=None) | {"content": ""}  # a text: nobody filled it up


def test_documents_with_their_summaries():
    """They are no plain texts, though "document" is a name of those."""
    rows = table(document=["a long text"], summary=["short"], id=["1"])
    columns = find_chat_columns(rows, {})
    assert (columns.prompt, columns.response) == ("document", "summary")
    assert find_chat_columns(table(document=["a text"]), {}).text == "document"


def test_a_row_without_an_answer():
    """Be it empty or not there."""
    rows = table(prompt=["a", "b"], response=["", None])
    assert conversations(rows, find_chat_columns(rows, {})) == [[user("a")], [user("b")]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (None, "a.jsonl, line 2: the row has nothing in column 'm', expected a text or messages"),
        ([], "line 2: the row has no message"),
        ("", "line 2: the row has an empty text in column 'm'"),
        ([user("a"), "b"], "line 2, message 2 of column 'm': got 'b', expected an object with role and content"),
        ([{"role": "robot", "content": "a"}], "line 2, message 1 .*: got the role 'robot', expected one of system"),
        ([{"role": "user"}], "line 2, message 1 .*: got None as content"),
    ],
)
def test_rows_that_are_no_conversation(row, said):
    with pytest.raises(ValueError, match=said):
        conversations(table(m=[[user("a")], row]), ChatColumns(messages="m"))


def test_preferences():
    plain = table(prompt=["q"], chosen=["yes"], rejected=["no"])
    columns = find_preference_columns(plain, {})
    assert preferences(plain, columns) == [[user("q"), answer("yes")], [user("q"), answer("no")]]
    # What both begin with is the question; earlier answers in it are not trained on.
    asked = [user("a"), answer("b"), user("q")]
    chats = table(chosen=[[*asked, answer("yes")]], rejected=[[*asked, answer("no")]])
    before = [user("a"), answer("b") | {"weight": 0}, user("q")]
    expected = [[*before, answer("yes")], [*before, answer("no")]]
    assert preferences(chats, find_preference_columns(chats, {})) == expected
    same = table(chosen=[[user("q"), answer("yes")]], rejected=[[user("q"), answer("yes")]])  # both still answer
    assert preferences(same, find_preference_columns(same, {})) == [[user("q"), answer("yes")]] * 2
    repeated = table(prompt=["q"], chosen=[[user("q"), answer("yes")]], rejected=[[user("q"), answer("no")]])
    assert preferences(repeated, find_preference_columns(repeated, {})) == preferences(plain, columns)
    named = [[user("q ") | {"id": said}, answer(said)] for said in ("yes", "no")]  # the same question, all the same
    repeated = table(prompt=["q"], chosen=named[:1], rejected=named[1:])
    found = preferences(repeated, find_preference_columns(repeated, {}))
    assert [[turn["content"] for turn in row] for row in found] == [["q ", "yes"], ["q ", "no"]]
    other = table(prompt=["a"], chosen=[[user("q"), answer("yes")]], rejected=["no"])
    said = "line 1: column 'chosen' begins with the question 'q', column 'prompt' ends with 'a': expected the same"
    with pytest.raises(ValueError, match=said):
        preferences(other, find_preference_columns(other, {}))
    more = [answer("b"), user("c")]  # an answer of several turns is one
    longer = table(prompt=["q"], chosen=[[*more, answer("yes")]], rejected=[[*more, answer("no")]])
    assert preferences(longer, find_preference_columns(longer, {}))[0] == [user("q"), *more, answer("yes")]
    with pytest.raises(ValueError, match="rejected_column: which column of a.jsonl has the rejected answers"):
        find_preference_columns(table(prompt=["q"], chosen=["a"]), {})
    bare = table(chosen=["yes"], rejected=["no"])
    with pytest.raises(ValueError, match="line 1: the row has no prompt; give prompt_column"):
        preferences(bare, find_preference_columns(bare, {}))

"""Rows as conversations: the columns of prompts and responses, and the turns made from them.

A row is a chat (a list of messages), an instruction with its answer, an object of CPM-Bee (data.structured), or plain
text. A conversation is a list of {"role": "system" | "user" | "assistant" | "tool", "content": str}, as chat templates
take them; its first turn also holds the row's tools (TOOLS), which templates take as a separate argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from modelcenter.data.readers.literals import parse_json, parse_list
from modelcenter.data.schemas.column_names import TEXT_NAMES, TOOLS_NAMES
from modelcenter.data.schemas.columns import check_columns, is_missing
from modelcenter.data.structured import ANSWER
from modelcenter.data.table import Table

Conversation = list[dict[str, Any]]

MESSAGES_NAMES = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("instruction", "completion"), ("prompt", "completion"),
    ("prompt", "response"), ("prompt", "output"), ("prompt", "answer"), ("query", "response"), ("query", "answer"),
    ("question", "answer"), ("question", "response"), ("problem", "solution"), ("input", "output"),
    ("source", "target"), ("context", "response"), ("mr", "ref"), ("document", "summary"), ("article", "highlights"),
    ("article", "summary"), ("article", "abstract"), ("dialogue", "summary"),
)  # fmt: skip
INPUT_NAMES = ("input", "context")  # the input that an instruction applies to
SYSTEM_NAMES = ("system", "system_prompt")
TOOLS = "<tools>"  # key of the tools in a conversation's first turn; no message has a key of this name
_MESSAGES = re.compile(r"\s*\[\s*\{")  # the beginning of a list of messages written as text
_ROLE_KEY = re.compile(r"""["'](role|from)["']\s*:""")
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class ChatColumns:
    """Names of the columns by role. One of messages, prompt, answers and text is set; the others depend on the data."""

    messages: str | None = None
    prompt: str | None = None
    input: str | None = None
    response: str | None = None
    system: str | None = None
    text: str | None = None
    answers: str | None = None
    tools: str | None = None

    def shown(self) -> str:
        """In words: "prompt 'mr', response 'ref'"."""
        return ", ".join(f"{role} {name!r}" for role, name in vars(self).items() if name is not None)


def find_chat_columns(table: Table, given: Mapping[str, str | None], *, answered: bool = True) -> ChatColumns:
    """Check the columns given by role and find the others by their usual names.

    A given column decides the kind of rows. Otherwise the first of these that the table has: objects (with a column
    called "<ans>"), messages, instructions with answers, plain text.

    Args:
        answered: a prompt needs a response; otherwise the response is None unless given.

    Raises:
        ValueError: a column does not exist, roles do not go together, or no usable columns are found.
    """
    named = {role: name for role, name in given.items() if name is not None}
    check_columns(table, named)
    kinds = [kind for kind in _KINDS if kind.roles & set(named)]
    if len(kinds) > 1:
        raise ValueError(
            f"columns: {' and '.join(f'{role}_column' for role in named)} do not go together; give messages, or prompt "
            "and response, or answers, or text"
        )
    search = _Search(table, named, answered)
    for kind in kinds or _KINDS:
        if (columns := kind.find(search)) is not None:
            return columns
    raise ValueError(
        f"columns: {table.name} has the columns {', '.join(map(repr, table.columns))}, none of which has a usual name "
        "of messages, prompt and response, or text. Give messages_column, or prompt_column and response_column, or "
        "text_column"
    )


@dataclass(frozen=True)
class _Search:
    """Finds the columns for the roles in a table: those given by the caller, the others by their usual names.

    Each method finds the columns of one kind of rows; None: the table has none.
    """

    table: Table
    named: Mapping[str, str]  # by role
    answered: bool

    @cached_property
    def columns(self) -> dict[str, str]:
        """{name in lower case: column}; if several differ only in case, the first."""
        return {name.lower(): name for name in reversed(self.table.columns)}

    def free(self, *used: str | None) -> dict[str, str]:
        """The same, without columns that have a role or are in `used`."""
        taken = {*self.named.values(), *used}
        return {low: name for low, name in self.columns.items() if name not in taken}

    def objects(self) -> ChatColumns | None:
        answers = self.named.get("answers", ANSWER if ANSWER in self.table.columns else None)
        return None if answers is None else ChatColumns(answers=answers)

    def messages(self) -> ChatColumns | None:
        messages = self.named.get("messages")
        if messages is None:
            known = (self.columns[name] for name in MESSAGES_NAMES if name in self.columns)
            messages = next((name for name in known if _holds_messages(self.table.columns[name])), None)
        if messages is None:
            return None
        return ChatColumns(messages=messages, system=self._system(messages), tools=find_tools(self.table, self.named))

    def pair(self) -> ChatColumns | None:
        prompt, response = self._prompt_and_response()
        if prompt is None and response is None:
            if "input" in self.named:
                raise ValueError(
                    "prompt_column: which column is the prompt that input_column belongs to? Give prompt_column"
                )
            return None
        if prompt is None or (response is None and self.answered):
            role, other = ("prompt", response) if prompt is None else ("response", prompt)
            raise ValueError(
                f"{role}_column: which column of {self.table.name} goes with {other!r}? It has "
                f"{', '.join(map(repr, self.table.columns))}. Give {role}_column"
            )
        return ChatColumns(
            prompt=prompt,
            input=self._input(prompt, response),
            response=response if self.answered else None,
            system=self._system(prompt, response),
            tools=find_tools(self.table, {**self.named, "prompt": prompt, "response": response}),
        )

    def text(self) -> ChatColumns | None:
        text = self.named.get("text")
        if text is None:
            text = next((self.columns[name] for name in TEXT_NAMES if name in self.columns), None)
        if text is None and len(self.table.columns) == 1:
            (text,) = self.table.columns
        return None if text is None else ChatColumns(text=text)

    def _prompt_and_response(self) -> tuple[str | None, str | None]:
        """The columns given or, for one that is not, the usual partner of the other; if neither is given, a usual
        pair."""
        prompt, response, free = self.named.get("prompt"), self.named.get("response"), self.free()
        if prompt is None and response is None:
            for first, second in PAIRS:
                if first in free and (second in free or not self.answered):
                    return free[first], free.get(second)
        elif prompt is None:
            prompt = next((free[name] for name, _ in PAIRS if name in free), None)
        elif response is None:
            response = next((free[name] for _, name in PAIRS if name in free), None)
        return prompt, response

    def _input(self, prompt: str, response: str | None) -> str | None:
        """The column of the input of an instruction; for other prompts None unless given."""
        if "input" in self.named or prompt.lower() != "instruction":
            return self.named.get("input")
        free = self.free(prompt, response)
        return next((free[name] for name in INPUT_NAMES if name in free), None)

    def _system(self, *used: str | None) -> str | None:
        if "system" in self.named:
            return self.named["system"]
        free = self.free(*used)
        return next((free[name] for name in SYSTEM_NAMES if name in free), None)


class _Kind(NamedTuple):
    """A kind of rows: the roles that only this kind has, and the method that finds its columns."""

    roles: set[str]
    find: Callable[[_Search], ChatColumns | None]


_KINDS = (  # in order of preference
    _Kind({"answers"}, _Search.objects),
    _Kind({"messages"}, _Search.messages),
    _Kind({"prompt", "response", "input"}, _Search.pair),
    _Kind({"text"}, _Search.text),
)


def find_tools(table: Table, named: Mapping[str, str | None]) -> str | None:
    """The column that lists the tools of each row: the given one, or one with a usual name that holds such lists."""
    if named.get("tools"):
        return named["tools"]
    lower = {name.lower(): name for name in reversed(table.columns) if name not in named.values()}
    known = [lower[name] for name in TOOLS_NAMES if name in lower]
    return next((name for name in known if any(_parse_tools(value) for value in table.columns[name][:1000])), None)


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools listed in a cell, as objects or as JSON; [] if it is empty, None if it holds something else."""
    from_text = isinstance(value, str)  # written by the author of the data, so nulls are intended
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError:
            value = parse_list(value)
        if value is None:
            return None
    if not value or isinstance(value, str):
        return [] if value is None or isinstance(value, (str, list, tuple, dict)) else None
    tools = [value] if isinstance(value, dict) else value
    if not isinstance(tools, (list, tuple)):
        return None
    parsed = []
    for tool in tools:
        one = _parse_tools(tool) if isinstance(tool, str) else [tool]  # each may be a JSON text
        if not one or len(one) != 1 or not isinstance(one[0], dict):
            return None
        parsed.append(one[0] if from_text or isinstance(tool, str) else _without_none(one[0]))
    return parsed


def _without_none(value: Any) -> Any:
    """A value without the None that parquet and the `datasets` library insert for fields of other rows."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, (list, tuple)) else value


def with_tools(table: Table, column: str | None, row: int, turns: Conversation) -> Conversation:
    """A conversation with the tools listed in its row, if any.

    Raises:
        ValueError: the cell holds something else.
    """
    if column is None or not turns:
        return turns
    tools = _parse_tools(table.columns[column][row])
    if tools is None:
        raise ValueError(
            f"{table.where(row)}: got {table.columns[column][row]!r:.80} in column {column!r}, expected a list of "
            'tools ({"type": "function", "function": {...}}), or a JSON text of it'
        )
    return [{**turns[0], TOOLS: tools}, *turns[1:]] if tools else turns


def _holds_messages(values: Sequence[Any]) -> bool:
    first = next((v for v in values if v), None)
    if isinstance(first, str):
        return _MESSAGES.match(first) is not None
    return isinstance(first, (list, tuple)) and all(isinstance(m, dict) for m in first)


def conversations(table: Table, columns: ChatColumns) -> list[Conversation]:
    """The turns of each row of messages or of prompts with responses.

    Without a response column, or with an empty response, a row ends with the prompt.

    Raises:
        ValueError: a row cannot be read as a conversation (with file and line).
    """
    rows = []
    for row in range(len(table)):
        if columns.messages is not None:
            turns = as_turns(table, columns.messages, row, "user", messages=True)
        else:
            assert columns.prompt is not None
            turns = as_turns(table, columns.prompt, row, "user")
            turns = with_input(table, columns.input, row, turns)
            if columns.response is not None:
                turns = turns + as_turns(table, columns.response, row, "assistant")
        turns = with_system(table, columns.system, row, turns)
        rows.append(with_tools(table, columns.tools, row, turns))
    return rows


def with_input(table: Table, column: str | None, row: int, turns: Conversation) -> Conversation:
    """The turns with the row's input, if any, appended to the last turn, an instruction.

    Raises:
        ValueError: the cell does not hold a text.
    """
    text = _text_of(table, column, row)
    return turns if text is None else [*turns[:-1], {**turns[-1], "content": f"{turns[-1]['content']}\n{text}"}]


def with_system(table: Table, column: str | None, row: int, turns: Conversation) -> Conversation:
    """The turns after the row's system prompt, if it has one and they do not begin with one of their own.

    Raises:
        ValueError: the cell does not hold a text.
    """
    text = _text_of(table, column, row)
    own = not turns or turns[0]["role"] == "system"
    return turns if text is None or own else [{"role": "system", "content": text}, *turns]


def _text_of(table: Table, column: str | None, row: int) -> str | None:
    """The text of a cell; None if it is blank or there is no column. Raises ValueError if it holds something else."""
    value = None if column is None else table.columns[column][row]
    if isinstance(value, (list, tuple, dict, bytes)):
        raise ValueError(f"{table.where(row)}: the row has {value!r:.60}, expected a text, in column {column!r}")
    return None if is_missing(value) else str(value)


def as_turns(table: Table, column: str, row: int, role: str, messages: bool = False) -> Conversation:
    """The turns of a cell: for a text, one turn of `role`; for a list, its messages; none for a blank text or a missing
    answer.

    messages: the column holds messages, so a text that begins like a list of messages must be one.

    Raises:
        ValueError: the cell holds neither a text nor messages, a text that should represent messages does not, or a
            message has no known role or no text.
    """
    value = table.columns[column][row]
    if value is None and role == "assistant":
        return []
    if isinstance(value, (list, tuple)):
        value = _without_none(value)
    elif isinstance(value, str) and _MESSAGES.match(value):
        spelt = parse_list(value)
        if spelt is None and (messages or (value.rstrip().endswith("]") and _ROLE_KEY.search(value))):
            raise ValueError(
                f"{table.where(row)}: got {value!r:.60} in column {column!r}, which begins like a list of messages but "
                "is not valid JSON, Python or numpy output; correct it or remove the row"
            )
        value = spelt or value  # it may just be a text that begins like a list
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        text = str(value)
        if role == "user" and not text.strip():
            raise ValueError(f"{table.where(row)}: the row has an empty text in column {column!r}")
        return [{"role": role, "content": text}] if text.strip() else []
    if not isinstance(value, (list, tuple)):
        content = "nothing" if value is None else f"{value!r:.60}"
        raise ValueError(f"{table.where(row)}: the row has {content} in column {column!r}, expected a text or messages")
    if not value:
        raise ValueError(f"{table.where(row)}: the row has no message in column {column!r}")
    turns = []
    for i, message in enumerate(value):
        try:
            turns.append(_message(message))
        except ValueError as error:
            raise ValueError(f"{table.where(row)}, message {i + 1} of column {column!r}: {error}") from None
    return turns


def _message(message: Any) -> dict[str, Any]:
    """A message with role, content and its other fields, from current names or ShareGPT's.

    Raises ValueError if it is not a message.
    """
    if not isinstance(message, dict):
        raise ValueError(f"got {message!r:.60}, expected an object with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    role, content = fields.pop("role", None) or fields.pop("from", None), fields.pop("content", None)
    content = fields.pop("value", None) if content is None else content
    if str(role).lower() not in _ROLES:
        raise ValueError(f"got the role {role!r}, expected one of {', '.join(_ROLES)}")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and "tool_calls" in fields):
        raise ValueError(f"got {content!r:.60} as content, expected a text")
    return {"role": _ROLES[str(role).lower()], "content": content or "", **fields}

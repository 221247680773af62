"""Rows of preferences: a prompt, a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelcenter.data.schemas.columns import check_columns
from modelcenter.data.schemas.conversations import (
    INPUT_NAMES,
    Conversation,
    as_turns,
    find_tools,
    with_input,
    with_system,
    with_tools,
)
from modelcenter.data.table import Table

_NAMES = {
    "prompt": ("prompt", "question", "instruction", "query", "input"),
    "chosen": ("chosen", "preferred", "accepted"),
    "rejected": ("rejected", "dispreferred"),
    "system": ("system", "system_prompt"),
}


def find_preference_columns(table: Table, given: Mapping[str, str | None]) -> dict[str, str | None]:
    """{role: column} for prompt, input (of an instruction), chosen, rejected, system and tools: the given columns, else
    those with usual names.

    Without a prompt column the chosen and the rejected messages both begin with the prompt.

    Raises:
        ValueError: a column does not exist, there is none for chosen or rejected, or an input has no prompt.
    """
    named = {role: name for role, name in given.items() if name is not None}
    check_columns(table, named)
    lower = {name.lower(): name for name in reversed(table.columns) if name not in named.values()}
    columns = {
        role: named.get(role) or next((lower[n] for n in names if n in lower), None) for role, names in _NAMES.items()
    }
    for role in ("chosen", "rejected"):
        if columns[role] is None:
            raise ValueError(
                f"{role}_column: which column of {table.name} has the {role} answers? It has "
                f"{', '.join(map(repr, table.columns))}. Give {role}_column"
            )
    prompt, input_ = columns["prompt"], named.get("input")
    if prompt is None and input_ is not None:
        raise ValueError("prompt_column: which column is the prompt that input_column belongs to? Give prompt_column")
    if input_ is None and prompt is not None and prompt.lower() == "instruction":
        used = set(columns.values())
        input_ = next((lower[n] for n in INPUT_NAMES if n in lower and lower[n] not in used), None)
    columns = {"prompt": prompt, "input": input_, **columns}
    return {**columns, "tools": find_tools(table, {**named, **columns})}


def preferences(table: Table, columns: Mapping[str, str | None]) -> list[Conversation]:
    """Two conversations per row, with the chosen and the rejected answer. Only the answers are trained on: other turns
    of the assistant have "weight": 0.

    Raises:
        ValueError: a row has no prompt, an answer that is neither a text nor messages, or answers to another question
            than the prompt (with file and line).
    """
    rows: list[Conversation] = []
    for row in range(len(table)):
        prompt, answers = _split_row(table, columns, row)
        if not prompt:
            raise ValueError(
                f"{table.where(row)}: the row has no prompt; give prompt_column, or chosen and rejected messages that "
                "begin with the same question"
            )
        prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]
        rows += [prompt + answer for answer in answers]
    return rows


def questions(table: Table, columns: Mapping[str, str | None]) -> list[Conversation]:
    """The prompt of each row."""
    return [_split_row(table, columns, row)[0] for row in range(len(table))]


def _split_row(table: Table, columns: Mapping[str, str | None], row: int) -> tuple[Conversation, list[Conversation]]:
    """(the turns of the prompt, the turns of the chosen and of the rejected answer)."""
    column = columns["prompt"]
    prompt: Conversation = [] if column is None else as_turns(table, column, row, "user")
    prompt = with_input(table, columns.get("input"), row, prompt)
    answers = [as_turns(table, columns[role] or "", row, "assistant") for role in ("chosen", "rejected")]
    # Messages often repeat the prompt before the answer.
    shared = _shared_turns(*answers)
    if shared and (not prompt or list(map(_content, shared[-len(prompt) :])) == list(map(_content, prompt))):
        prompt = shared
        answers = [answer[len(shared) :] for answer in answers]
    for role, answer in zip(("chosen", "rejected"), answers, strict=True):
        _check_answer(answer, prompt, f"{table.where(row)}: column {columns[role]!r}", column)
    prompt = with_system(table, columns.get("system"), row, prompt)
    return with_tools(table, columns.get("tools"), row, prompt), answers


def _shared_turns(chosen: Conversation, rejected: Conversation) -> Conversation:
    """The common first turns of both, without the last turn of the shorter one, which is its answer."""
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if _content(one) != _content(other) or same + 1 == min(len(chosen), len(rejected)):
            break
        same += 1
    return chosen[:same]


def _check_answer(answer: Conversation, prompt: Conversation, where: str, prompt_column: str | None) -> None:
    """Raise ValueError for an answer that begins with a question although the prompt ends with one."""
    first = next((turn for turn in answer if turn["role"] != "system"), None)
    if not prompt or prompt[-1]["role"] != "user" or first is None or first["role"] != "user":
        return
    begins = f"{where} begins with the question {first['content']!r:.60}, "
    if _content(first) == _content(prompt[-1]):
        raise ValueError(
            f"{begins}but the two answers do not repeat the same turns; give only the answers, or in both all turns of "
            f"column {prompt_column!r} and then the answer"
        )
    raise ValueError(
        f"{begins}column {prompt_column!r} ends with {prompt[-1]['content']!r:.60}: expected the same, or only the "
        "answers"
    )


def _content(turn: dict[str, Any]) -> tuple[Any, ...]:
    """The part of a turn that counts when turns are compared: ids and surrounding spaces may differ."""
    return turn["role"], turn["content"].strip(), turn.get("tool_calls")

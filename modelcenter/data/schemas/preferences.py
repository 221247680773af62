"""Rows of preferences: what is asked, the answer that was chosen and the one that was rejected."""

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
    """{role: column} for prompt, input (what an instruction is about), chosen, rejected, system and tools: those given,
    else those with the usual names.

    Without a prompt column the chosen and the rejected messages begin with what is asked.

    Raises:
        ValueError: a column that is not there, none for chosen or rejected, or an input without a prompt.
    """
    named = {role: name for role, name in given.items() if name is not None}
    check_columns(table, named)
    lower = {name.lower(): name for name in reversed(table.columns) if name not in named.values()}
    found = {
        role: named.get(role) or next((lower[n] for n in names if n in lower), None) for role, names in _NAMES.items()
    }
    for role in ("chosen", "rejected"):
        if found[role] is None:
            raise ValueError(
                f"{role}_column: which column of {table.name} has the {role} answers? It has "
                f"{', '.join(map(repr, table.columns))}. Give {role}_column"
            )
    prompt, about = found["prompt"], named.get("input")
    if prompt is None and about is not None:
        raise ValueError("prompt_column: which column is the prompt that input_column belongs to? Give it")
    if about is None and prompt is not None and prompt.lower() == "instruction":
        taken = set(found.values())
        about = next((lower[n] for n in INPUT_NAMES if n in lower and lower[n] not in taken), None)
    found = {"prompt": prompt, "input": about, **found}
    return {**found, "tools": find_tools(table, {**named, **found})}


def preferences(table: Table, columns: Mapping[str, str | None]) -> list[Conversation]:
    """Two conversations for each row, with the chosen and with the rejected answer; only these are to be trained on
    (the other turns of the assistant have "weight": 0).

    Raises:
        ValueError: a row without a prompt, with an answer that is no text and no messages, or with answers to another
            question than the prompt, naming file and line.
    """
    rows: list[Conversation] = []
    for row in range(len(table)):
        asked, answers = _parts(table, columns, row)
        if not asked:
            raise ValueError(
                f"{table.where(row)}: the row has no prompt: give prompt_column, or chosen and rejected messages that "
                "begin with the same question"
            )
        asked = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in asked]
        rows += [asked + answer for answer in answers]
    return rows


def questions(table: Table, columns: Mapping[str, str | None]) -> list[Conversation]:
    """What each row asks."""
    return [_parts(table, columns, row)[0] for row in range(len(table))]


def _parts(table: Table, columns: Mapping[str, str | None], row: int) -> tuple[Conversation, list[Conversation]]:
    prompt, system = columns["prompt"], columns.get("system")
    asked: list[dict[str, Any]] = [] if prompt is None else as_turns(table, prompt, row, "user")
    asked = with_input(table, columns.get("input"), row, asked)
    answers = [as_turns(table, columns[role] or "", row, "assistant") for role in ("chosen", "rejected")]
    # Messages often repeat the question before the answer.
    same = 0
    for one, other in zip(*answers, strict=False):
        if _said(one) != _said(other) or same + 1 == min(map(len, answers)):
            break
        same += 1
    shared = answers[0][:same]
    if shared and (not asked or list(map(_said, shared[-len(asked) :])) == list(map(_said, asked))):
        asked = shared
        answers = [answer[same:] for answer in answers]
    for role, answer in zip(("chosen", "rejected"), answers, strict=True):
        turn = next((turn for turn in answer if turn["role"] != "system"), None)
        if asked and asked[-1]["role"] == "user" and turn is not None and turn["role"] == "user":
            begins = f"{table.where(row)}: column {columns[role]!r} begins with the question {turn['content']!r:.60}, "
            if _said(turn) == _said(asked[-1]):
                raise ValueError(
                    f"{begins}but not both answers repeat the same turns and answer them: give answers alone, or in "
                    f"both all that column {prompt!r} has and an answer behind it"
                )
            raise ValueError(
                f"{begins}column {prompt!r} ends with {asked[-1]['content']!r:.60}: expected the same, or answers alone"
            )
    about = table.columns[system][row] if system is not None else None
    if about is not None and str(about).strip() and asked and asked[0]["role"] != "system":
        asked = [{"role": "system", "content": str(about)}, *asked]
    return with_tools(table, columns.get("tools"), row, asked), answers


def _said(turn: dict[str, Any]) -> tuple[Any, ...]:
    """What makes turns the same: not their ids, nor spaces around them."""
    return turn["role"], turn["content"].strip(), turn.get("tool_calls")

"""SQuAD's format: articles hold paragraphs, paragraphs hold questions. CMRC 2018 and DRCD use it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_nested(rows: list[dict[str, Any]]) -> bool:
    """Whether rows are articles (or paragraphs) that hold questions, not the questions themselves."""
    return bool(rows) and all(
        isinstance(row.get("paragraphs"), list) or isinstance(row.get("qas"), list) for row in rows
    )


def flatten_questions(path: Path, articles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per question: id, title, context, question and, if the file has them, answers.

    answers are {"text": [...], "answer_start": [...]} as on the Hub, and empty if is_impossible is set.

    Raises:
        ValueError: a paragraph has no context, a question has no text, or something has an unexpected format.
    """
    return list(_questions(path, articles))


def _questions(path: Path, articles: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, article in enumerate(articles, 1):
        paragraphs = article.get("paragraphs")
        if not isinstance(paragraphs, list):  # the row is a paragraph itself
            paragraphs = [article]
        for place, paragraph in enumerate(_objects(f"{path}, article {number}", "paragraphs", paragraphs), 1):
            where = f"{path}, article {number}, paragraph {place}"
            context = paragraph.get("context", paragraph.get("context_text"))
            if not isinstance(context, str):
                raise ValueError(f"{where}: got no context, expected a text")
            for n, entry in enumerate(_objects(where, "qas", paragraph.get("qas", [])), 1):
                question = entry.get("question", entry.get("query_text"))
                if not isinstance(question, str):
                    raise ValueError(f"{where}, question {n}: got no question, expected a text")
                row = {"id": entry.get("id", entry.get("query_id", f"{number}-{place}-{n}"))}
                row |= {"title": article.get("title"), "context": context, "question": question}
                if entry.get("answers") is not None or entry.get("is_impossible"):
                    row["answers"] = _answers(f"{where}, question {n}", entry)
                yield row


def _objects(where: str, name: str, value: Any) -> list[dict[str, Any]]:
    """The value, a list of objects. Raises ValueError if it is something else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{where}: got {value!r:.80} as {name}, expected a list of objects")
    return value


def _answers(where: str, entry: dict[str, Any]) -> dict[str, list[Any]]:
    answers = [] if entry.get("is_impossible") else entry["answers"]
    is_list = isinstance(answers, list)
    if not is_list or not all(isinstance(a, dict) and {"text", "answer_start"} <= set(a) for a in answers):
        raise ValueError(f'{where}: answers {answers!r:.80}, expected [{{"text": ..., "answer_start": ...}}]')
    return {name: [answer[name] for answer in answers] for name in ("text", "answer_start")}

"""Texts for a pretrained model to continue or fill in."""

from typing import Any

from modelcenter.training.tasks.column_roles import strings


def encode_prompts(tokenizer: Any, table: Any, column: str, max_length: int, special: bool) -> list[list[int]]:
    """The tokens of each text. special: add the tokenizer's special tokens.

    Raises:
        ValueError: a row has no text, or is too long for the model.
    """
    rows = []
    for i, text in enumerate(strings(table, column)):
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        if not text.strip() or not ids:
            raise ValueError(f"{table.where(i)}: the row has no text in column {column!r}")
        if len(ids) > max_length:
            raise ValueError(
                f"{table.where(i)}: the row has {len(ids)} tokens, but max_length is {max_length}; shorten it"
            )
        rows.append(ids)
    return rows

"""Texts of rows, shortened for display on a terminal."""

import os
import sys


def shortened(text: str, most: int = 160) -> str:
    """A text shortened to fit a line."""
    return text if len(text) <= most else text[: most - 3] + "..."


def without_middle(text: str) -> str:
    """The beginning and the end of a text, at most about 240 characters."""
    return text if len(text) <= 240 else f"{text[:160]} ... {text[-70:]}"


def highlighted(text: str) -> str:
    """Mark a text that is trained on: green on a terminal, else between marks."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    start, end = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    return f"{start}{text}{end}"


def on_one_line(text: str) -> str:
    """A text with its line breaks written as \\n."""
    return text.replace("\n", "\\n")

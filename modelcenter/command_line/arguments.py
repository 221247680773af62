"""Preparing the words of a command line for argparse: dashes in names, negative numbers, misspelt flags."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from modelcenter.registry import nearest


def spelling(word: str) -> str:
    """--max-length=a-b -> --max_length=a-b. A text that begins with dashes is unchanged."""
    name, equals, value = word.partition("=")
    if re.fullmatch(r"--[A-Za-z][\w-]*", name) is None:
        return word
    return "--" + name[2:].replace("-", "_") + equals + value


def with_numbers(words: Sequence[str]) -> list[str]:
    """Join `--flag -1e-3` into one word, because argparse takes a negative number with an exponent for a flag."""
    joined: list[str] = []
    for word in words:
        number = re.fullmatch(r"-(\d+\.?\d*|\.\d+)[eE][-+]?\d+", word)
        if number and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def is_flag(word: str) -> bool:
    """Whether a word that is not a flag's value is meant as a flag: it is neither a negative number nor a text."""
    return re.match(r"-[^\s\d.]", word) is not None and " " not in word.partition("=")[0]


def unknown_flag(word: str, known: Iterable[str]) -> ValueError:
    """The error for a flag that does not exist. known: all existing flags, with their dashes."""
    name = word.partition("=")[0]
    return ValueError(f"unknown flag {name}.{nearest(name, list(known), 1)} --help lists all")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError for mistakes."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        names, _, fault = message.partition(": ")
        action = self._option_string_actions.get(names.partition("/")[0])
        if action is not None and re.match("expected (one|at least one) argument", fault):
            message = f"{names}: its value is missing{self._purpose(action)}"
        raise ValueError(message)

    def _purpose(self, action: argparse.Action) -> str:
        """What a flag is for, from its own help or, for an alias, from that of the flag it stands for."""
        helps = (other.help for other in self._actions if other.dest == action.dest)
        return next((f": {text.replace('%%', '%')}" for text in helps if text not in (None, argparse.SUPPRESS)), "")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The values of a command line.

        Raises:
            ValueError: a flag is unknown (with the nearest known one), lacks its value or has a wrong one; arguments
                are missing, or there are too many.
        """
        last = words.index("--") if "--" in words else len(words)
        flags = with_numbers([spelling(word) for word in words[:last]])
        known = self._option_string_actions  # argparse itself reports missing arguments before misspelt flags
        for word in flags:
            if is_flag(word) and word.partition("=")[0] not in known:
                raise unknown_flag(word, known)
        return self.parse_args([*flags, *words[last:]])

"""Characters that words are made of, in any script."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"  # between letters of Indic scripts and of Persian


def belongs_to_word(character: str) -> bool:
    """Whether a character is part of a word. This includes marks, such as a vowel sign or an accent that is a separate
    character, which Python counts neither as letters nor as digits."""
    return character.isalnum() or is_mark(character)


def is_mark(character: str) -> bool:
    """Whether a character belongs to the one before it."""
    return unicodedata.category(character)[0] == "M" or character in _JOINERS

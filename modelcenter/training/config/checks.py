"""Range checks that several classes of flags share. Imports no torch."""

from typing import Any


def check_positive(flags: Any, *names: str) -> None:
    """Raise ValueError for the first of these flags that is given and not above 0."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}: got {value}, expected a number above 0")


def check_not_negative(flags: Any, *names: str) -> None:
    """Raise ValueError for the first of these flags that is below 0."""
    for name in names:
        value = getattr(flags, name)
        if value < 0:
            raise ValueError(f"{name}: got {value}, expected 0 or more")


def check_fraction(flags: Any, *names: str) -> None:
    """Raise ValueError for the first of these flags that is not between 0 and 1."""
    for name in names:
        value = getattr(flags, name)
        if not 0 < value < 1:
            raise ValueError(f"{name}: got {value}, expected a fraction between 0 and 1")

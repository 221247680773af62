"""Converting the values of flags, from Python, the command line (words) or YAML, to the types of their fields."""

import functools
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelcenter.registry import nearest

BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


class Unquoted(str):
    """A word of YAML without quotes, which may be a number."""


class FieldType(typing.NamedTuple):
    """The type of a field, in its parts."""

    container: type | None  # list, dict or None
    scalar: type  # bool, int, float, str, or Any for a dict of anything
    optional: bool
    words: tuple[str, ...] = ()  # accepted in place of a number


def type_of(cls: type, name: str) -> FieldType:
    """The type of a field of a dataclass of flags."""
    return _types(cls)[name]


@functools.cache
def _types(cls: type) -> dict[str, FieldType]:
    return {name: _taken_apart(hint) for name, hint in typing.get_type_hints(cls).items()}


def _taken_apart(hint: Any) -> FieldType:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)  # typing's, if one member is a Literal
    members = typing.get_args(hint) if union else (hint,)
    optional = type(None) in members
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    others = [member for member in members if member is not type(None) and member not in literals]
    if not others:  # only texts, which are the choices of the field
        return FieldType(None, str, optional)
    (base,) = others
    container = typing.get_origin(base)
    words = tuple(word for member in literals for word in typing.get_args(member))
    return FieldType(container, typing.get_args(base)[-1] if container else base, optional, words)


def convert(field: Any, kind: FieldType, value: Any) -> Any:
    """Convert a value to the type of its field.

    Raises:
        ValueError: the type or choices of the field do not allow the value; names the field.
    """
    name, choices, means = field.name, field.metadata["choices"], field.metadata["means"]
    word = value[0] if isinstance(value, list) and len(value) == 1 and kind.container is list else value
    says_none = isinstance(word, str) and word.lower() in {"none", "null"} - set(means)
    # A positional value, such as a prompt, is taken literally.
    if value is None or (says_none and kind.optional and not field.metadata["positional"]):
        if kind.optional:
            return None
        raise ValueError(f"{name}: got nothing, expected a value")
    if kind.container is list:
        words = value if isinstance(value, (list, tuple)) else [value]
        if kind.scalar is not str:
            return [_SCALARS[kind.scalar](name, word) for word in words]
        texts = [_text(name, word) for word in words]
        return [means.get(text.lower(), text) for text in texts]
    if kind.container is dict:
        return _mapping(name, value, kind.scalar)
    if isinstance(value, (str, bool)) and not choices:
        value = means.get(str(value).lower(), value)
        if value is None:
            return None
    if isinstance(value, str) and value.lower() in kind.words:
        return value.lower()
    try:
        converted = _SCALARS[kind.scalar](name, value)
    except ValueError as error:
        raise ValueError(" or ".join((str(error), *kind.words))) from None
    if choices:
        converted = means.get(converted, converted)
        if converted not in choices:
            shown = ", ".join(map(str, choices))
            raise ValueError(
                f"{name}: got {value!r}, expected one of {shown}.{nearest(str(value), map(str, choices), 1)}"
            )
    return converted


def boolean(name: str, value: Any) -> bool:
    """A switch in any usual spelling (yes, off, 1, ...). Raises ValueError for other values. name: of the field."""
    if str(value).lower() not in BOOLEANS:
        raise ValueError(f"{name}: got {value!r}, expected true or false")
    return BOOLEANS[str(value).lower()]


def _integer(name: str, value: Any) -> int:
    number = _number(name, value, "a whole number")
    if number != int(number):
        raise ValueError(f"{name}: got {value!r}, expected a whole number")
    try:
        return int(value)  # not int() of the float, which is not exact above 2**53
    except ValueError:  # 2e3
        return int(number)


def _number(name: str, value: Any, expected: str = "a number") -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ValueError(f"{name}: got {value!r}, expected {expected}")
    return number


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError(
            f"{name}: got {value!r}, expected a text; YAML reads yes, no, on and off as booleans: quote it"
        )
    if not isinstance(value, (str, int, float, Path)):
        raise ValueError(f"{name}: got {value!r}, expected a text")
    return str(value)


_SCALARS: dict[type, Callable[[str, Any], Any]] = {bool: boolean, int: _integer, float: _number, str: _text}


def _mapping(name: str, value: Any, scalar: Any) -> dict[str, Any]:
    """{key: value} from YAML or KEY=VALUE words; values in words are read as YAML unless texts are expected."""
    if isinstance(value, (str, list)):
        pairs = [str(word).partition("=") for word in ([value] if isinstance(value, str) else value)]
        for key, equals, text in pairs:
            if not key or not equals:
                raise ValueError(f"{name}: got {key + equals + text!r}, expected KEY=VALUE")
        value = {key: text if scalar is str else _parse_yaml(name, text) for key, _, text in pairs}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {value!r}, expected KEY=VALUE pairs")
    return {str(key): _text(name, v) if scalar is str else _parse_words(name, v) for key, v in value.items()}


def _parse_words(name: str, value: Any) -> Any:
    """Read the words in a value of YAML by YAML's own rules."""
    if isinstance(value, dict):
        return {_parse_words(name, key): _parse_words(name, v) for key, v in value.items()}
    if isinstance(value, list):
        return [_parse_words(name, v) for v in value]
    return _parse_yaml(name, value) if isinstance(value, Unquoted) else value


def _parse_yaml(name: str, text: str) -> Any:
    import yaml

    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{name}: got {text!r}, expected a value in YAML") from None

"""Flags as a dataclass: its command line, its YAML file, checked types, aliases, and an answer to a misspelt name.

No argparse namespace reaches the code: a subclass of Flags declares fields with `flag`, and an instance is always whole
and checked. Imports no torch.
"""

import argparse
import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from modelcenter._paths import scripts_dir
from modelcenter.command_line.arguments import Parser, is_flag, spelling, unknown_flag, with_numbers
from modelcenter.registry import nearest

# Other programs' flags whose values, too, are not ours: flag -> (our flag, {its value: ours; None: says nothing new}).
_TRANSLATED: dict[str, tuple[str, dict[Any, Any]]] = {
    "bf16": ("precision", {True: "bf16", False: "fp32"}),
    "eval_strategy": ("eval_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "evaluation_strategy": ("eval_every", {"epoch": "epoch", "no": "never", "steps": None}),
    "save_strategy": ("save_every", {"epoch": "epoch", "no": "never", "steps": None}),
}

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def flag(
    group: str,
    default: Any,
    help: str,
    *aliases: str,
    choices: Sequence[Any] | None = None,
    means: Mapping[str, Any] | None = None,
    positional: bool | str = False,
) -> Any:
    """A dataclass field with what the command line needs to know of it.

    Args:
        group: heading in --help. aliases: other names of the flag. choices: values allowed. means: {other spelling of a
            value: what it means}. positional: given by place, without its name;
            "any": a list that may be left out.
    """
    metadata = {"group": group, "help": help, "aliases": aliases, "choices": choices, "means": means or {}}
    metadata["positional"] = positional
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Flags:
    """Base of all configurations. Values are converted to the field's type and checked on construction."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, _convert(field, _kind(type(self), field.name), getattr(self, field.name)))
        self.check()

    def check(self) -> None:
        """Raise ValueError where values do not fit together."""

    def require(self, *names: str) -> None:
        """Raise ValueError for the first of these flags that was not given."""
        for field in dataclasses.fields(self):
            if field.name in names and getattr(self, field.name) is None:
                raise ValueError(f"--{field.name} is needed: {field.metadata['help']}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        """Write a YAML file that `from_yaml` reads back equal."""
        import yaml

        task = {"task": self.task} if getattr(self, "task", "") else {}
        text = yaml.safe_dump({**task, **self.to_dict()}, sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Self:
        """Read a YAML file of flags.

        Raises:
            ValueError: an unknown key (with the nearest), a wrong value, or a file that is no mapping.
        """
        return cls(**{**_read_yaml(cls, Path(path)), **changes})

    @classmethod
    def from_args(cls, argv: Sequence[str], prog: str | None = None, description: str | None = None) -> Self:
        """Read a command line, over the YAML file that its --config names; --help prints and exits.

        Raises:
            ValueError: an unknown flag or key (with the nearest), or a wrong value.
        """
        words = list(argv)
        last = words.index("--") if "--" in words else len(words)  # all behind it is given by place
        flags = _switches_closed(cls, with_numbers([spelling(word) for word in words[:last]]))
        _check_spellings(cls, flags)
        found, others = parser(cls, prog, description).parse_known_args(flags)
        unknown = next((word for word in others if is_flag(word)), None)
        if unknown is not None:
            raise unknown_flag(unknown, [f"--{n}" for n in ("config", *_aliases(cls), *_TRANSLATED)])
        given = vars(found)
        path = given.pop("config", None)
        given |= _by_place(cls, [*others, *words[last + 1 :]], given)
        values = {**(_read_yaml(cls, Path(path)) if path else {}), **given}
        missing = [f for f in dataclasses.fields(cls) if f.metadata["positional"] is True and f.name not in values]
        if missing:
            what = "; ".join(f"{f.name.upper()} ({f.metadata['help']})" for f in missing)
            names = ", ".join(f.name.upper() for f in missing)
            raise ValueError(f"the following arguments are required: {names}. {what}")
        return cls(**values)


def _check_spellings(cls: type[Flags], words: Sequence[str]) -> None:
    """Raise ValueError for a flag that is given under two of its names: one would win unseen."""
    names, seen = _aliases(cls), dict[str, str]()
    for word, after in zip(words, [*words[1:], "--"], strict=False):  # of no words nothing follows
        if not word.startswith("--"):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        ours = names.get(name, name)
        if name in _translated(cls):
            ours, said = _translate(name, value if equals else True if after.startswith("--") else after)
            if said is None:  # as of `--eval_strategy steps --eval_steps 30`
                continue
        first = seen.setdefault(ours, name)
        if first != name:
            raise ValueError(f"{ours}: given twice, as --{first} and as --{name}; give it once")


def _switches_closed(cls: type[Flags], words: Sequence[str]) -> list[str]:
    """The words with a value at each switch that has none, where the word behind it may be one given by its place."""
    if not any(field.metadata["positional"] for field in dataclasses.fields(cls)):
        return list(words)
    own = {f"--{name}" for name, field in _aliases(cls).items() if _kind(cls, field).of is bool}
    own |= {f"--{name}" for name, (_, table) in _TRANSLATED.items() if True in table}
    following = [*words[1:], ""]
    return [
        f"{word}=true" if word in own and after.lower() not in _BOOLEANS else word
        for word, after in zip(words, following, strict=False)  # of no words nothing follows
    ]


def _by_place(cls: type[Flags], words: Sequence[str], named: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are given by their place alone, wherever flags stand between them.

    Raises:
        ValueError: more words than places.
    """
    left, found = list(words), {}
    for field in dataclasses.fields(cls):
        if left and field.metadata["positional"] and field.name not in named:
            several = _kind(cls, field.name).outer is list
            found[field.name], left = (left, []) if several else (left[0], left[1:])
    if left:
        raise ValueError(f"unexpected argument {left[0]!r}: flags are written --name value")
    return found


class _Translate(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, value = _translate(self.dest, True if values is None else values)
        if value is not None:
            setattr(namespace, name, value)


def _translate(name: str, value: Any) -> tuple[str, Any]:
    ours, table = _TRANSLATED[name]
    value = _boolean(name, value) if True in table else "no" if value is False else value  # YAML reads no as False
    if value not in table:
        raise ValueError(f"{name}: got {value!r}, expected {' or '.join(map(str, table))}; {ours} takes more")
    return ours, table[value]


def parser(cls: type[Flags], prog: str | None = None, description: str | None = None) -> argparse.ArgumentParser:
    """The command line of a configuration; flags that were not given are absent from its namespace."""
    places = [field.name.upper() for field in dataclasses.fields(cls) if field.metadata["positional"]]
    result = Parser(
        prog=prog,
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=120),
        usage=" ".join([prog or "%(prog)s", *places, "[--config FILE] [--flag VALUE ...]"]),
    )
    result.add_argument("--config", metavar="FILE", help="YAML file of these flags; the command line wins")
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        about, kind = field.metadata, _kind(cls, field.name)
        if about["group"] not in groups:
            groups[about["group"]] = result.add_argument_group(about["group"])
        shape: dict[str, Any] = {"metavar": field.name.upper()}
        if kind.of is bool:
            shape = {"nargs": "?", "const": True, "metavar": "BOOL"}
        elif kind.outer in (list, dict):
            paths = "PATH" if field.name.endswith("data") else "VALUE"
            shape = {"nargs": "+", "metavar": paths if kind.outer is list else "KEY=VALUE"}
        elif about["choices"]:
            shape = {"metavar": "{" + ",".join(map(str, about["choices"])) + "}"}
        default = None if field.default is dataclasses.MISSING else field.default
        shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default).lower()
        if about["positional"]:
            # Listed here; read by _by_place, as argparse fills places too early where a flag comes first.
            text = f"{about['help']}; or --{field.name}".replace("%", "%%")
            result.add_argument(field.name, metavar=field.name.upper(), help=text, nargs=argparse.SUPPRESS)
            result.add_argument(f"--{field.name}", help=argparse.SUPPRESS, **shape)
            continue
        text = f"{about['help']} (default: {shown})".replace("%", "%%")
        groups[about["group"]].add_argument(f"--{field.name}", help=text, **shape)
        if about["aliases"]:
            names = [f"--{name}" for name in about["aliases"]]
            result.add_argument(*names, dest=field.name, help=argparse.SUPPRESS, **shape)
    for name in _translated(cls):
        result.add_argument(f"--{name}", dest=name, nargs="?", action=_Translate, help=argparse.SUPPRESS)
    return result


@functools.cache
def _aliases(cls: type[Flags]) -> dict[str, str]:
    """Every spelling -> the flag's own name."""
    return {name: f.name for f in dataclasses.fields(cls) for name in (f.name, *f.metadata["aliases"])}


def _translated(cls: type[Flags]) -> list[str]:
    """Those other programs' flags that mean one of this configuration."""
    own = {field.name for field in dataclasses.fields(cls)}
    return [name for name, (ours, _) in _TRANSLATED.items() if ours in own]


def _read_yaml(cls: type[Flags], path: Path) -> dict[str, Any]:
    import yaml

    path = Path(os.path.expanduser(path))
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _once(yaml))
    except (OSError, UnicodeDecodeError) as error:
        shipped = scripts_dir() / "recipes" / path.name
        hint = f"; the recipe of that name is {shipped}" if not path.exists() and shipped.is_file() else ""
        raise ValueError(f"config: cannot read {path}: {getattr(error, 'strerror', None) or error}{hint}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"config: {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ValueError(f"config: {path} holds a {type(loaded).__name__}, expected lines such as `lr: 3e-5`")
    known, values = _aliases(cls), {}
    task, own = (loaded or {}).pop("task", None), getattr(cls, "task", "")
    if task is not None and own and task != own:
        raise ValueError(f"config: {path} is for the task {task!r}, this one is {own!r}")
    for key, value in (loaded or {}).items():
        name = str(key).replace("-", "_")
        if name in _translated(cls):
            name, value = _translate(name, value)
            if value is None:
                continue
        if name not in known:
            raise ValueError(f"config: {path} has the unknown key {key!r}.{nearest(name, known, 1)}")
        if known[name] in values:
            raise ValueError(f"config: {path} gives {known[name]} twice, the second time as {key!r}")
        values[known[name]] = value
    return values


def _once(yaml: Any) -> Any:
    """A loader that does not let the second of two equal keys win unseen, and leaves words as they were written.

    What a word is, is for the field to say: YAML would make 45000 of 12:30:00, 1.1 of the revision 1.10, and a text of
    1e-6. Only its booleans (yes, no, on and off among them), null and << are read as YAML has them.
    """

    class Once(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in of if tag.rpartition(":")[2] in ("bool", "null", "merge")]
            for first, of in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1} gives {key.value} again")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_text(self, node: Any) -> str:
            return node.value if node.style else _Unquoted(node.value)

    Once.add_constructor("tag:yaml.org,2002:str", Once.construct_text)
    return Once


class _Unquoted(str):
    """A word of YAML without quotes, which may mean a number."""


class _Kind(typing.NamedTuple):
    outer: type | None  # list, dict or None
    of: type  # bool, int, float, str, or Any for a dict of anything
    optional: bool


@functools.cache
def _kind(cls: type[Flags], name: str) -> _Kind:
    hint = typing.get_type_hints(cls)[name]
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (base,) = (member for member in members if member is not type(None))
    outer = typing.get_origin(base)
    return _Kind(outer, typing.get_args(base)[-1] if outer else base, type(None) in members)


def _convert(field: Any, kind: _Kind, value: Any) -> Any:
    """A value from Python, the command line (strings) or YAML as the type of its field."""
    name, choices = field.name, field.metadata["choices"]
    word = value[0] if isinstance(value, list) and len(value) == 1 and kind.outer is list else value
    # What is given by its place, such as a prompt, is meant as it stands.
    by_place = field.metadata["positional"]
    if value is None or (not by_place and kind.optional and isinstance(word, str) and word.lower() in ("none", "null")):
        if kind.optional:
            return None
        raise ValueError(f"{name}: got nothing, expected a value")
    if kind.outer is list:
        return [_text(name, v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    if kind.outer is dict:
        return _mapping(name, value, kind.of)
    if isinstance(value, (str, bool)) and not choices:
        value = field.metadata["means"].get(str(value).lower(), value)
    converted = {bool: _boolean, int: _integer, float: _number, str: _text}[kind.of](name, value)
    if choices:
        converted = field.metadata["means"].get(converted, converted)
        if converted not in choices:
            shown = ", ".join(map(str, choices))
            raise ValueError(
                f"{name}: got {value!r}, expected one of {shown}.{nearest(str(value), map(str, choices), 1)}"
            )
    return converted


def _boolean(name: str, value: Any) -> bool:
    if str(value).lower() not in _BOOLEANS:
        raise ValueError(f"{name}: got {value!r}, expected true or false")
    return _BOOLEANS[str(value).lower()]


def _integer(name: str, value: Any) -> int:
    number = _number(name, value, "a whole number")
    if number != int(number):
        raise ValueError(f"{name}: got {value!r}, expected a whole number")
    try:
        return int(value)  # not of the float, which is not exact above 2**53
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
        raise ValueError(f"{name}: got {value!r}, expected a text; YAML reads yes, no, on and off so without quotes")
    if not isinstance(value, (str, int, float, Path)):
        raise ValueError(f"{name}: got {value!r}, expected a text")
    return str(value)


def _mapping(name: str, value: Any, of: Any) -> dict[str, Any]:
    """{key: value} of YAML, or KEY=VALUE words; the values of words are read as YAML unless they shall be texts."""
    if isinstance(value, (str, list)):
        pairs = [str(word).partition("=") for word in ([value] if isinstance(value, str) else value)]
        for key, equals, text in pairs:
            if not key or not equals:
                raise ValueError(f"{name}: got {key + equals + text!r}, expected KEY=VALUE")
        value = {key: text if of is str else _scalar(name, text) for key, _, text in pairs}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {value!r}, expected KEY=VALUE pairs")
    return {str(key): _text(name, v) if of is str else _read(name, v) for key, v in value.items()}


def _read(name: str, value: Any) -> Any:
    """A value of YAML with its words read as YAML reads them."""
    if isinstance(value, dict):
        return {_read(name, key): _read(name, v) for key, v in value.items()}
    if isinstance(value, list):
        return [_read(name, v) for v in value]
    return _scalar(name, value) if isinstance(value, _Unquoted) else value


def _scalar(name: str, text: str) -> Any:
    import yaml

    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{name}: got {text!r}, expected a value as YAML writes it") from None

"""Flags as dataclasses, which define a command line and the keys of a YAML file, with checked types and aliases.

No argparse namespace reaches other code: a subclass of Flags declares fields with `flag`, and an instance is always
complete and checked. Imports no torch.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from modelcenter._paths import write_whole
from modelcenter.command_line.arguments import Parser, is_flag, spelling, unknown_flag, with_numbers
from modelcenter.command_line.spellings import TRANSLATED, all_spellings, translate, translated, what_instead
from modelcenter.command_line.values import BOOLEANS, convert, type_of
from modelcenter.command_line.yaml_file import by_own_names, read_yaml, yaml_text


def flag(
    group: str,
    default: Any,
    help: str,
    *aliases: str,
    choices: Sequence[Any] | None = None,
    means: Mapping[str, Any] | None = None,
    positional: bool | str = False,
) -> Any:
    """A dataclass field with its properties on the command line.

    Args:
        group: heading in --help. aliases: other names of the flag. choices: allowed values. means: {other spelling of a
            value: its meaning; None: no value}. positional: given by position, without its name; "any": a list that
            may be omitted.
    """
    metadata: dict[str, Any] = {"group": group, "help": help, "aliases": aliases, "choices": choices}
    metadata |= {"means": means or {}, "positional": positional}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Idle(NamedTuple):
    """When other flags leave a flag without effect, and what to do about it, in words.

    strict: even its default, or a value that switches it off, is refused, because it contradicts what happens.
    """

    when: Callable[[Any], bool]
    remedy: str
    strict: bool = False


@dataclass(kw_only=True)
class Flags:
    """Base of all configurations. Values are converted to the field's type and checked on construction."""

    idle: ClassVar[Mapping[str, Idle]] = {}  # flags that others can leave without effect
    # {flag: its value} on the command line, before `check` resolves any. Values from files are not included, because a
    # file may have flags for other runs.
    _given = dict[str, Any]()
    _idle = frozenset[str]()  # flags without effect, given or not
    words = tuple[str, ...]()  # the arguments of a call, as a command line; empty if there was no call

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, convert(field, type_of(type(self), field.name), getattr(self, field.name)))
        self.check()
        self._check_idle()

    def check(self) -> None:
        """Raise ValueError if values do not fit together."""

    def _check_idle(self) -> None:
        for name, (when, remedy, strict) in self.idle.items():
            self.refuse_idle(name, when(self), remedy, strict)

    def given(self, name: str) -> Any:
        """The value given on the command line to a flag, or with `--columns ROLE=NAME` to ROLE_column; None: none."""
        value = self._given.get(name)
        if value is None and name.endswith("_column"):
            return self._given.get("columns", {}).get(name.removesuffix("_column"))
        return value

    def refuse_idle(self, name: str, idle: bool, remedy: str, strict: bool = False) -> None:
        """Raise ValueError for a flag on the command line that has no effect, since its user expects one. Its default,
        and values that switch it off, are accepted.

        Args:
            idle: it has no effect, because of other flags or the data. remedy: what to do about it, in words. strict:
                see Idle.
        """
        self._idle = self._idle | {name} if idle else self._idle - {name}
        value = self.given(name)
        if not idle or value is None:
            return
        if strict or value not in (0, "never", getattr(type(self)(), name)):
            raise ValueError(f"{name}: changes nothing {remedy}")

    def require(self, *names: str) -> None:
        """Raise ValueError for the first of these flags that was not given."""
        for field in dataclasses.fields(self):
            if field.name in names and getattr(self, field.name) is None:
                raise ValueError(f"--{field.name} is needed: {field.metadata['help']}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        """Write a YAML file that `from_yaml` reads back equal."""
        task = getattr(self, "task", "")
        values = {**({"task": task} if task else {}), **self.to_dict()}
        write_whole(path, yaml_text(values).encode())

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Self:
        """Read a YAML file of flags.

        Raises:
            ValueError: the file is not a mapping, has an unknown key (with the nearest) or a wrong value.
        """
        return cls(**{**read_yaml(cls, Path(path)), **changes})

    @classmethod
    def from_args(cls, argv: Sequence[str], prog: str | None = None, description: str | None = None) -> Self:
        """Read a command line, which overrides the YAML file that its --config names; --help prints and exits.

        Raises:
            ValueError: a flag or key is unknown (with the nearest), has a wrong value, or has no effect.
        """
        words = list(argv)
        last = words.index("--") if "--" in words else len(words)  # all words after it are positional
        flags = _close_switches(cls, with_numbers([spelling(word) for word in words[:last]]))
        _check_spellings(cls, flags)
        namespace, others = parser(cls, prog, description).parse_known_args(flags)
        unknown = next((word for word in others if is_flag(word)), None)
        if unknown is not None:
            if (instead := what_instead(cls, unknown.partition("=")[0].removeprefix("--"))) is not None:
                raise ValueError(f"{unknown.partition('=')[0]} is not a flag here: {instead}")
            raise unknown_flag(unknown, [f"--{n}" for n in ("config", *all_spellings(cls), *TRANSLATED)])
        given = vars(namespace)
        path = given.pop("config", None)
        given |= _positional_values(cls, [*others, *words[last + 1 :]], given)
        values = {**(read_yaml(cls, Path(path)) if path else {}), **given}
        missing = [f for f in dataclasses.fields(cls) if f.metadata["positional"] is True and f.name not in values]
        if missing:
            helps = "; ".join(f"{f.name.upper()} ({f.metadata['help']})" for f in missing)
            names = ", ".join(f.name.upper() for f in missing)
            raise ValueError(f"the following arguments are required: {names}. {helps}")
        return cls._with_given(values, given)

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Self:
        """Read the arguments of a call like a command line: by any name of a flag, overriding the file `config`.

        Raises:
            ValueError: a flag is unknown (with the nearest), has a wrong value, or has no effect.
        """
        said = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in keywords.items()}
        path = said.pop("config", None)
        given = by_own_names(cls, said, "the call")
        config = cls._with_given({**({} if path is None else read_yaml(cls, Path(path))), **given}, given)
        config.words = (*(() if path is None else ("--config", path)), *_as_words(given))
        return config

    @classmethod
    def _with_given(cls, values: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """An instance with these values. given: those that the user gave directly, not in a file."""
        config = cls(**values)
        fields = [field for field in dataclasses.fields(cls) if field.name in given]
        config._given = {f.name: convert(f, type_of(cls, f.name), given[f.name]) for f in fields}
        config._check_idle()
        return config


def _as_words(given: Mapping[str, Any]) -> list[str]:
    """Flags and their values as words of a command line."""
    words = []
    for name, value in given.items():
        parts = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else value
        words += [f"--{name}", *map(str, parts if isinstance(parts, list) else [parts])]
    return words


def _check_spellings(cls: type[Flags], words: Sequence[str]) -> None:
    """Raise ValueError for a flag that is given under two of its names: one would win silently."""
    names, seen = all_spellings(cls), dict[str, str]()
    for word, after in zip(words, [*words[1:], "--"], strict=False):  # not strict: an empty list has no pairs
        if not word.startswith("--"):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        ours = names.get(name, name)
        if name in translated(cls):
            ours, translation = translate(name, value if equals else True if after.startswith("--") else after)
            if translation is None:  # such as `--eval_strategy steps --eval_steps 30`
                continue
        first = seen.setdefault(ours, name)
        if first != name:
            raise ValueError(f"{ours}: given twice, as --{first} and as --{name}; give it once")


def _close_switches(cls: type[Flags], words: Sequence[str]) -> list[str]:
    """Add a value to each switch without one, if the word after it may be positional; returns the words."""
    if not any(field.metadata["positional"] for field in dataclasses.fields(cls)):
        return list(words)
    switches = {f"--{name}" for name, field in all_spellings(cls).items() if type_of(cls, field).scalar is bool}
    switches |= {f"--{name}" for name, meant in TRANSLATED.items() if True in meant.values}
    following = [*words[1:], ""]
    return [
        f"{word}=true" if word in switches and after.lower() not in BOOLEANS else word
        for word, after in zip(words, following, strict=False)  # not strict: an empty list has no pairs
    ]


def _positional_values(cls: type[Flags], words: Sequence[str], named: Mapping[str, Any]) -> dict[str, Any]:
    """The values of positional flags, which may have other flags between them.

    Raises:
        ValueError: there are more words than positional flags.
    """
    left = list(words)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if left and field.metadata["positional"] and field.name not in named:
            several = type_of(cls, field.name).container is list
            values[field.name], left = (left, []) if several else (left[0], left[1:])
    if left:
        raise ValueError(f"unexpected argument {left[0]!r}: flags are written --name value")
    return values


class _Translate(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, value = translate(self.dest, True if values is None else values)
        if value is not None:
            setattr(namespace, name, value)


def parser(cls: type[Flags], prog: str | None = None, description: str | None = None) -> argparse.ArgumentParser:
    """The parser of a configuration; flags that were not given are absent from its namespace."""
    positional = [field.name.upper() for field in dataclasses.fields(cls) if field.metadata["positional"]]
    result = Parser(
        prog=prog,
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=120),
        usage=" ".join([prog or "%(prog)s", *positional, "[--config FILE] [--flag VALUE ...]"]),
    )
    result.add_argument("--config", metavar="FILE", help="YAML file of these flags; the command line overrides it")
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        about, shape = field.metadata, _argument_shape(cls, field)
        if about["group"] not in groups:
            groups[about["group"]] = result.add_argument_group(about["group"])
        default = None if field.default is dataclasses.MISSING else field.default
        shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default).lower()
        if about["positional"]:
            # Listed here, but read by _positional_values, because argparse fills them too early if a flag comes first.
            text = f"{about['help']}; or --{field.name}".replace("%", "%%")
            result.add_argument(field.name, metavar=field.name.upper(), help=text, nargs=argparse.SUPPRESS)
            result.add_argument(f"--{field.name}", help=argparse.SUPPRESS, **shape)
            continue
        text = f"{about['help']} (default: {shown})".replace("%", "%%")
        groups[about["group"]].add_argument(f"--{field.name}", help=text, **shape)
        if about["aliases"]:
            names = [f"--{name}" for name in about["aliases"]]
            result.add_argument(*names, dest=field.name, help=argparse.SUPPRESS, **shape)
    for name in translated(cls):
        result.add_argument(f"--{name}", dest=name, nargs="?", action=_Translate, help=argparse.SUPPRESS)
    return result


def _argument_shape(cls: type[Flags], field: Any) -> dict[str, Any]:
    """Arguments of argparse's add_argument for how many values a flag takes and how --help shows them."""
    kind, choices = type_of(cls, field.name), field.metadata["choices"]
    if kind.scalar is bool:
        return {"nargs": "?", "const": True, "metavar": "BOOL"}
    if kind.container is dict:
        return {"nargs": "+", "metavar": "KEY=VALUE"}
    if kind.container is list:
        return {"nargs": "+", "metavar": "PATH" if field.name.endswith("data") else "VALUE"}
    return {"metavar": "{" + ",".join(map(str, choices)) + "}" if choices else field.name.upper()}

"""The YAML file of flags that --config names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelcenter._paths import scripts_dir
from modelcenter.command_line.spellings import all_spellings, translate, translated, what_instead
from modelcenter.command_line.values import Unquoted
from modelcenter.registry import nearest

_MOST_VALUES = 100_000  # per file


def read_yaml(cls: Any, path: Path) -> dict[str, Any]:
    """{flag: value} of a file, under the flags' own names; values are YAML's or words, not converted yet.

    Raises:
        ValueError: the file cannot be read, is not a mapping, is for another task, or has a key that is unknown or
            given twice.
    """
    content = read_mapping(path)
    known = all_spellings(cls)
    # In a file for a task's own flags, `task` names the task; elsewhere it may be a flag.
    file_task, task = (None if "task" in known else content.pop("task", None)), getattr(cls, "task", "")
    if file_task is not None and task and file_task != task:
        raise ValueError(f"config: {path} is for the task {file_task!r}, but this is {task!r}")
    return by_own_names(cls, content, f"config: {path}")


def by_own_names(cls: Any, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{flag: value} of a mapping whose keys may be other names of the flags, or flags of other programs.

    where: its source, for errors.

    Raises:
        ValueError: a key is unknown (with the nearest) or given twice.
    """
    known = all_spellings(cls)
    values = dict[str, Any]()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in translated(cls):
            name, value = translate(name, value)
            if value is None:
                continue
        if name not in known and (instead := what_instead(cls, name)) is not None:
            raise ValueError(f"{where}: {key} is not a flag here: {instead}")
        if name not in known:
            raise ValueError(f"{where} has the unknown key {key!r}.{nearest(name, known, 1)}")
        if known[name] in values:
            raise ValueError(f"{where} gives {known[name]} twice, the second time as {key!r}")
        values[known[name]] = value
    return values


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a YAML file, as _loader reads it.

    Raises:
        ValueError: the file cannot be read, is not a mapping, is nested too deeply, or its aliases expand too much.
    """
    import yaml

    path = Path(os.path.expanduser(path))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _loader(yaml))
        if _count(content, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases expand to more than {_MOST_VALUES} values")
    except (OSError, UnicodeDecodeError) as error:
        shipped = scripts_dir() / "recipes" / path.name
        hint = f"; the recipe of that name is {shipped}" if not path.exists() and shipped.is_file() else ""
        raise ValueError(f"config: cannot read {path}: {getattr(error, 'strerror', None) or error}{hint}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"config: {path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"config: {path} is nested too deeply, expected lines such as `lr: 3e-5`") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"config: {path} holds a {type(content).__name__}, expected lines such as `lr: 3e-5`")
    return content


def _count(value: Any, known: dict[int, int]) -> int:
    """The number of values in `value`; those behind an alias count each time it occurs, as for code that traverses it.
    known: {id of a list or dict: its count}."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = 1 + sum(
            _count(part, known) for part in (value.values() if isinstance(value, dict) else value)
        )
    return known[id(value)]


def yaml_text(values: Mapping[str, Any]) -> str:
    """The text of a file that `read_yaml` reads back equal."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: Any, text: str) -> Any:
        # PyYAML writes U+0085 unescaped if it can, but reads it as the end of a line. Double quotes make it escape it.
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\x85" in text else None)

    Dumper.add_representer(str, represent)
    return yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _loader(yaml: Any) -> Any:
    """A loader that refuses duplicate keys, and leaves words as they were written.

    The type of a word depends on its field: YAML would read 12:30:00 as 45000, the revision 1.10 as 1.1, and 1e-6 as a
    text. Only its booleans (including yes, no, on and off), null and << are read by YAML's rules.
    """

    class Loader(yaml.SafeLoader):
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
            return node.value if node.style else Unquoted(node.value)

    Loader.add_constructor("tag:yaml.org,2002:str", Loader.construct_text)
    return Loader

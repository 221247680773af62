"""Conversion rules: how the tensors of a hub checkpoint correspond to ours, as data.

A rule names a hub tensor and one of ours by templates and says how one is laid out in the other. In a template `{i}`
stands for a number (a layer, an expert) and `*` for one last name such as `weight` or `bias`. Rules apply to the
parameters that a model has: a rule whose native template matches none does nothing, so an untied decoder or an absent
bias needs no condition.

An `ArchMap` holds the rules of an architecture: its body, the parts that heads are made of, and the tasks that combine
them. `compile_layout` turns it into pieces for one model.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.pieces import HUB, NATIVE, Axis, Box, Piece, Shape

Config = Any


def tied(config: "Config") -> bool:
    """A rule's condition: the vocabulary's matrix is the word embedding."""
    return bool(config.tie_embeddings)


def untied(config: "Config") -> bool:
    """A rule's condition: the vocabulary has a matrix of its own."""
    return not config.tie_embeddings


Size = int | Callable[[Config], int]


def _number(size: Size, config: Config) -> int:
    return size if isinstance(size, int) else int(size(config))


def _as_tuple(templates: str | tuple[str, ...]) -> tuple[str, ...]:
    return (templates,) if isinstance(templates, str) else templates


@cache
def template_regex(template: str) -> re.Pattern[str]:
    """A pattern that matches exactly the names a template stands for, with its variables as groups."""
    parts = []
    for token in re.split(r"(\{\w+\}|\*)", template):
        if token == "*":
            parts.append(r"(?P<leaf>[^.]+)")
        elif token.startswith("{"):
            name = token[1:-1]
            parts.append(rf"(?P={name})" if f"(?P<{name}>" in "".join(parts) else rf"(?P<{name}>\d+)")
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts))


def fill(template: str, values: Mapping[str, str]) -> str:
    """The name that a template stands for, given its variables; unknown variables stay."""
    name = template.replace("*", values.get("leaf", "*"))
    return re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), name)


@dataclass(frozen=True)
class Built:
    """What one rule yields for one match: hub tensors with their shapes, pieces, and boxes that nothing fills."""

    shapes: dict[str, Shape]
    pieces: list[Piece]
    pads: dict[str, list[Box]] = field(default_factory=dict)


def _block(
    hub: str,
    native: str,
    sizes: Sequence[int],
    hub_dims: Sequence[int],
    native_dims: Sequence[int],
    ranks: tuple[int, int],
    at: Mapping[tuple[int, int], int] | None = None,
) -> Piece:
    """A dense block. `at` moves it: {(side, dimension): offset}; `ranks` are the two tensors' numbers of dimensions."""
    at = at or {}
    axes = tuple(Axis(n, (h, d)) for n, h, d in zip(sizes, hub_dims, native_dims, strict=True))
    offsets = tuple(tuple(at.get((side, d), 0) for d in range(rank)) for side, rank in enumerate(ranks))
    return Piece((hub, native), axes, (offsets[0], offsets[1]))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of all rules.

    Attributes:
        when: condition on the config; the rule does not exist where it is false.
        aliases: other names under which files hold the hub tensor; read, never written.
        optional: the file may lack the tensor; the parameter is then initialised and listed.
    """

    when: Callable[[Config], bool] | None = None
    aliases: tuple[str, ...] = ()
    optional: bool = False

    def hub_templates(self) -> tuple[str, ...]:
        return _as_tuple(getattr(self, "hub", ()))

    def native_templates(self) -> tuple[str, ...]:
        return _as_tuple(getattr(self, "native", ()))

    def build(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Built:
        raise AssertionError(f"{type(self).__name__} cannot be built")


@dataclass(frozen=True)
class Rename(Rule):
    """The same tensor under another name."""

    hub: str
    native: str

    def _dims(self, rank: int) -> list[int]:
        return list(range(rank))

    def build(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Built:
        hub, shape = fill(self.hub, values), shapes[names[0]]
        rank = len(shape)
        dims = self._dims(rank)
        piece = _block(hub, names[0], shape, dims, range(rank), (rank, rank))
        return Built({hub: tuple(shape[d] for d in dims)}, [piece])


@dataclass(frozen=True)
class Transpose(Rename):
    """The same tensor with its dimensions reversed (GPT-2's Conv1D keeps weights as (in, out))."""

    def _dims(self, rank: int) -> list[int]:
        return list(reversed(range(rank)))


@dataclass(frozen=True)
class Split(Rule):
    """One hub tensor holds several of ours side by side along a dimension of ours.

    Args:
        dim: the dimension of ours along which they are joined.
        groups: how many times the sequence repeats: 1 is [q; k; v], the number of heads is GPT-NeoX's
            [q0; k0; v0; q1; ...]. The parts may differ in size (grouped-query attention).
        transpose: the hub tensor has its dimensions reversed. (A vector is its own transpose.)
    """

    hub: str
    native: tuple[str, ...]
    dim: int = 0
    groups: Size = 1
    transpose: bool = False

    def build(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Built:
        hub, groups = fill(self.hub, values), _number(self.groups, config)
        shape = list(shapes[names[0]])
        rank = len(shape)
        place = {d: rank - 1 - d if self.transpose else d for d in range(rank)}
        each = []
        for name in names:
            other = list(shapes[name])
            if len(other) != rank or any(other[d] != shape[d] for d in range(rank) if d != self.dim):
                raise ValueError(
                    f"{hub}: {name} of shape {tuple(other)} cannot join {names[0]} of shape {tuple(shape)}"
                )
            if other[self.dim] % groups:
                raise ValueError(f"{hub}: {name} has {other[self.dim]} rows, not a multiple of {groups} groups")
            each.append(other[self.dim] // groups)
        total, start, pieces = sum(each), 0, []
        for name, rows in zip(names, each, strict=True):
            axes: list[Axis] = []
            for d in range(rank):
                dims = (place[d], d)
                if d != self.dim:
                    axes.append(Axis(shape[d], dims))
                elif groups == 1:
                    axes.append(Axis(rows, dims))
                else:
                    axes += [Axis(groups, dims, (total, rows)), Axis(rows, dims)]
            offset = tuple(start if d == place[self.dim] else 0 for d in range(rank))
            pieces.append(Piece((hub, name), tuple(axes), (offset, (0,) * rank)))
            start += rows
        fused = [total * groups if d == self.dim else n for d, n in enumerate(shape)]
        return Built({hub: tuple(reversed(fused) if self.transpose else fused)}, pieces)


@dataclass(frozen=True)
class Concat(Rule):
    """Several hub tensors, joined along a dimension, are one of ours.

    Args:
        sizes: the length of each along `dim`; None for the one that takes the rest.
    """

    hub: tuple[str, ...]
    native: str
    sizes: tuple[Size | None, ...]
    dim: int = 0

    def build(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Built:
        native, shape = names[0], shapes[names[0]]
        rank = len(shape)
        known = [None if size is None else _number(size, config) for size in self.sizes]
        rest = shape[self.dim] - sum(n for n in known if n is not None)
        lengths = [rest if n is None else n for n in known]
        if (
            len(lengths) != len(self.hub)
            or known.count(None) > 1
            or sum(lengths) != shape[self.dim]
            or min(lengths) < 0
        ):
            raise ValueError(f"{native}: {shape[self.dim]} rows cannot be cut into {len(self.hub)} parts of {known}")
        built, start = Built({}, []), 0
        for template, length in zip(self.hub, lengths, strict=True):
            hub = fill(template, values)
            part = tuple(length if d == self.dim else n for d, n in enumerate(shape))
            built.shapes[hub] = part
            at = {(NATIVE, self.dim): start}
            built.pieces.append(_block(hub, native, part, range(rank), range(rank), (rank, rank), at))
            start += length
        return built


@dataclass(frozen=True)
class Stack(Rule):
    """Hub tensors numbered `{j}` are the slices of one of ours along its dimension `dim` (experts)."""

    hub: str
    native: str
    dim: int = 0
    transpose: bool = False

    def build(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Built:
        native, shape = names[0], shapes[names[0]]
        rank = len(shape)
        rest = [d for d in range(rank) if d != self.dim]
        places = list(reversed(range(rank - 1))) if self.transpose else list(range(rank - 1))
        sizes = [shape[d] for d in rest]
        built = Built({}, [])
        for j in range(shape[self.dim]):
            hub = fill(self.hub, {**values, "j": str(j)})
            built.shapes[hub] = tuple(sizes[p] for p in places)
            built.pieces.append(_block(hub, native, sizes, places, rest, (rank - 1, rank), {(NATIVE, self.dim): j}))
        return built


@dataclass(frozen=True)
class Pad(Rule):
    """Ours is longer than the hub tensor along `dim`: the rest is zero when loaded and left out when exported.

    Args:
        size: the length of the hub tensor.
    """

    hub: str
    native: str
    size: Size
    dim: int = 0

    def build(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Built:
        hub, native, shape = fill(self.hub, values), names[0], shapes[names[0]]
        size, rank = _number(self.size, config), len(shapes[names[0]])
        if size > shape[self.dim]:
            raise ValueError(f"{native}: {shape[self.dim]} rows are fewer than the {size} of {hub}")
        short = tuple(size if d == self.dim else n for d, n in enumerate(shape))
        pad = tuple((size, n) if d == self.dim else (0, n) for d, n in enumerate(shape))
        pads = {native: [pad]} if size < shape[self.dim] else {}
        return Built({hub: short}, [_block(hub, native, short, range(rank), range(rank), (rank, rank))], pads)


@dataclass(frozen=True)
class Tied(Rule):
    """A hub name for a tensor that another rule already holds.

    Read: it stands in for `to` where the file lacks that; where the file has both they must be equal, unless
    `compare` is off because the network never reads this one. Written only with `write`.
    """

    hub: str
    to: str
    compare: bool = True
    write: bool = False


@dataclass(frozen=True)
class Part:
    """Hub tensors that come and go together: a pooler, a classifier. Native names are relative to a place of the task.

    Attributes:
        prefixed: its hub names lie under the base model's prefix, as those of the body do.
    """

    rules: tuple[Rule, ...]
    prefixed: bool = False


@dataclass(frozen=True)
class Task:
    """What a task adds to the body.

    Attributes:
        hf_class: the class that transformers has for it, written to `architectures`.
        parts: name of the part -> prefix of its parameters in our model.
        prefix: what precedes body names in a file of this class; None: the architecture's.
        labels: the number of outputs that the task fixes, whatever labels a checkpoint had; None: the config's.
        also: other spellings of the class that published configs have.
        without: a pattern of the tensors of the body, the hub's and ours, that a model of this task lacks (a decoder);
            skipped when loaded.
    """

    hf_class: str
    parts: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None
    labels: int | None = None
    also: tuple[str, ...] = ()
    without: str | None = None


CROSS = "attention to an encoder"  # the part of a body that a checkpoint without it can be given


def crossing(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks of bodies that may attend to an encoder."""
    return {name: replace(task, parts={CROSS: "", **task.parts}) for name, task in tasks.items()}


@dataclass(frozen=True)
class ArchMap:
    """Everything that conversion knows about an architecture.

    Attributes:
        prefix: what precedes body names in files of models with a head ("bert."); either form is read.
        body: rules of the parameters that every task has; hub names without the prefix.
        parts, tasks: see Part and Task.
        config: the two-way map of config.json.
        ignore: patterns of hub tensors that hold nothing to learn; dropped when loaded, never written.
        legacy: (pattern, replacement) applied to the names of a file before anything else.
        settle: (config.json, names of the tensors beside it) -> what these say of the config that it does not.
        files: in model_configs, written beside a checkpoint: code for transformers, which its `auto_map` names.
    """

    model_type: str
    prefix: str
    body: tuple[Rule, ...]
    parts: Mapping[str, Part]
    tasks: Mapping[str, Task]
    config: ConfigMap
    ignore: tuple[str, ...] = ()
    legacy: tuple[tuple[str, str], ...] = ()
    settle: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]] | None = None
    files: tuple[str, ...] = ()

    def declared_task(self, architectures: Sequence[str] | None) -> str | None:
        """The task of the class a checkpoint declares, or None where it declares none of ours."""
        for name in architectures or ():
            for task, entry in self.tasks.items():
                if name in (entry.hf_class, *entry.also):
                    return task
        return None

    def declared_parts(self, architectures: Sequence[str] | None) -> tuple[str, ...] | None:
        """The parts that a file of the declared class holds; None: it declares nothing known."""
        task = self.declared_task(architectures)
        return None if task is None else tuple(self.tasks[task].parts)


@dataclass
class Tie:
    """A tied hub name, resolved: `key` holds the same values as `to`."""

    key: str
    to: str
    compare: bool
    write: bool


@dataclass
class Layout:
    """The compiled rules of one model. Hub tensors go by *keys*: their names without the body's prefix.

    Attributes:
        shapes: key -> shape; the tensors that a file of this model holds, ties apart.
        pieces: key -> its pieces (`names[HUB]` is the key).
        written: key -> the name in a file that we write (ties that are written included).
        part: native name -> part it belongs to, "" for the body.
        aliases: key under which a file may hold a tensor -> its key here.
        optional: keys that a file may lack.
        pads: native name -> boxes that are zero.
        native_shapes: native name -> shape.
        without: see Task.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    part: dict[str, str] = field(default_factory=dict)
    key_part: dict[str, str] = field(default_factory=dict)
    ties: dict[str, Tie] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    pads: dict[str, list[Box]] = field(default_factory=dict)
    native_shapes: dict[str, Shape] = field(default_factory=dict)
    without: str | None = None

    def all_pieces(self) -> list[Piece]:
        return [piece for found in self.pieces.values() for piece in found]

    def natives(self, key: str) -> list[str]:
        """The parameters that a hub tensor fills."""
        return list(dict.fromkeys(piece.names[NATIVE] for piece in self.pieces[key]))


def compile_layout(arch: ArchMap, task: str, config: Config, native_shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Apply the rules of an architecture to one model.

    Args:
        native_shapes: name -> shape of every parameter of the model (built on meta is enough).

    Raises:
        ValueError: the architecture has no such task; a parameter has no rule, or more than one.
    """
    if task not in arch.tasks:
        raise ValueError(f"{arch.model_type} has no task {task!r}; it has {', '.join(arch.tasks)}")
    entry = arch.tasks[task]
    prefix = arch.prefix if entry.prefix is None else entry.prefix
    layout = Layout(native_shapes={name: tuple(shape) for name, shape in native_shapes.items()}, without=entry.without)
    _compile_rules(layout, arch.body, "", "", prefix, config)
    for name, place in entry.parts.items():
        part = arch.parts[name]
        _compile_rules(layout, part.rules, name, place, prefix if part.prefixed else "", config)
    for tie in layout.ties.values():
        if tie.to not in layout.shapes:
            raise ValueError(f"{arch.model_type}: {tie.key} is tied to {tie.to}, which no rule names")
    missing = [name for name in layout.native_shapes if name not in layout.part]
    if missing:
        raise ValueError(f"{arch.model_type}, task {task}: no rule for the parameters {', '.join(missing)}")
    return layout


def _compile_rules(layout: Layout, rules: Sequence[Rule], part: str, place: str, prefix: str, config: Config) -> None:
    for rule in rules:
        if rule.when is not None and not rule.when(config):
            continue
        if isinstance(rule, Tied):
            layout.ties[rule.hub] = Tie(rule.hub, rule.to, rule.compare, rule.write)
            if rule.write:
                layout.written[rule.hub] = prefix + rule.hub
            continue
        templates = [place + template for template in rule.native_templates()]
        for match in map(template_regex(templates[0]).fullmatch, list(layout.native_shapes)):
            if match is None:
                continue
            names = [fill(template, match.groupdict()) for template in templates]
            for name in names:
                if name not in layout.native_shapes:
                    raise ValueError(f"rule {rule} needs the parameter {name}, which the model lacks")
                if name in layout.part:
                    raise ValueError(f"two rules claim the parameter {name}; one is {rule}")
                layout.part[name] = part
            built = rule.build(names, match.groupdict(), layout.native_shapes, config)
            for key, shape in built.shapes.items():
                if key in layout.shapes:
                    raise ValueError(f"two rules claim the hub tensor {key}; one is {rule}")
                layout.shapes[key] = shape
                layout.key_part[key] = part
                layout.written[key] = prefix + key
                layout.pieces[key] = [piece for piece in built.pieces if piece.names[HUB] == key]
                if rule.optional:
                    layout.optional.add(key)
            layout.pads.update(built.pads)
            if rule.aliases:
                (key,) = built.shapes
                layout.aliases.update({fill(alias, match.groupdict()): key for alias in rule.aliases})

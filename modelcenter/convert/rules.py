"""Conversion rules: how the tensors of a hub checkpoint correspond to ours, as data.

A rule names a hub tensor and one of ours by templates, and says how one is laid out in the other. In a template, `{i}`
is a number (a layer, an expert) and `*` is one last name such as `weight` or `bias`. Rules apply to the parameters that
a model has: a rule whose native template matches none does nothing, so an untied decoder or an absent bias needs no
condition.

An `ArchMap` holds the rules of an architecture: its body, the parts that heads are made of, and the tasks that combine
them. `layout.compile_layout` turns it into pieces for one model.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from modelcenter.convert.config_map import ConfigMap
from modelcenter.convert.pieces import Axis, Box, Piece, Shape

Config = Any


def tied(config: Config) -> bool:
    """A rule's condition: the head shares the word embeddings."""
    return bool(config.tie_embeddings)


def untied(config: Config) -> bool:
    """A rule's condition: the head has its own matrix."""
    return not config.tie_embeddings


Size = int | Callable[[Config], int]


def _resolve(size: Size, config: Config) -> int:
    return size if isinstance(size, int) else int(size(config))


def _as_tuple(templates: str | tuple[str, ...]) -> tuple[str, ...]:
    return (templates,) if isinstance(templates, str) else templates


@cache
def template_regex(template: str) -> re.Pattern[str]:
    """A pattern that matches exactly the names of a template, with its variables as groups."""
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
    """The name that results from a template and its variables; unknown variables stay."""
    name = template.replace("*", values.get("leaf", "*"))
    return re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), name)


@dataclass(frozen=True)
class Expansion:
    """The expansion of a rule for the parameters of one match.

    Attributes:
        shapes: hub tensor -> shape. pieces: of all of them. pads: native name -> boxes that no hub tensor fills.
    """

    shapes: dict[str, Shape]
    pieces: list[Piece]
    pads: dict[str, list[Box]] = field(default_factory=dict)


def _block(
    hub: str, native: str, sizes: Sequence[int], hub_dims: Sequence[int], start: Sequence[int] | None = None
) -> Piece:
    """A whole hub tensor as a dense block of ours. sizes: by our dimensions; start: of the block in ours."""
    axes = tuple(Axis(n, (h, d)) for d, (n, h) in enumerate(zip(sizes, hub_dims, strict=True)))
    zeros = (0,) * len(sizes)
    return Piece((hub, native), axes, (zeros, zeros if start is None else tuple(start)))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of all rules.

    Attributes:
        when: condition on the config; the rule does not apply if it is false.
        aliases: other names of the hub tensor in files; read, never written.
        in_model: the tensor's name in transformers' model, if it differs from that in files; also in aliases.
        optional: the file may lack the tensor; the parameter is then initialised and listed.
        buffer: the tensor is a buffer of both models, not a parameter, and keeps its dtype whatever the weights' is.
    """

    when: Callable[[Config], bool] | None = None
    aliases: tuple[str, ...] = ()
    in_model: str | None = None
    optional: bool = False
    buffer: bool = False

    def hub_templates(self) -> tuple[str, ...]:
        return _as_tuple(getattr(self, "hub", ()))

    def native_templates(self) -> tuple[str, ...]:
        return _as_tuple(getattr(self, "native", ()))

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        """The hub tensors and pieces for one match.

        Args:
            names: the parameters, in the order of `native_templates`.
            values: of the variables in the templates; `leaf` is the value of `*`.
            shapes: of all parameters of the model.

        Raises:
            ValueError: the shapes of the parameters do not allow it.
        """
        raise AssertionError(f"{type(self).__name__} cannot be expanded")


@dataclass(frozen=True)
class Rename(Rule):
    """The same tensor under another name."""

    hub: str
    native: str

    def _dims(self, rank: int) -> list[int]:
        return list(range(rank))

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        hub, shape = fill(self.hub, values), shapes[names[0]]
        dims = self._dims(len(shape))
        piece = _block(hub, names[0], shape, dims)
        return Expansion({hub: tuple(shape[d] for d in dims)}, [piece])


@dataclass(frozen=True)
class Transpose(Rename):
    """The same tensor with its dimensions reversed (GPT-2's Conv1D keeps weights as (in, out))."""

    def _dims(self, rank: int) -> list[int]:
        return list(reversed(range(rank)))


@dataclass(frozen=True)
class Row(Rename):
    """A vector that is stored as a matrix of one row in the file."""

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        hub, (size,) = fill(self.hub, values), shapes[names[0]]
        return Expansion({hub: (1, size)}, [Piece((hub, names[0]), (Axis(size, (1, 0)),), ((0, 0), (0,)))])


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

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        hub, groups = fill(self.hub, values), _resolve(self.groups, config)
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
        return Expansion({hub: tuple(reversed(fused) if self.transpose else fused)}, pieces)


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

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        native, shape = names[0], shapes[names[0]]
        rank = len(shape)
        known = [None if size is None else _resolve(size, config) for size in self.sizes]
        rest = shape[self.dim] - sum(n for n in known if n is not None)
        lengths = [rest if n is None else n for n in known]
        if (
            len(lengths) != len(self.hub)
            or known.count(None) > 1
            or sum(lengths) != shape[self.dim]
            or min(lengths) < 0
        ):
            raise ValueError(f"{native}: {shape[self.dim]} rows cannot be cut into {len(self.hub)} parts of {known}")
        expansion, start = Expansion({}, []), 0
        for template, length in zip(self.hub, lengths, strict=True):
            hub = fill(template, values)
            part = tuple(length if d == self.dim else n for d, n in enumerate(shape))
            expansion.shapes[hub] = part
            begin = [start if d == self.dim else 0 for d in range(rank)]
            expansion.pieces.append(_block(hub, native, part, range(rank), begin))
            start += length
        return expansion


@dataclass(frozen=True)
class Stack(Rename):
    """One hub tensor for each index of our first dimension, whose number is `{e}` in the hub's template: experts."""

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        native, (count, *shape) = names[0], shapes[names[0]]
        axes = tuple(Axis(n, (d, d + 1)) for d, n in enumerate(shape))
        expansion, zeros = Expansion({}, []), (0,) * len(shape)
        for number in range(count):
            hub = fill(self.hub, {**values, "e": str(number)})
            expansion.shapes[hub] = tuple(shape)
            expansion.pieces.append(Piece((hub, native), axes, (zeros, (number, *zeros))))
        return expansion


@dataclass(frozen=True)
class Joined(Rename):
    """The matrices of our first dimension, experts, are joined along the rows of one hub tensor.

    Args:
        transpose: the hub tensor has each of them transposed.
    """

    transpose: bool = False

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        hub, native, shape = fill(self.hub, values), names[0], shapes[names[0]]
        row, column = (2, 1) if self.transpose else (1, 2)  # our dimensions
        count, rows, columns = shape[0], shape[row], shape[column]
        axes = Axis(count, (0, 0), (rows, 1)), Axis(rows, (0, row)), Axis(columns, (1, column))
        return Expansion({hub: (count * rows, columns)}, [Piece((hub, native), axes, ((0, 0), (0, 0, 0)))])


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

    def expand(
        self, names: Sequence[str], values: Mapping[str, str], shapes: Mapping[str, Shape], config: Config
    ) -> Expansion:
        hub, native, shape = fill(self.hub, values), names[0], shapes[names[0]]
        size, rank = _resolve(self.size, config), len(shapes[names[0]])
        if size > shape[self.dim]:
            raise ValueError(f"{native}: {shape[self.dim]} rows are fewer than the {size} of {hub}")
        short = tuple(size if d == self.dim else n for d, n in enumerate(shape))
        pad = tuple((size, n) if d == self.dim else (0, n) for d, n in enumerate(shape))
        pads = {native: [pad]} if size < shape[self.dim] else {}
        return Expansion({hub: short}, [_block(hub, native, short, range(rank))], pads)


@dataclass(frozen=True)
class Tied(Rule):
    """A hub name for a tensor that another rule already holds.

    In reading, it replaces `to` if the file lacks that; if the file has both, they must be equal, unless `compare` is
    False because the network never reads this one. Written only with `write`. With `{i}` there is one name for each of
    the config's layers, except that of `to`. of_head: it belongs to a head, set by a layout.
    """

    hub: str
    to: str
    compare: bool = True
    write: bool = False
    of_head: bool = False


@dataclass(frozen=True)
class Part:
    """Hub tensors that are present or absent together: a pooler, a classifier. Native names are relative to a prefix
    given by the task.

    Attributes:
        prefixed: its hub names have the base model's prefix, like those of the body.
    """

    rules: tuple[Rule, ...]
    prefixed: bool = False


@dataclass(frozen=True)
class Task:
    """What a task adds to the body.

    Attributes:
        hf_class: its class in transformers, or in the published code of such models; written to `architectures`.
        parts: {name of the part: prefix of its parameters in our model}.
        prefix: the prefix of body names in a file of this class; None: the architecture's.
        labels: the number of outputs, if the task fixes it; None: the config's.
        class_aliases: other spellings of the class in published configs.
        without: a pattern of body tensors, the hub's and ours, that a model of this task lacks (a decoder); skipped in
            loading.
        loaded_by: the class of transformers that loads the body, if it has none for the task; None: hf_class.
    """

    hf_class: str
    parts: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None
    labels: int | None = None
    class_aliases: tuple[str, ...] = ()
    without: str | None = None
    loaded_by: str | None = None


CROSS_ATTENTION = "attention to an encoder"  # the part that can be added to a body whose checkpoint lacks it
# The layers of embeddings behind the pooling, and of those of tokens; each layer has its own folder.
DENSE, PROJECTION = "dense", "projection"

# After sentence-transformers: the hub name is the folder, with the number of the layer among the steps, and the name in
# its file. Files are written by the same names (hub.files.safetensors.plan_files).
_DENSE_LAYERS = Part(
    (
        Rename("{i}_Dense/linear.*", "{i}.linear.*"),
        Rename("{i}_Dense/residual.*", "{i}.residual.*"),
    )
)


def with_cross_attention(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks of bodies that may attend to an encoder."""
    return {name: replace(task, parts={CROSS_ATTENTION: "", **task.parts}) for name, task in tasks.items()}


def with_embedding(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks with "embedding" and "multi-vector" added after "base", which has the same class."""
    bare = tasks["base"]
    # Stanford's class has the projection among its own weights.
    vectors = replace(bare, parts={**bare.parts, PROJECTION: "head."}, class_aliases=("HF_ColBERT",))
    return {**tasks, "embedding": embedding_task(bare), "multi-vector": vectors}


def embedding_task(bare: Task) -> Task:
    """Task "embedding", whose checkpoints have the tensors of task `bare` and dense layers."""
    return replace(bare, parts={**bare.parts, DENSE: "head."})


@dataclass(frozen=True)
class ArchMap:
    """Everything that conversion knows about an architecture.

    Attributes:
        prefix: the prefix of body names in files of models with a head ("bert."); both forms are read.
        body: rules of the parameters that every task has; hub names without the prefix.
        body_in_model: the same rules for the tensors of transformers' model, which peft uses, if they differ from those
            of its files; (): they do not.
        parts, tasks: see Part and Task.
        config: the two-way map of config.json.
        ignore: patterns of hub tensors that hold no learned values, or none if no rule names them; dropped in loading,
            never written.
        old_spellings: (pattern, replacement) applied to the names of a file before anything else.
        infer_config: (config.json, names of the checkpoint's tensors) -> config values that only the tensors show.
        layer_columns: hub tensors (1, layers * n) with n columns per layer.
        of_some_layers: patterns of tensors, by their names within a layer, of which the config says for each layer
            whether it has them.
        files: in model_configs, written with a checkpoint: code for transformers, named in its `auto_map`.
        code: the Hub repository with the code of the classes of its tasks, which `auto_map` names, if transformers'
            classes of these names are other networks; "": they are not.
    """

    model_type: str
    prefix: str
    body: tuple[Rule, ...]
    parts: Mapping[str, Part]
    tasks: Mapping[str, Task]
    config: ConfigMap
    ignore: tuple[str, ...] = ()
    old_spellings: tuple[tuple[str, str], ...] = ()
    infer_config: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]] | None = None
    layer_columns: tuple[str, ...] = ()
    of_some_layers: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    code: str = ""
    body_in_model: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        # The same parts in every architecture.
        own = {part: _DENSE_LAYERS for part in (DENSE, PROJECTION) if any(part in t.parts for t in self.tasks.values())}
        object.__setattr__(self, "parts", {**self.parts, **own})
        if "masked-lm" in self.tasks:  # whose head is used as it is; its class still declares "masked-lm", the first
            object.__setattr__(self, "tasks", {**self.tasks, "sparse-embedding": self.tasks["masked-lm"]})

    def of_model(self) -> "ArchMap":
        """The rules between the tensors of transformers' model, instead of its files, and ours."""
        return replace(self, body=self.body_in_model, body_in_model=()) if self.body_in_model else self

    def ignores(self, key: str) -> bool:
        """Whether a hub tensor that no rule names holds no learned values."""
        return any(re.fullmatch(pattern, key) for pattern in self.ignore)

    def declared_task(self, architectures: Sequence[str] | None) -> str | None:
        """The task of the class that a checkpoint declares; None: it declares none of ours."""
        for name in architectures or ():
            for task, entry in self.tasks.items():
                if name in (entry.hf_class, *entry.class_aliases):
                    return task
        return None

    def declared_parts(self, architectures: Sequence[str] | None) -> tuple[str, ...] | None:
        """The parts in a file of the declared class; None: no known class is declared."""
        task = self.declared_task(architectures)
        return None if task is None else tuple(self.tasks[task].parts)

"""The layout of one model: the rules of its architecture, compiled to pieces for its parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelcenter.convert.pieces import HUB, NATIVE, Box, Piece, Shape
from modelcenter.convert.rules import ArchMap, Config, Expansion, Rule, Tied, fill, template_regex


@dataclass
class Layout:
    """The compiled rules of one model. Hub tensors go by *keys*: their names without the body's prefix.

    Attributes:
        shapes: key -> shape, of the tensors in a file of this model, without ties.
        native_shapes: native name -> shape.
        pieces: key -> its pieces (`names[HUB]` is the key).
        written: key -> the name in a file that we write (including ties that are written).
        key_parts: key -> its part, "" for the body. native_parts: native name -> its part.
        ties: key -> the rule that ties it to another.
        renamed: key -> the name in transformers' model, if it differs from that in its files.
        aliases: another key under which a file may hold a tensor -> its key here.
        optional: keys that a file may lack. buffers: keys of tensors that are not parameters (Rule.buffer).
        pads: native name -> boxes that are zero.
        without: see Task.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    native_shapes: dict[str, Shape] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    key_parts: dict[str, str] = field(default_factory=dict)
    native_parts: dict[str, str] = field(default_factory=dict)
    ties: dict[str, Tied] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    pads: dict[str, list[Box]] = field(default_factory=dict)
    without: str | None = None

    def all_pieces(self) -> list[Piece]:
        return [piece for pieces in self.pieces.values() for piece in pieces]

    def natives(self, key: str) -> list[str]:
        """The parameters that a hub tensor fills."""
        return list(dict.fromkeys(piece.names[NATIVE] for piece in self.pieces[key]))

    def advice_on_repeat(self, name: str, untie: str = "load it with tie_embeddings=False") -> str:
        """A sentence for an error about a tensor of a file that should repeat another and does not.

        Args:
            untie: what to do about a checkpoint that is not tied, if the model may be untied.
        """
        if any(tie.of_head for key, tie in self.ties.items() if name.endswith(key)):
            return f". If the checkpoint is meant to be untied, {untie}"
        return "; here the model has one tensor for both"  # whatever tie_embeddings says

    @property
    def buffer_names(self) -> set[str]:
        """The keys of tensors that are not parameters, and our names of them."""
        return self.buffers.union(*map(self.natives, self.buffers))

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model, however it is sharded or stored."""
        buffers = self.buffer_names
        return sum(math.prod(shape) for name, shape in self.native_shapes.items() if name not in buffers)

    def in_model(self, key: str) -> str:
        """The name of a hub tensor in transformers' model, which peft uses."""
        return self.renamed.get(key, self.written[key])


def compile_layout(arch: ArchMap, task: str, config: Config, native_shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Apply the rules of an architecture to one model.

    Args:
        native_shapes: name -> shape of every parameter of the model (which may be on meta).

    Raises:
        ValueError: the architecture has no such task; a parameter has no rule, or more than one.
    """
    if task not in arch.tasks:
        raise ValueError(f"{arch.model_type} has no task {task!r}; it has {', '.join(arch.tasks)}")
    entry = arch.tasks[task]
    prefix = arch.prefix if entry.prefix is None else entry.prefix
    layout = Layout(native_shapes={name: tuple(shape) for name, shape in native_shapes.items()}, without=entry.without)
    _apply_rules(layout, arch.body, "", "", prefix, config)
    for name, place in entry.parts.items():
        part = arch.parts[name]
        _apply_rules(layout, part.rules, name, place, prefix if part.prefixed else "", config)
    for tie in layout.ties.values():
        if tie.to not in layout.shapes:
            raise ValueError(f"{arch.model_type}: {tie.hub} is tied to {tie.to}, which no rule names")
    missing = [name for name in layout.native_shapes if name not in layout.native_parts]
    if missing:
        raise ValueError(f"{arch.model_type}, task {task}: no rule for the parameters {', '.join(missing)}")
    return layout


def _apply_rules(layout: Layout, rules: Sequence[Rule], part: str, place: str, prefix: str, config: Config) -> None:
    """Add the rules of the body or of a part to a layout.

    Args:
        part: its name, "" for the body. place, prefix: of its native names, and of its names in files.
    """
    for rule in rules:
        if rule.when is not None and not rule.when(config):
            continue
        if isinstance(rule, Tied):
            every = range(config.num_layers if "{i}" in rule.hub else 1)
            for hub in dict.fromkeys(fill(rule.hub, {"i": str(i)}) for i in every):
                if hub == rule.to:
                    continue
                # `when` holds, and a closure cannot be pickled.
                layout.ties[hub] = replace(rule, hub=hub, when=None, of_head=bool(part))
                if rule.write:
                    layout.written[hub] = prefix + hub
            continue
        templates = [place + template for template in rule.native_templates()]
        for match in map(template_regex(templates[0]).fullmatch, list(layout.native_shapes)):
            if match is not None:
                names = [fill(template, match.groupdict()) for template in templates]
                _claim(layout, rule, names, part)
                expansion = rule.expand(names, match.groupdict(), layout.native_shapes, config)
                _add(layout, rule, expansion, part, prefix)
                if rule.aliases:
                    (key,) = expansion.shapes
                    layout.aliases.update({fill(alias, match.groupdict()): key for alias in rule.aliases})
                if rule.in_model is not None:
                    (key,) = expansion.shapes
                    layout.renamed[key] = prefix + fill(rule.in_model, match.groupdict())


def _claim(layout: Layout, rule: Rule, names: Sequence[str], part: str) -> None:
    """Record the part to which the parameters of a rule belong."""
    for name in names:
        if name not in layout.native_shapes:
            raise ValueError(f"rule {rule} needs the parameter {name}, which the model lacks")
        if name in layout.native_parts:
            raise ValueError(f"two rules claim the parameter {name}; one is {rule}")
        layout.native_parts[name] = part


def _add(layout: Layout, rule: Rule, expansion: Expansion, part: str, prefix: str) -> None:
    """Add the hub tensors of a rule."""
    for key, shape in expansion.shapes.items():
        if key in layout.shapes:
            raise ValueError(f"two rules claim the hub tensor {key}; one is {rule}")
        layout.shapes[key] = shape
        layout.key_parts[key] = part
        layout.written[key] = prefix + key
        layout.pieces[key] = [piece for piece in expansion.pieces if piece.names[HUB] == key]
        if rule.optional:
            layout.optional.add(key)
        if rule.buffer:
            layout.buffers.add(key)
    layout.pads.update(expansion.pads)

"""The means to say what a checkpoint of ModelCenter is in Hugging Face's form; `convert.legacy` says it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelcenter.config import nearest
from modelcenter.convert.pieces import HUB, Axis, Piece, Shape
from modelcenter.convert.rules import fill, template_regex

Config = Mapping[str, Any]

# Fields that change nothing of a trained network: the start of its training, and types of numbers.
_IGNORED = frozenset(
    """emb_init_mean emb_init_std pos_init_mean pos_init_std norm_init_var att_init_mean att_init_std ffn_init_mean
    ffn_init_std proj_init_mean proj_init_std att_mask_value half dtype model_type""".split()
)
_REQUIRED: dict[str, tuple[Any, ...]] = {"int8": (False,), "length_scale": (False,)}


@dataclass(frozen=True)
class Old:
    """A tensor of the Hugging Face form and those of ModelCenter that it is made of.

    Args:
        hub: its name; `{i}` is a layer and `*` the last part of a name, as in convert.rules.
        old: ModelCenter's names. Several lie side by side along the last dimension of `hub`.
        transpose: each has its dimensions reversed.
        factor: what its values are multiplied by.
        repeated: a name of ModelCenter's that must hold the same values.
    """

    hub: str
    old: tuple[str, ...]
    transpose: bool = False
    factor: float = 1.0
    repeated: str | None = None


def renamed(hub: str, old: str, factor: float = 1.0) -> Old:
    return Old(hub, (old,), factor=factor)


@dataclass(frozen=True)
class Made:
    """One Hugging Face tensor, resolved: pieces from ModelCenter's names (HUB side) to this one (NATIVE side)."""

    shape: Shape
    pieces: tuple[Piece, ...]
    factor: float = 1.0

    @property
    def renamed(self) -> str | None:
        """ModelCenter's name of the same tensor, if this is no more than another name for it."""
        piece = self.pieces[0]
        straight = all(axis.dims[0] == axis.dims[1] for axis in piece.axes) and piece.offsets[0] == piece.offsets[1]
        return self.pieces[0].names[HUB] if len(self.pieces) == 1 and self.factor == 1 and straight else None


@dataclass(frozen=True)
class Legacy:
    """One of ModelCenter's networks.

    Attributes:
        model_types: the architectures here that it can be loaded as, with what transformers' classes of each begin
            with; the first unless the caller says.
        recognise: (config.json, shapes of the tensors) -> whether a checkpoint is of it.
        rules: (config in Hugging Face's form, number of the last layer) -> how its tensors are made.
        defaults: ModelCenter's values of the fields that a config.json leaves out.
        fields: its field -> those of Hugging Face with the same value.
        required: fields with the values that the network can have here.
        classes: how the class of `architectures` ends, and that of a checkpoint with `cls_head` ("": there is none).
        finish: (their config, ours so far) -> fields of ours that follow from several of theirs.
        unread: (config in Hugging Face's form) -> patterns of ModelCenter's names that its network never reads.
    """

    model_types: Mapping[str, str]
    recognise: Callable[[Config, Mapping[str, Shape]], bool]
    rules: Callable[[Config, int], Sequence[Old]]
    defaults: Config
    fields: Mapping[str, tuple[str, ...]]
    required: Mapping[str, tuple[Any, ...]]
    classes: tuple[str, str]
    finish: Callable[[Config], Mapping[str, Any]] = lambda given: {}
    unread: Callable[[Config], Sequence[str]] = lambda config: ()
    ignored: frozenset[str] = field(default_factory=frozenset)


def name_of(entry: Legacy) -> str:
    """The architecture that it is loaded as where nobody says."""
    return next(iter(entry.model_types))


def hf_config(entry: Legacy, config: Config, model_type: str | None = None) -> dict[str, Any]:
    """A ModelCenter config.json in Hugging Face's form.

    Raises:
        ValueError: a field is unknown, or has a value that the network cannot have here.
    """
    required = {**_REQUIRED, **entry.required}
    for name, value in config.items():
        known = name in entry.defaults or name in required or name in _IGNORED or name in entry.ignored
        if not known and value not in (None, False, ""):
            names = (*entry.defaults, *required)
            raise ValueError(
                f"ModelCenter config field not understood: {name!r} = {value!r}.{nearest(name, names)} "
                f"{name_of(entry)} has {', '.join(entry.defaults)}"
            )
    given = {**entry.defaults, **{name: value for name, value in config.items() if value is not None}}
    for name, values in required.items():
        if name in given and given[name] not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"ModelCenter config field {name!r}: got {given[name]!r}, expected {expected}")
    if "head_dim" not in entry.fields.get("dim_head", ()) and "d_kv" not in entry.fields.get("dim_head", ()):
        width = given["dim_model"]
        if given["num_heads"] * given["dim_head"] != width:
            raise ValueError(
                f"ModelCenter config: num_heads {given['num_heads']} times dim_head {given['dim_head']} is not "
                f"dim_model {width}, which {name_of(entry)} needs"
            )
    kind = model_type or name_of(entry)
    out: dict[str, Any] = {"model_type": kind}
    for name, theirs in entry.fields.items():
        out.update(dict.fromkeys(theirs, given[name]))
    plain, headed = entry.classes
    out["architectures"] = [entry.model_types[kind] + plain]
    if (labels := given.get("cls_head")) and headed:
        out |= {"architectures": [entry.model_types[kind] + headed], "num_labels": int(labels)}
    return {**out, **entry.finish(given)}


def compile_legacy(
    entry: Legacy, config: Config, shapes: Mapping[str, Shape]
) -> tuple[dict[str, Made], list[tuple[str, str]]]:
    """How the tensors of a checkpoint make those of the Hugging Face form.

    Args:
        config: in Hugging Face's form. shapes: of ModelCenter's tensors.

    Returns:
        {Hugging Face's name: Made}, with names that no rule knows as they are; and pairs of ModelCenter's names that
        must hold the same values.

    Raises:
        ValueError: tensors that belong side by side are not all there, or do not fit.
    """
    numbers = [int(m[1]) for name in shapes if (m := re.search(r"\.layers\.(\d+)\.", name))]
    made: dict[str, Made] = {}
    repeated, used = [], set()
    for rule in entry.rules(config, max(numbers, default=0)):
        for match in map(template_regex(rule.old[0]).fullmatch, shapes):
            if match is None:
                continue
            values = match.groupdict()
            values |= {"before": str(int(values["i"]) - 1)} if "i" in values else {}
            if values.get("before") == "-1" and "{before}" in rule.hub:
                continue  # layer 0 has a rule of its own
            names = [fill(old, values) for old in rule.old]
            hub = fill(rule.hub, values)
            absent = [name for name in names if name not in shapes]
            if absent:
                raise ValueError(f"the tensor {names[0]!r} needs {', '.join(map(repr, absent))} beside it: missing")
            made[hub] = _join(hub, names, shapes, rule)
            used.update(names)
            if rule.repeated is not None and (other := fill(rule.repeated, values)) in shapes:
                repeated.append((names[0], other))
                used.add(other)
    unread = entry.unread(config)
    for name in shapes:
        if name not in used and not any(re.fullmatch(pattern, name) for pattern in unread):
            if name in made:
                raise ValueError(f"the file holds both {name!r} and what it is made of")
            made[name] = _join(name, [name], shapes, Old(name, (name,)))
    return made, repeated


def _join(hub: str, names: Sequence[str], shapes: Mapping[str, Shape], rule: Old) -> Made:
    first = shapes[names[0]]
    rank, start, pieces = len(first), 0, []
    for name in names:
        shape = shapes[name]
        ours = tuple(reversed(shape)) if rule.transpose else tuple(shape)
        known = tuple(reversed(first)) if rule.transpose else tuple(first)
        if len(shape) != rank or ours[:-1] != known[:-1]:
            raise ValueError(f"{name!r} of shape {tuple(shape)} does not fit beside {names[0]!r} of {tuple(first)}")
        axes = tuple(Axis(n, (rank - 1 - d if rule.transpose else d, d)) for d, n in enumerate(ours))
        offset = tuple(start if d == rank - 1 else 0 for d in range(rank))
        pieces.append(Piece((name, hub), axes, ((0,) * rank, offset)))
        start += ours[-1] if rank else 0
    whole = (*known[:-1], start) if rank else ()
    return Made(whole, tuple(pieces), rule.factor)

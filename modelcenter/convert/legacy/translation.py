"""Describing how ModelCenter's checkpoints correspond to Hugging Face's form, and translating them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelcenter.config import nearest
from modelcenter.convert.pieces import HUB, Axis, Piece, Shape
from modelcenter.convert.rules import fill, template_regex

Config = Mapping[str, Any]

# Fields without effect on a trained network: its initialisation, and types of numbers.
_IGNORED = frozenset(
    """emb_init_mean emb_init_std pos_init_mean pos_init_std norm_init_var att_init_mean att_init_std ffn_init_mean
    ffn_init_std proj_init_mean proj_init_std att_mask_value half dtype model_type""".split()
)
_REQUIRED: dict[str, tuple[Any, ...]] = {"int8": (False,), "length_scale": (False,)}


@dataclass(frozen=True)
class LegacyRule:
    """A tensor in Hugging Face's form, and ModelCenter's tensors from which it is made.

    Args:
        hub: its name; `{i}` is a layer and `*` the last part of a name, as in convert.rules; `{before}` is i - 1.
        legacy: ModelCenter's names. Several are side by side along the last dimension of `hub`.
        transpose: the dimensions of each are reversed.
        factor: by which its values are multiplied.
        duplicate: a ModelCenter name of a tensor that must hold the same values.
    """

    hub: str
    legacy: tuple[str, ...]
    transpose: bool = False
    factor: float = 1.0
    duplicate: str | None = None


def rename(hub: str, legacy: str, factor: float = 1.0) -> LegacyRule:
    """The rule for one tensor under another name."""
    return LegacyRule(hub, (legacy,), factor=factor)


@dataclass(frozen=True)
class TranslatedTensor:
    """A tensor in Hugging Face's form: its pieces map ModelCenter's tensors (HUB side) to it (NATIVE side)."""

    shape: Shape
    pieces: tuple[Piece, ...]
    factor: float = 1.0

    @property
    def plain_source(self) -> str | None:
        """ModelCenter's name of the same tensor, if only the names differ."""
        piece = self.pieces[0]
        straight = all(axis.dims[0] == axis.dims[1] for axis in piece.axes) and piece.offsets[0] == piece.offsets[1]
        return self.pieces[0].names[HUB] if len(self.pieces) == 1 and self.factor == 1 and straight else None


@dataclass(frozen=True)
class LegacyNetwork:
    """One of ModelCenter's networks.

    Attributes:
        model_types: {architecture here as which it can be loaded: prefix of its classes in transformers}; the first is
            the default.
        recognises: (config.json, shapes of the tensors) -> whether a checkpoint holds this network.
        rules: (config in Hugging Face's form, number of the last layer) -> the rules of its tensors.
        defaults: ModelCenter's values of fields that a config.json omits.
        fields: its field -> Hugging Face's fields with the same value.
        required: fields, with the values that are supported here.
        classes: suffix of the class in `architectures`, and that for a checkpoint with `cls_head` ("": there is none).
        derived_fields: (ModelCenter's config with its defaults) -> Hugging Face's fields that follow from several.
        unread: (config in Hugging Face's form) -> patterns of ModelCenter's names that its network never reads.
        ignored: fields without effect, in addition to those that no network reads.
    """

    model_types: Mapping[str, str]
    recognises: Callable[[Config, Mapping[str, Shape]], bool]
    rules: Callable[[Config, int], Sequence[LegacyRule]]
    defaults: Config
    fields: Mapping[str, tuple[str, ...]]
    required: Mapping[str, tuple[Any, ...]]
    classes: tuple[str, str]
    derived_fields: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    unread: Callable[[Config], Sequence[str]] = lambda config: ()
    ignored: frozenset[str] = field(default_factory=frozenset)

    @property
    def model_type(self) -> str:
        """The architecture as which it is loaded by default."""
        return next(iter(self.model_types))


def hf_config(network: LegacyNetwork, config: Config, model_type: str | None = None) -> dict[str, Any]:
    """A ModelCenter config.json in Hugging Face's form.

    Raises:
        ValueError: a field is unknown, or has a value that is not supported here.
    """
    values = _checked_fields(network, config)
    kind = model_type or network.model_type
    out: dict[str, Any] = {"model_type": kind}
    for name, hub_names in network.fields.items():
        out.update(dict.fromkeys(hub_names, values[name]))
    plain, headed = network.classes
    out["architectures"] = [network.model_types[kind] + plain]
    if (labels := values.get("cls_head")) and headed:
        out |= {"architectures": [network.model_types[kind] + headed], "num_labels": int(labels)}
    return {**out, **network.derived_fields(values)}


def _checked_fields(network: LegacyNetwork, config: Config) -> dict[str, Any]:
    """The fields of a ModelCenter config.json, with defaults for those that it omits."""
    required = {**_REQUIRED, **network.required}
    for name, value in config.items():
        known = name in network.defaults or name in required or name in _IGNORED or name in network.ignored
        if not known and value not in (None, False, ""):
            names = (*network.defaults, *required)
            raise ValueError(
                f"ModelCenter config field not understood: {name!r} = {value!r}.{nearest(name, names)} "
                f"{network.model_type} has {', '.join(network.defaults)}"
            )
    values = {**network.defaults, **{name: value for name, value in config.items() if value is not None}}
    for name, allowed in required.items():
        if name in values and values[name] not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"ModelCenter config field {name!r}: got {values[name]!r}, expected {expected}")
    if "dim_head" not in network.fields:  # the size of a head follows from other fields
        width = values["dim_model"]
        if values["num_heads"] * values["dim_head"] != width:
            raise ValueError(
                f"ModelCenter config: num_heads {values['num_heads']} times dim_head {values['dim_head']} is not "
                f"dim_model {width}, as {network.model_type} requires"
            )
    return values


def translate_tensors(
    network: LegacyNetwork, config: Config, shapes: Mapping[str, Shape]
) -> tuple[dict[str, TranslatedTensor], list[tuple[str, str]]]:
    """Determine how the tensors of a checkpoint form those of Hugging Face's form.

    Args:
        config: in Hugging Face's form. shapes: of ModelCenter's tensors.

    Returns:
        {Hugging Face's name: TranslatedTensor}, with names that no rule matches unchanged; and pairs of ModelCenter's
        names of tensors that must hold the same values.

    Raises:
        ValueError: some tensors that are to be joined are missing, or their shapes do not fit.
    """
    numbers = [int(m[1]) for name in shapes if (m := re.search(r"\.layers\.(\d+)\.", name))]
    translated: dict[str, TranslatedTensor] = {}
    duplicates, used = [], set()
    for rule in network.rules(config, max(numbers, default=0)):
        for match in map(template_regex(rule.legacy[0]).fullmatch, shapes):
            if match is None:
                continue
            values = match.groupdict()
            values |= {"before": str(int(values["i"]) - 1)} if "i" in values else {}
            if values.get("before") == "-1" and "{before}" in rule.hub:
                continue  # layer 0 has its own rule
            names = [fill(template, values) for template in rule.legacy]
            hub = fill(rule.hub, values)
            absent = [name for name in names if name not in shapes]
            if absent:
                raise ValueError(f"the tensor {names[0]!r} is incomplete without {', '.join(map(repr, absent))}")
            translated[hub] = _join(hub, names, shapes, rule)
            used.update(names)
            if rule.duplicate is not None and (other := fill(rule.duplicate, values)) in shapes:
                duplicates.append((names[0], other))
                used.add(other)
    unread = network.unread(config)
    for name in shapes:
        if name not in used and not any(re.fullmatch(pattern, name) for pattern in unread):
            if name in translated:
                raise ValueError(f"the file holds both {name!r} and the tensors it is made of")
            translated[name] = _join(name, [name], shapes, rename(name, name))
    return translated, duplicates


def _join(hub: str, names: Sequence[str], shapes: Mapping[str, Shape], rule: LegacyRule) -> TranslatedTensor:
    """Join ModelCenter's tensors `names` along the last dimension of `hub`."""
    first = shapes[names[0]]
    rank, start, pieces = len(first), 0, []
    for name in names:
        shape = shapes[name]
        ours = tuple(reversed(shape)) if rule.transpose else tuple(shape)
        known = tuple(reversed(first)) if rule.transpose else tuple(first)
        if len(shape) != rank or ours[:-1] != known[:-1]:
            raise ValueError(f"{name!r} of shape {tuple(shape)} cannot be joined with {names[0]!r} of {tuple(first)}")
        axes = tuple(Axis(n, (rank - 1 - d if rule.transpose else d, d)) for d, n in enumerate(ours))
        offset = tuple(start if d == rank - 1 else 0 for d in range(rank))
        pieces.append(Piece((name, hub), axes, ((0,) * rank, offset)))
        start += ours[-1] if rank else 0
    joined = (*known[:-1], start) if rank else ()
    return TranslatedTensor(joined, tuple(pieces), rule.factor)

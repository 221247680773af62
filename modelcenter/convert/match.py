"""Matching the tensor names of a file with a model: to load, of another head, ignored, or unknown."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelcenter.config import nearest
from modelcenter.convert.layout import Layout
from modelcenter.convert.pieces import Shape
from modelcenter.convert.rules import ArchMap, template_regex


@dataclass
class Match:
    """The tensors of a file, matched with a layout.

    Attributes:
        found: key -> name in the file, of the tensors to load.
        repeats: (name in the file, key) of duplicates that must equal the tensor loaded for `key`.
        skipped: tensors of heads that this task does not have. ignored: tensors without content. unknown: all others.
        missing: keys that the file lacks. resized: keys of heads whose tensor was set aside because of its shape.
    """

    found: dict[str, str] = field(default_factory=dict)
    repeats: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)


def to_key(arch: ArchMap, name: str) -> str:
    """The key of a name in a file: old spellings translated, the base model's prefix removed."""
    for pattern, replacement in arch.old_spellings:
        name = re.sub(pattern, replacement, name)
    for prefix in {arch.prefix, *(task.prefix or "" for task in arch.tasks.values())} - {""}:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def belongs_to_part(arch: ArchMap, part: str, key: str) -> bool:
    """Whether a key is a tensor of the part, in any of its forms."""
    templates = (t for rule in arch.parts[part].rules for t in (*rule.hub_templates(), *rule.aliases))
    return any(template_regex(t).fullmatch(key) for t in templates)


def match_names(
    arch: ArchMap, layout: Layout, names: Iterable[str], architectures: Sequence[str] | None = None
) -> Match:
    """Match the tensors of a file with a layout.

    Args:
        names: of all tensors in the file.
        architectures: declared by its config. If heads share tensor names, it decides to which they belong.

    Raises:
        ValueError: two tensors of the file have the same meaning.
    """
    declared = arch.declared_parts(architectures)
    match, ties = Match(), {}
    for name in names:
        key = to_key(arch, name)
        key = layout.aliases.get(key, key)
        if key in layout.shapes:
            if _is_foreign(arch, layout.key_parts[key], key, declared):
                match.skipped.append(name)
            elif key in match.found:
                raise ValueError(f"the tensors {match.found[key]!r} and {name!r} of the file mean the same: {key!r}")
            else:
                match.found[key] = name
        elif arch.ignores(key):
            match.ignored.append(name)
        elif key in layout.ties:
            ties[key] = name
        elif any(belongs_to_part(arch, part, key) for part in arch.parts) or re.fullmatch(layout.without or "", key):
            match.skipped.append(name)
        else:
            match.unknown.append(name)
    for key, name in ties.items():
        tie = layout.ties[key]
        if tie.to not in match.found:
            match.found[tie.to] = name
        elif tie.compare:
            match.repeats.append((name, tie.to))
        else:
            match.ignored.append(name)
    match.missing = [key for key in layout.shapes if key not in match.found]
    return match


def _is_foreign(arch: ArchMap, part: str, key: str, declared: tuple[str, ...] | None) -> bool:
    """Whether the tensor belongs to a declared head of another type."""
    if not part or declared is None or part in declared:
        return False
    return any(belongs_to_part(arch, other, key) for other in declared)


UNKNOWN_ADVICE = "strict=False tolerates them, `modelcenter convert --ignore GLOB` leaves them out"


def unknown_message(arch: ArchMap, layout: Layout, match: Match, where: Mapping[str, str]) -> str:
    """The error about unknown tensors: each with the nearest known name. `where`: name -> file."""
    known = {**{name: "" for name in layout.written.values()}, **layout.shapes}
    lines = [f"  {name!r} in {where[name]}.{nearest(to_key(arch, name), known, 1)}" for name in match.unknown[:10]]
    more = f"\n  and {len(match.unknown) - 10} more" if len(match.unknown) > 10 else ""
    return (
        f"unexpected tensors, unknown to {arch.model_type} ({UNKNOWN_ADVICE}):\n" + "\n".join(lines) + more
    ) + _hint(arch, layout, match.unknown)


# What checkpoints of GPTQ, AWQ, bitsandbytes and compressed-tensors hold instead of a weight, or in addition to it.
_QUANTISED = ("qweight", "qzeros", "g_idx", "SCB", "absmax", "quant_map", "weight_scale", "weight_packed", "bnb_4bit")


def _hint(arch: ArchMap, layout: Layout, unknown: Sequence[str]) -> str:
    """A possible cause of unknown tensors: quantised weights, the names of transformers' model in place of those of its
    files, or a prefix added by a wrapper."""
    if any(part.startswith(_QUANTISED) for name in unknown for part in name.split(".")):
        return "\nThese are quantised weights, which are not supported; load the checkpoint they were made from"
    others = [rule for rule in arch.body_in_model if rule not in arch.body]
    of_model = [template_regex(hub) for rule in others for hub in rule.hub_templates()]
    if any(pattern.fullmatch(to_key(arch, name)) for name in unknown for pattern in of_model):
        return (
            "\nThese are names within transformers' model, as save_pretrained(save_original_format=False) writes them; "
            "load the checkpoint with transformers, and save it without that"
        )
    first = unknown[0]
    for prefix in (first[: end + 1] for end, char in enumerate(first) if char == "."):
        short = [name.removeprefix(prefix) for name in unknown if name.startswith(prefix)]
        if sum(to_key(arch, name) in layout.shapes for name in short) * 2 > len(unknown):
            how = f"prefix={prefix!r} (convert: --prefix), after any prefix already given, removes it"
            return f"\nThey are known without {prefix!r}: {how}"
    return ""


def shape_errors(layout: Layout, match: Match, shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    """Loaded tensors with a wrong shape: key -> (shape in the file, expected shape)."""
    found = {key: (tuple(shapes[name]), layout.shapes[key]) for key, name in match.found.items()}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}

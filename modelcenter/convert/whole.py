"""The layout of a checkpoint with all the heads it holds, whatever task its config names.

A file may hold more than one task takes: the hub's BERT has a masked-language-model head and a next-sentence head, and
`architectures` names one class. Conversion loses none of them. The heads of the named task have the names that a model
of it has; each further head lies under `other_heads.<part>.`, where the part is the one of ArchMap.parts.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelcenter.convert.match import Match, match_names, names_of_part
from modelcenter.convert.pieces import HUB, NATIVE, Shape
from modelcenter.convert.rules import ArchMap, Layout

OTHER_HEADS = "other_heads."
Compile = Callable[[str], Layout]  # the layout of a task


@dataclass
class Whole:
    """What a checkpoint holds, in terms of an architecture.

    Attributes:
        task: whose class the converted checkpoint names.
        layout: of everything that is there: of the task, without parts that are absent, with the further heads.
        found: name of the layout (hub key or native name, as the checkpoint has them) -> name in the checkpoint.
        repeats: (name in a hub file, key) of tensors that must equal another one, and are not written.
        dropped: tensors without content. further: parts beside those of the task.
    """

    task: str
    layout: Layout
    found: dict[str, str]
    repeats: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    further: list[str] = field(default_factory=list)


def native_prefix(arch: ArchMap, task: str, part: str) -> str:
    """Where the parameters of a part lie in a checkpoint that names `task`."""
    places = arch.tasks[task].parts
    return places[part] if part in places else f"{OTHER_HEADS}{part}."


def whole_of_hub(
    arch: ArchMap, compile_task: Compile, shapes: Mapping[str, Shape], architectures: Sequence[str] | None
) -> Whole:
    """The layout of a file with Hugging Face's names.

    Args:
        compile_task: task -> its layout for the checkpoint's config.
        shapes: of all tensors in the file. architectures: as its config.json declares.

    Raises:
        ValueError: the file holds a part of a head only, or tensors mean the same one.
    """
    task = arch.declared_task(architectures) or _closest_task(arch, compile_task, shapes, architectures)
    layout = compile_task(task)
    match = match_names(arch, layout, shapes, architectures)
    whole = Whole(task, layout, dict(match.found), list(match.compare), list(match.ignored), list(match.unknown))
    absent = _absent_parts(layout, match.found)
    whole.layout = _without_parts(layout, absent)
    left = list(match.skipped)
    for part in (p for p in arch.parts if p not in arch.tasks[task].parts or p in absent):
        if not left:
            break
        for other in (t for t, entry in arch.tasks.items() if part in entry.parts):
            source = compile_task(other)
            taken = _take_part(arch, source, part, {name: shapes[name] for name in left}, architectures)
            if taken is None:
                continue
            _add_part(whole.layout, source, arch, task, other, part)
            whole.found.update(taken.found)
            whole.repeats += taken.compare
            whole.further += [part] * bool(taken.found)
            left = [name for name in left if name not in taken.found.values() and name not in dict(taken.compare)]
            break
    whole.unknown += left
    return whole


def whole_of_native(
    arch: ArchMap, compile_task: Compile, names: Collection[str], architectures: Sequence[str] | None
) -> Whole:
    """The layout of a checkpoint with our names.

    Raises:
        ValueError: its config names no task of the architecture.
    """
    task = arch.declared_task(architectures)
    if task is None:
        raise ValueError(
            f"its architectures, {architectures}, name no head that {arch.model_type} has here; expected one of "
            f"{', '.join(entry.hf_class for entry in arch.tasks.values())}"
        )
    layout = compile_task(task)
    held = [key for key in layout.shapes if all(name in names for name in layout.natives(key))]
    whole = Whole(task, _without_parts(layout, _absent_parts(layout, held)), {})
    for part in arch.parts:
        place = f"{OTHER_HEADS}{part}."
        if not any(name.startswith(place) for name in names):
            continue
        other = next(
            (
                t
                for t, e in arch.tasks.items()
                if part in e.parts and _held(compile_task(t), part, e.parts[part], names)
            ),
            None,
        )
        if other is not None:
            _add_part(whole.layout, compile_task(other), arch, task, other, part)
            whole.further.append(part)
    whole.found = {name: name for name in whole.layout.native_shapes if name in names}
    whole.unknown = [name for name in names if name not in whole.layout.native_shapes]
    return whole


def _held(layout: Layout, part: str, place: str, names: Collection[str]) -> bool:
    wanted = [name.removeprefix(place) for name, owner in layout.part.items() if owner == part]
    return bool(wanted) and all(f"{OTHER_HEADS}{part}.{name}" in names for name in wanted)


def _closest_task(
    arch: ArchMap, compile_task: Compile, shapes: Mapping[str, Shape], architectures: Sequence[str] | None
) -> str:
    """The task that takes most of a file whose class is none of ours, and of equals the one that lacks least."""

    def worth(task: str) -> tuple[int, int]:
        match = match_names(arch, compile_task(task), shapes, architectures)
        return len(match.found), -len(match.missing)

    return max(arch.tasks, key=worth)


def _absent_parts(layout: Layout, held: Collection[str]) -> set[str]:
    """The parts of which nothing is held."""
    parts = {part for part in layout.key_part.values() if part}
    return {part for part in parts if not any(layout.key_part[key] == part for key in held)}


def _without_parts(layout: Layout, absent: Collection[str]) -> Layout:
    keys = [key for key in layout.shapes if layout.key_part[key] not in absent]
    names = [name for name in layout.native_shapes if layout.part[name] not in absent]
    kept = replace(layout, optional=set(layout.optional))
    kept.shapes = {key: layout.shapes[key] for key in keys}
    kept.pieces = {key: layout.pieces[key] for key in keys}
    kept.key_part = {key: layout.key_part[key] for key in keys}
    kept.part = {name: layout.part[name] for name in names}
    kept.native_shapes = {name: layout.native_shapes[name] for name in names}
    kept.pads = {name: boxes for name, boxes in layout.pads.items() if name in kept.part}
    kept.ties = {key: tie for key, tie in layout.ties.items() if tie.to in kept.shapes}
    kept.written = {key: name for key, name in layout.written.items() if key in kept.shapes or key in kept.ties}
    return kept


def _take_part(
    arch: ArchMap, layout: Layout, part: str, shapes: Mapping[str, Shape], architectures: Sequence[str] | None
) -> Match | None:
    """The tensors among `shapes` that make the part whole, with its repetitions; None where they do not fit it."""
    own = [key for key, owner in layout.key_part.items() if owner == part]
    match = match_names(arch, layout, shapes)
    found = {key: match.found[key] for key in own if key in match.found}
    if any(shapes[name] != layout.shapes[key] for key, name in found.items()) or len(found) < len(own):
        return None
    # A tied tensor stood in for what it repeats, as that is not among the names left.
    ties = {key: tie for key, tie in layout.ties.items() if names_of_part(arch, part, key)}
    tied = [(name, key) for key, name in match.found.items() if key not in found and key in layout.shapes]
    repeats = [(name, key) for name, key in [*tied, *match.compare] if key in {tie.to for tie in ties.values()}]
    return Match(found=found, compare=repeats) if found or repeats else None


def _add_part(whole: Layout, source: Layout, arch: ArchMap, task: str, other: str, part: str) -> None:
    """Add a part as the layout of `other` has it; its parameters get the names they have beside `task`."""
    here, there = native_prefix(arch, task, part), arch.tasks[other].parts[part]
    prefix = arch.prefix if arch.tasks[task].prefix is None else arch.tasks[task].prefix
    before = (prefix or "") if arch.parts[part].prefixed else ""

    def ours(name: str) -> str:
        return here + name.removeprefix(there)

    for name, owner in source.part.items():
        if owner == part:
            whole.part[ours(name)] = part
            whole.native_shapes[ours(name)] = source.native_shapes[name]
            if name in source.pads:
                whole.pads[ours(name)] = source.pads[name]
    for key, owner in source.key_part.items():
        if owner == part:
            if key in whole.shapes:
                raise ValueError(f"two heads hold the tensor {key!r}; leave one out with --ignore")
            whole.key_part[key] = part
            whole.shapes[key] = source.shapes[key]
            whole.written[key] = before + key
            whole.pieces[key] = [
                replace(piece, names=(piece.names[HUB], ours(piece.names[NATIVE]))) for piece in source.pieces[key]
            ]
            if key in source.optional:
                whole.optional.add(key)
    for key, tie in source.ties.items():
        if names_of_part(arch, part, key) and key not in whole.ties and key not in whole.shapes:
            whole.ties[key] = tie
            if tie.write:
                whole.written[key] = before + key


def missing_keys(whole: Whole, side: int) -> list[str]:
    """Names of the layout, on the checkpoint's side, that it lacks. Optional ones are not missing."""
    layout = whole.layout
    if side == HUB:
        return [key for key in layout.shapes if key not in whole.found and key not in layout.optional]
    optional = {name for key in layout.optional for name in layout.natives(key)}
    return [name for name in layout.native_shapes if name not in whole.found and name not in optional]


def ignored_names(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The names that a shell pattern (`*`, `?`, `[...]`) of the list matches whole.

    Raises:
        ValueError: a pattern that matches none, which is probably a slip.
    """
    import fnmatch

    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if re.fullmatch(fnmatch.translate(pattern), name)]
        if not hits:
            raise ValueError(f"--ignore: {pattern!r} matches no tensor of the checkpoint")
        found.update(hits)
    return [name for name in names if name in found]

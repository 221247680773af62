"""The content of a checkpoint, with all its heads, whichever task its config names.

A file may hold more than one task uses: the hub's BERT has a masked-language-model head and a next-sentence head, but
`architectures` names one class. Conversion keeps all of them. Heads of the named task have the names they have in a
model of that task; each further head is under `other_heads.<part>.`, with its name in ArchMap.parts.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelcenter.convert.layout import Layout
from modelcenter.convert.match import Match, belongs_to_part, match_names, to_key
from modelcenter.convert.pieces import HUB, NATIVE, Shape
from modelcenter.convert.rules import ArchMap

OTHER_HEADS = "other_heads."
CompileTask = Callable[[str], Layout]  # task -> its layout for the checkpoint's config


@dataclass
class CheckpointContents:
    """The tensors of a checkpoint, matched with an architecture.

    Attributes:
        task: the task whose class the converted checkpoint names.
        layout: of everything in the checkpoint: that of the task, without absent parts, with the further heads.
        found: name in the layout (hub key or native name, as in the checkpoint) -> name in the checkpoint.
        repeats: (name in a hub file, key) of tensors that must equal another one, and are not written.
        dropped: tensors without content. unknown: tensors that the architecture does not have.
        further_heads: parts other than the task's.
        absent_heads: part of the class that the config names, if entirely missing -> the names of its tensors.
    """

    task: str
    layout: Layout
    found: dict[str, str]
    repeats: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    further_heads: list[str] = field(default_factory=list)
    absent_heads: dict[str, list[str]] = field(default_factory=dict)


def native_prefix(arch: ArchMap, task: str, part: str) -> str:
    """The prefix of a part's parameters in a checkpoint that names `task`."""
    places = arch.tasks[task].parts
    return places[part] if part in places else f"{OTHER_HEADS}{part}."


def contents_of_hub(
    arch: ArchMap,
    compile_task: CompileTask,
    shapes: Mapping[str, Shape],
    architectures: Sequence[str] | None,
    named_task: str | None = None,
) -> CheckpointContents:
    """The contents of a file with Hugging Face's names.

    Args:
        shapes: of all tensors in the file. architectures: as declared by its config.json.
        named_task: the task according to other files, which takes precedence.

    Raises:
        ValueError: the file holds only some tensors of a head, or several tensors with the same meaning.
    """
    declared = named_task or arch.declared_task(architectures)
    task = declared or _closest_task(arch, compile_task, shapes, architectures)
    layout = compile_task(task)
    match = match_names(arch, layout, shapes, architectures)
    absent = _absent_parts(layout, match.found)
    contents = CheckpointContents(
        task,
        _without_parts(layout, absent),
        dict(match.found),
        list(match.repeats),
        list(match.ignored),
        list(match.unknown),
    )
    if declared is not None:
        needed = {layout.written[key]: layout.key_parts[key] for key in layout.shapes if key not in layout.optional}
        contents.absent_heads = _names_of_parts(needed, absent)
    left = list(match.skipped)
    for part in (p for p in arch.parts if p not in arch.tasks[task].parts or p in absent):
        if not left:
            break
        for other in (t for t, entry in arch.tasks.items() if part in entry.parts):
            source = compile_task(other)
            part_match = _match_part(arch, source, part, {name: shapes[name] for name in left})
            if part_match is None:
                continue
            _add_part(contents.layout, source, arch, task, other, part)
            contents.found.update(part_match.found)
            contents.repeats += part_match.repeats
            contents.dropped += part_match.ignored
            if part_match.found:
                contents.further_heads.append(part)
            used = {*part_match.found.values(), *dict(part_match.repeats), *part_match.ignored}
            left = [name for name in left if name not in used]
            break
    contents.unknown += left
    return contents


def contents_of_native(
    arch: ArchMap,
    compile_task: CompileTask,
    names: Collection[str],
    architectures: Sequence[str] | None,
    named_task: str | None = None,
) -> CheckpointContents:
    """The contents of a checkpoint with our names; arguments as in contents_of_hub.

    Raises:
        ValueError: its config names no task of the architecture.
    """
    task = named_task or arch.declared_task(architectures)
    if task is None:
        raise ValueError(
            f"its architectures, {architectures}, name no head of {arch.model_type} that exists here; expected one of "
            f"{', '.join(entry.hf_class for entry in arch.tasks.values())}"
        )
    layout = compile_task(task)
    keys = [key for key in layout.shapes if all(name in names for name in layout.natives(key))]
    absent = _absent_parts(layout, keys)
    optional = {name for key in layout.optional for name in layout.natives(key)}
    needed = {name: part for name, part in layout.native_parts.items() if name not in optional}
    layout = _without_parts(layout, absent)
    further_heads = []
    for part in arch.parts:
        if not any(name.startswith(f"{OTHER_HEADS}{part}.") for name in names):
            continue
        for other in (t for t, entry in arch.tasks.items() if part in entry.parts):
            source = compile_task(other)
            if _is_held(source, part, arch.tasks[other].parts[part], names):
                _add_part(layout, source, arch, task, other, part)
                further_heads.append(part)
                break
    return CheckpointContents(
        task,
        layout,
        {name: name for name in layout.native_shapes if name in names},
        unknown=[name for name in names if name not in layout.native_shapes],
        further_heads=further_heads,
        absent_heads=_names_of_parts(needed, absent),
    )


def _is_held(layout: Layout, part: str, place: str, names: Collection[str]) -> bool:
    """Whether `names` has the parameters of a part that is at `place` in the layout, as a further head. Optional ones
    may be missing."""
    own = [name for name, owner in layout.native_parts.items() if owner == part]
    held = {name for name in own if f"{OTHER_HEADS}{part}.{name.removeprefix(place)}" in names}
    optional = {name for key in layout.optional for name in layout.natives(key)}
    return bool(held) and all(name in held or name in optional for name in own)


def _closest_task(
    arch: ArchMap, compile_task: CompileTask, shapes: Mapping[str, Shape], architectures: Sequence[str] | None
) -> str:
    """The task that uses most of a file whose class is unknown here; in a tie, the one with the fewest missing."""

    def fit(task: str) -> tuple[int, int]:
        match = match_names(arch, compile_task(task), shapes, architectures)
        return len(match.found), -len(match.missing)

    return max(arch.tasks, key=fit)


def _absent_parts(layout: Layout, keys: Collection[str]) -> set[str]:
    """The parts none of whose tensors are in a checkpoint that holds `keys`."""
    parts = {part for part in layout.key_parts.values() if part}
    return {part for part in parts if not any(layout.key_parts[key] == part for key in keys)}


def _names_of_parts(part_of: Mapping[str, str], parts: Collection[str]) -> dict[str, list[str]]:
    """{part: those of `names` that belong to it}, for `parts` that have any."""
    names: dict[str, list[str]] = {}
    for name, part in part_of.items():
        if part in parts:
            names.setdefault(part, []).append(name)
    return names


def _without_parts(layout: Layout, absent: Collection[str]) -> Layout:
    key_parts = {key: part for key, part in layout.key_parts.items() if part not in absent}
    native_parts = {name: part for name, part in layout.native_parts.items() if part not in absent}
    ties = {key: tie for key, tie in layout.ties.items() if tie.to in key_parts}
    return replace(
        layout,
        shapes={key: shape for key, shape in layout.shapes.items() if key in key_parts},
        pieces={key: pieces for key, pieces in layout.pieces.items() if key in key_parts},
        key_parts=key_parts,
        native_parts=native_parts,
        native_shapes={name: shape for name, shape in layout.native_shapes.items() if name in native_parts},
        pads={name: boxes for name, boxes in layout.pads.items() if name in native_parts},
        ties=ties,
        written={key: name for key, name in layout.written.items() if key in key_parts or key in ties},
        optional={key for key in layout.optional if key in key_parts},
        buffers={key for key in layout.buffers if key in key_parts},
    )


def _match_part(arch: ArchMap, layout: Layout, part: str, shapes: Mapping[str, Shape]) -> Match | None:
    """The tensors in `shapes` that form the whole part, its repeated tensors, and those that the network never reads
    (`ignored`); None if they do not fit."""
    expected = [key for key, owner in layout.key_parts.items() if owner == part]
    match = match_names(arch, layout, shapes)
    found = {key: match.found[key] for key in expected if key in match.found}
    if any(shapes[name] != layout.shapes[key] for key, name in found.items()):
        return None
    if any(key not in found and key not in layout.optional for key in expected):
        return None
    # A tied tensor stood in for the one it repeats, which is not among the remaining names.
    ties = {key: tie for key, tie in layout.ties.items() if belongs_to_part(arch, part, key)}
    tied = [(name, key) for key, name in match.found.items() if key not in found and key in layout.shapes]
    repeats = [(name, key) for name, key in [*tied, *match.repeats] if key in {tie.to for tie in ties.values()}]
    ignored = [name for name in match.ignored if to_key(arch, name) in ties]
    return Match(found=found, repeats=repeats, ignored=ignored) if found or repeats else None


def _add_part(target: Layout, source: Layout, arch: ArchMap, task: str, other: str, part: str) -> None:
    """Add a part of the layout `source`, of the task `other`, to the layout of `task`.

    Its parameters get their names in a checkpoint of `task`.
    """
    here, there = native_prefix(arch, task, part), arch.tasks[other].parts[part]
    prefix = arch.prefix if arch.tasks[task].prefix is None else arch.tasks[task].prefix
    hub_prefix = (prefix or "") if arch.parts[part].prefixed else ""

    def ours(name: str) -> str:
        return here + name.removeprefix(there)

    for name, owner in source.native_parts.items():
        if owner == part:
            target.native_parts[ours(name)] = part
            target.native_shapes[ours(name)] = source.native_shapes[name]
            if name in source.pads:
                target.pads[ours(name)] = source.pads[name]
    for key, owner in source.key_parts.items():
        if owner == part:
            if key in target.shapes:
                raise ValueError(f"two heads hold the tensor {key!r}; leave one out with --ignore")
            target.key_parts[key] = part
            target.shapes[key] = source.shapes[key]
            target.written[key] = hub_prefix + key
            target.pieces[key] = [
                replace(piece, names=(piece.names[HUB], ours(piece.names[NATIVE]))) for piece in source.pieces[key]
            ]
            if key in source.optional:
                target.optional.add(key)
    for key, tie in source.ties.items():
        if belongs_to_part(arch, part, key) and key not in target.ties and key not in target.shapes:
            target.ties[key] = tie
            if tie.write:
                target.written[key] = hub_prefix + key


def missing_keys(contents: CheckpointContents, side: int) -> list[str]:
    """The names in the layout, on the checkpoint's side, that the checkpoint lacks, except optional ones."""
    layout = contents.layout
    if side == HUB:
        return [key for key in layout.shapes if key not in contents.found and key not in layout.optional]
    optional = {name for key in layout.optional for name in layout.natives(key)}
    return [name for name in layout.native_shapes if name not in contents.found and name not in optional]


def ignored_names(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The names that fully match one of the shell patterns (`*`, `?`, `[...]`)."""
    return [name for name in names if any(_matches(pattern, name) for pattern in patterns)]


def check_patterns(patterns: Sequence[str], names: Collection[str]) -> None:
    """Raise ValueError for a pattern that matches none of the names, which is probably a mistake."""
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(f"--ignore: {pattern!r} matches no tensor of the checkpoint")


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(fnmatch.translate(pattern), name) is not None

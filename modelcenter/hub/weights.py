"""Load a distributed checkpoint: parameters under our names, saved by any task on any number of ranks."""

import re
from collections.abc import Iterator
from typing import Any

import torch

import engine
from engine import checkpoint
from modelcenter.convert.rules import ArchMap, Layout, template_regex
from modelcenter.convert.stream import Space, Target, in_threads, read_into
from modelcenter.convert.whole import OTHER_HEADS, native_prefix
from modelcenter.hub.files.dcp import StoredSource, refuse_adapter
from modelcenter.hub.files.reader import reading_threads, refuse_quantised
from modelcenter.hub.resolve import Resolved


class StoredModel:
    """A distributed checkpoint against a model that may have another head than the one it was saved with.

    Attributes:
        fresh: parameters of the model that the checkpoint does not fill.
        skipped: stored tensors of other heads. unknown: stored tensors of no part of the architecture.
    """

    def __init__(self, arch: ArchMap, layout: Layout, found: Resolved, task: str):
        """Raises ValueError: not a complete checkpoint, or its config declares no task of the architecture."""
        assert found.directory is not None
        self.directory, self._layout = found.directory, layout
        checkpoint.check_manifest(found.directory)
        self._source = StoredSource(found.directory)
        refuse_adapter(self._source.tensors, found.directory)
        self._stored = {name: (info.shape, info.dtype) for name, info in self._source.tensors.items()}
        saved_as = arch.declared_task(found.config.get("architectures"))
        if saved_as is None:
            raise ValueError(f"{found.directory}: its architectures name no head of {arch.model_type} that exists here")
        here, there = arch.tasks[task].parts, arch.tasks[saved_as].parts
        self._name_of: dict[str, str] = {}
        for name, part in layout.part.items():
            if not part:
                self._name_of[name] = name
            else:
                self._name_of[name] = native_prefix(arch, saved_as, part) + name.removeprefix(here[part])
        used = set(self._name_of.values())
        rest = [name for name in self._stored if name not in used]
        # By whole names: what a body may have beside its own (CROSS) lies at no prefix.
        rules = ((place, rule) for part, place in there.items() for rule in arch.parts[part].rules)
        heads = [template_regex(place + t) for place, rule in rules for t in rule.native_templates()]
        known = (*heads, re.compile(layout.without or ""))
        self.skipped = [name for name in rest if name.startswith(OTHER_HEADS) or any(p.fullmatch(name) for p in known)]
        self.unknown = [name for name in rest if name not in self.skipped]
        self.fresh = [name for name in layout.native_shapes if self._name_of.get(name) not in self._stored]

    def check(self, strict: bool, ignore_mismatched_sizes: bool, named: bool) -> None:
        """Raise for tensors that are missing, unknown, misshapen or quantised, as for a Hugging Face directory.

        Args:
            named: the caller named the task, so a head that is not there may be initialised.
        """
        if self.unknown and strict:
            raise ValueError(f"{self.directory}: unexpected tensors (strict=False tolerates them): {self.unknown[:10]}")
        parts = self._layout.part
        optional = {name for key in self._layout.optional for name in self._layout.natives(key)}
        held = {parts[name] for name in parts if name not in self.fresh}
        wanted = [name for name in self.fresh if name not in optional]
        missing = [name for name in wanted if not named or parts[name] in held | {""}]
        if missing:
            raise ValueError(f"{self.directory}: {len(missing)} missing: {', '.join(missing[:20])}")
        wrong = list(self._misshapen())
        if ignore_mismatched_sizes:
            self.fresh += [name for name in wrong if parts[name]]
            wrong = [name for name in wrong if not parts[name]]
        if wrong:
            stored = {name: self._stored[self._name_of[name]][0] for name in wrong[:20]}
            lines = [f"  {n!r} has shape {stored[n]}, expected {self._layout.native_shapes[n]}" for n in stored]
            fix = (
                "\nPass ignore_mismatched_sizes=True to initialise the head anew" if all(map(parts.get, wrong)) else ""
            )
            raise ValueError(f"{self.directory}: {len(wrong)} of the wrong shape:\n" + "\n".join(lines) + fix)

        try:
            refuse_quantised((name, self._stored[name][1]) for name in self._name_of.values() if name in self._stored)
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from None

    def _misshapen(self) -> Iterator[str]:
        for name, stored in self._name_of.items():
            if name not in self.fresh and self._stored[stored][0] != self._layout.native_shapes[name]:
                yield name

    def dtypes(self) -> set[torch.dtype]:
        return {self._stored[stored][1] for name, stored in self._name_of.items() if name not in self.fresh}

    def fill(self, model: Any) -> int:
        """Fill a model that has its memory, plain or sharded, with this rank's slices; returns the bytes it read."""
        with self._source as source:
            # In the order of the files. What is not here is on another stage of a pipeline.
            mine = [slot for slot in engine.local_slices(model) if slot[0] not in self.fresh]
            mine = [slot for slot in mine if slot[0] in self._name_of]
            mine.sort(key=lambda slot: source.position(self._name_of[slot[0]]))

            def read(slot: Target, space: Space) -> None:
                read_into(source, self._name_of[slot[0]], slot[1], slot[2], space)

            in_threads(read, mine, reading_threads())
            return source.bytes_read

"""The sources of a model's weights: files in Hugging Face's form, or a distributed checkpoint of any task."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

import engine
from modelcenter.convert.contents import OTHER_HEADS, native_prefix
from modelcenter.convert.layout import Layout
from modelcenter.convert.match import UNKNOWN_ADVICE, match_names, shape_errors, to_key, unknown_message
from modelcenter.convert.rules import ArchMap, template_regex
from modelcenter.convert.stream import ReadBuffer, Target, fill_targets, read_into, run_in_threads
from modelcenter.hub.architecture import Blueprint, choose_task, find_spec, make_blueprint, stored_task
from modelcenter.hub.dtypes import refuse_quantised
from modelcenter.hub.files.cross_encoder_files import stored_score_tokens, with_stored_activation
from modelcenter.hub.files.dcp import DCPSource, open_model
from modelcenter.hub.files.dense_files import add_dense_weights, name_inline_projection
from modelcenter.hub.files.described_tasks import FIELDS, check_dense_inputs, dense_steps, settings_over
from modelcenter.hub.files.embedding_files import FindFile, beside
from modelcenter.hub.files.reader import FileSource, reading_threads
from modelcenter.hub.legacy import open_hf_source
from modelcenter.hub.resolve import ModelFiles
from modelcenter.hub.score_tokens import add_score_head


class Weights(Protocol):
    """The tensors of an open checkpoint, compared with the model to fill.

    `fresh` is final once `check` has returned, because that may set aside heads with other shapes.
    """

    @property
    def fresh(self) -> list[str]:
        """Parameters of the model that the checkpoint does not fill."""

    @property
    def skipped(self) -> list[str]:
        """Tensors of other heads."""

    @property
    def ignored(self) -> list[str]:
        """Tensors without content."""

    @property
    def unknown(self) -> list[str]:
        """Tensors of no part of the architecture."""

    @property
    def bytes_read(self) -> int:
        """The number of bytes read by this rank."""

    def check(self, strict: bool, ignore_mismatched_sizes: bool, head_requested: bool) -> None:
        """Raise ValueError for tensors that are missing, unknown or quantised, or have the wrong shape.

        Args:
            strict: refuse unknown tensors. ignore_mismatched_sizes: initialise heads whose shapes differ.
            head_requested: the caller gave the task, so a missing head may be initialised.
        """

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the tensors that fill the model's parameters."""

    def fill(self, model: Any) -> None:
        """Fill an allocated model, plain or sharded, with the slices of this rank."""


def blueprint_of(
    files: ModelFiles,
    task: str | None = None,
    architecture: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    find: FindFile | None = None,
    score_tokens: Sequence[int] = (),
) -> Blueprint:
    """The model that a checkpoint holds, with the head of `task` or the one that its config declares.

    Args:
        architecture: the model_type that the checkpoint must have. overrides: fields of the config.
        find: name of a file -> its path in the checkpoint, or None if it does not exist; None: look in the directory.
        score_tokens: of Blueprint; empty: those that the files name.

    Raises:
        ValueError: the config names no known architecture or head, or a field is not understood; score_tokens are given
            for another type of head.
    """
    spec = find_spec(files.config, architecture, files.origin)
    arch: ArchMap = spec.arch_map()
    if find is None:
        assert files.directory is not None
        find = beside(files.directory)
    chosen = choose_task(arch, task, files.config, files.origin, find)
    overrides, values = dict(overrides or {}), files.config
    if score_tokens and (chosen != "sequence-classification" or overrides.get("num_labels", 1) != 1):
        raise ValueError(
            "score_tokens: they build the head of the task sequence-classification with num_labels 1; leave them out "
            "for any other"
        )
    if chosen == "sequence-classification":
        values = with_stored_activation(values, find)
        if overrides.get("num_labels", 1) == 1:
            score_tokens = score_tokens or stored_score_tokens(find)
    if score_tokens and "id2label" not in overrides:
        overrides["num_labels"] = 1
    if (field := FIELDS.get(chosen)) is not None:
        overrides[field] = settings_over(chosen, find, overrides.get(field))
    if arch.infer_config is not None and files.weights is not None:
        with open_hf_source(files) as source:
            overrides = {**arch.infer_config(files.config, source.tensors), **overrides}
    blueprint = replace(make_blueprint(spec, chosen, values, overrides, files.origin), score_tokens=tuple(score_tokens))
    check_dense_inputs(chosen, find, blueprint.model)
    return blueprint


@contextmanager
def open_weights(files: ModelFiles, blueprint: Blueprint, find: FindFile) -> Iterator[Weights]:
    """Open the weights of a checkpoint for the model of a blueprint; they are closed when the block ends.

    Args:
        find: as in blueprint_of.

    Raises:
        ValueError: a file is missing, damaged or incomplete; two tensors of a file have the same meaning; a distributed
            checkpoint is of a model with an adapter, or its config declares no task of the architecture.
    """
    if files.distributed:
        assert files.directory is not None
        if blueprint.score_tokens and blueprint.arch.declared_task(files.config.get("architectures")) != blueprint.task:
            raise ValueError(
                f"score_tokens: {files.directory} is a distributed checkpoint, whose head cannot be built from words; "
                "`modelcenter convert --to hf` makes one that can"
            )
        with open_model(files.directory) as stored:
            yield DistributedWeights(stored, blueprint, files)
    else:
        with open_hf_source(files) as source:
            yield FileWeights.with_further_tensors(source, blueprint, files, find)


class FileWeights:
    """Weights in files of Hugging Face's form, read through the conversion rules."""

    def __init__(self, source: FileSource, blueprint: Blueprint, files: ModelFiles, made: str = ""):
        """made: name of a tensor that is in no file, see add_score_head. Raises ValueError if two tensors of the file
        have the same meaning."""
        self._made = made
        self._source, self._blueprint, self._files = source, blueprint, files
        self._arch, self._layout = blueprint.arch, blueprint.layout
        self._match = match_names(self._arch, self._layout, source.tensors, files.config.get("architectures"))

    @classmethod
    def with_further_tensors(
        cls, source: FileSource, blueprint: Blueprint, files: ModelFiles, find: FindFile
    ) -> "FileWeights":
        """From a model's weight files, with tensors that are in other files or computed from those in them.

        Args:
            find: as in blueprint_of.

        Raises:
            ValueError: as open_weights, add_dense_weights and add_score_head.
        """
        add_dense_weights(source, dense_steps(blueprint.task, find), find)
        name_inline_projection(source, files.config)
        made = add_score_head(source, blueprint, files.config.get("architectures"), files.origin)
        return cls(source, blueprint, files, made)

    @property
    def fresh(self) -> list[str]:
        absent = {name for key in (*self._match.missing, *self._match.resized) for name in self._layout.natives(key)}
        return [name for name in self._layout.native_shapes if name in absent]

    @property
    def skipped(self) -> list[str]:
        return self._match.skipped

    @property
    def ignored(self) -> list[str]:
        return self._match.ignored

    @property
    def unknown(self) -> list[str]:
        return self._match.unknown

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def check(self, strict: bool, ignore_mismatched_sizes: bool, head_requested: bool) -> None:
        for name, error in self._source.absent.items():
            if represented_key(self._arch, self._layout, name) in self._match.missing:
                raise ValueError(error)
        origin, source = self._files.origin, self._source
        if self.unknown and strict:
            file_names = {name: info.file.name for name, info in source.tensors.items()}
            raise ValueError(f"{origin}: {unknown_message(self._arch, self._layout, self._match, file_names)}")
        self._check_shapes(ignore_mismatched_sizes)
        try:
            refuse_quantised((name, source.dtype(name)) for name in self._match.found.values())
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None
        self._check_missing(head_requested)

    def _check_shapes(self, ignore_heads: bool) -> None:
        """Raise for tensors of the wrong shape; with `ignore_heads`, those of heads are set aside instead."""
        match, layout, tensors = self._match, self._layout, self._source.tensors
        wrong = shape_errors(layout, match, {name: info.shape for name, info in tensors.items()})
        heads = [key for key in wrong if layout.key_parts[key]]
        if ignore_heads:
            for key in heads:
                match.resized.append(key)
                match.skipped.append(match.found.pop(key))
                del wrong[key]
            match.skipped += [name for name, key in match.repeats if key in heads]
            match.repeats = [(name, key) for name, key in match.repeats if key not in heads]
        if wrong:
            lines = [
                f"  {match.found[key]!r} in {tensors[match.found[key]].file.name} has shape {shape}, expected "
                f"{expected} ({', '.join(layout.natives(key))})"
                for key, (shape, expected) in wrong.items()
            ]
            fix = ""
            if len(heads) == len(wrong):
                how = (
                    "change num_labels, or pass ignore_mismatched_sizes=True to initialise it; in training "
                    "--ignore_mismatched_sizes"
                )
                fix = f"\nThey belong to the head: {how}"
            raise ValueError(f"{self._files.origin}: {len(wrong)} of the wrong shape:\n" + "\n".join(lines[:20]) + fix)
        for name, key in match.repeats:
            if (shape := tuple(tensors[name].shape)) != layout.shapes[key]:
                raise ValueError(
                    f"{self._files.origin}: tensor {name!r} in {tensors[name].file.name} has shape {shape}, but it "
                    f"should repeat {match.found[key]!r} (they are tied), which has {layout.shapes[key]}"
                    f"{layout.advice_on_repeat(name)}"
                )

    def _check_missing(self, head_requested: bool) -> None:
        """Raise for missing parameters that may not be initialised: those of the body, of a head that was not
        requested, or of a head that is partly in the files."""
        layout, match, files = self._layout, self._match, self._files
        absent = [key for key in match.missing if key not in layout.optional]
        held = {layout.key_parts[key] for key in match.found}
        errors = []
        for key in absent:
            if layout.key_parts[key] in held | {""} or not head_requested:
                natives = ", ".join(layout.natives(key))
                errors.append(f"  {layout.written[key]!r} of shape {layout.shapes[key]} ({natives})")
        if not errors:
            return
        more = f"\n  and {len(errors) - 20} more" if len(errors) > 20 else ""
        fix = ""
        if not head_requested and all(layout.key_parts[key] for key in absent):
            fix = _absent_head_advice(self._arch, self._blueprint.task, {layout.key_parts[key] for key in absent})
        elif not any(not layout.key_parts[key] for key in match.found):
            fix = "\nNo tensor of the body is there: are these the weights of another architecture?"
        place = files.weights.name if files.weights is not None else files.origin
        raise ValueError(f"{files.origin}: {len(errors)} missing in {place}:\n" + "\n".join(errors[:20]) + more + fix)

    def dtypes(self) -> set[torch.dtype]:
        found, buffers = self._match.found.items(), self._layout.buffers
        return {self._source.dtype(name) for key, name in found if key not in buffers and name != self._made}

    def fill(self, model: Any) -> None:
        fill_targets(self._layout, self._match, self._source, engine.local_slices(model), reading_threads())


def _absent_head_advice(arch: ArchMap, task: str, parts: set[str]) -> str:
    """Advice for a caller who gave no task, if these parts of a head are missing."""
    advice = f"\nThey belong to the head: pass task={task!r} to initialise it at random"
    if "base" in arch.tasks and not parts & set(arch.tasks["base"].parts):
        advice += ", or task='base' for the model without it"
    return advice


def represented_key(arch: ArchMap, layout: Layout, name: str) -> str:
    """The key of the tensor with this name in a file; for a repeated tensor, the key of the one it repeats."""
    key = to_key(arch, name)
    key = layout.aliases.get(key, key)
    return layout.ties[key].to if key in layout.ties else key


class DistributedWeights:
    """The parameters of a distributed checkpoint, for a model that may have another head than the saved one."""

    def __init__(self, source: DCPSource, blueprint: Blueprint, files: ModelFiles):
        """Raises ValueError if the config of the checkpoint declares no task of the architecture."""
        arch = blueprint.arch
        self._source, self._blueprint, self._layout = source, blueprint, blueprint.layout
        self._origin = files.directory
        assert files.directory is not None
        saved_as = stored_task(arch, files.config, beside(files.directory))
        if saved_as is None:
            raise ValueError(f"{files.directory}: its architectures name no head of {arch.model_type} that exists here")
        self._stored_name = _stored_names(arch, self._layout, blueprint.task, saved_as)
        used = set(self._stored_name.values())
        rest = [name for name in source.tensors if name not in used]
        heads = _head_patterns(arch, saved_as)
        known = (*heads, re.compile(self._layout.without or ""))
        self.skipped = [name for name in rest if name.startswith(OTHER_HEADS) or any(p.fullmatch(name) for p in known)]
        self.unknown = [name for name in rest if name not in self.skipped]
        self.ignored: list[str] = []
        self.fresh = [name for name in self._layout.native_shapes if self._stored_name.get(name) not in source.tensors]

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def check(self, strict: bool, ignore_mismatched_sizes: bool, head_requested: bool) -> None:
        if self.unknown and strict:
            raise ValueError(f"{self._origin}: unexpected tensors ({UNKNOWN_ADVICE}): {self.unknown[:10]}")
        self._check_missing(head_requested)
        self._check_shapes(ignore_mismatched_sizes)
        stored = self._source.tensors
        try:
            refuse_quantised((name, stored[name].dtype) for name in self._stored_name.values() if name in stored)
        except ValueError as error:
            raise ValueError(f"{self._origin}: {error}") from None

    def _check_missing(self, head_requested: bool) -> None:
        """Raise for missing parameters that may not be initialised, as FileWeights does."""
        parts = self._layout.native_parts
        optional = {name for key in self._layout.optional for name in self._layout.natives(key)}
        held = {parts[name] for name in parts if name not in self.fresh}
        absent = [name for name in self.fresh if name not in optional]
        missing = [name for name in absent if not head_requested or parts[name] in held | {""}]
        if missing:
            fix = ""
            if not head_requested and all(parts[name] for name in missing):
                fix = _absent_head_advice(self._blueprint.arch, self._blueprint.task, {parts[n] for n in missing})
            raise ValueError(f"{self._origin}: {len(missing)} missing: {', '.join(missing[:20])}{fix}")

    def _check_shapes(self, ignore_heads: bool) -> None:
        """Raise for tensors of the wrong shape; with `ignore_heads`, those of heads become fresh instead."""
        parts, expected = self._layout.native_parts, self._layout.native_shapes
        shapes = {name: self._source.tensors[self._stored_name[name]].shape for name in self._filled()}
        wrong = [name for name, shape in shapes.items() if shape != expected[name]]
        if ignore_heads:
            self.fresh += [name for name in wrong if parts[name]]
            wrong = [name for name in wrong if not parts[name]]
        if wrong:
            lines = [f"  {n!r} has shape {shapes[n]}, expected {expected[n]}" for n in wrong[:20]]
            fix = (
                "\nPass ignore_mismatched_sizes=True to initialise the head at random"
                if all(map(parts.get, wrong))
                else ""
            )
            raise ValueError(f"{self._origin}: {len(wrong)} of the wrong shape:\n" + "\n".join(lines) + fix)

    def _filled(self) -> list[str]:
        fresh = set(self.fresh)
        return [name for name in self._stored_name if name not in fresh]

    def dtypes(self) -> set[torch.dtype]:
        buffers = self._layout.buffer_names
        return {self._source.dtype(self._stored_name[name]) for name in self._filled() if name not in buffers}

    def fill(self, model: Any) -> None:
        """Read this rank's slices of the parameters from the checkpoint."""
        source, stored_name, filled = self._source, self._stored_name, set(self._filled())
        # In the order of the files. Missing parameters are on another stage of a pipeline.
        targets = [target for target in engine.local_slices(model) if target[0] in filled]
        targets.sort(key=lambda target: source.position(stored_name[target[0]]))

        def read(target: Target, buffer: ReadBuffer) -> None:
            name, offsets, local = target
            read_into(source, stored_name[name], offsets, local, buffer)

        run_in_threads(read, targets, reading_threads())


def _stored_names(arch: ArchMap, layout: Layout, task: str, saved_as: str) -> dict[str, str]:
    """{parameter of a model of `task`: its name in a checkpoint of task `saved_as`}."""
    places = arch.tasks[task].parts
    return {
        name: native_prefix(arch, saved_as, part) + name.removeprefix(places[part]) if part else name
        for name, part in layout.native_parts.items()
    }


def _head_patterns(arch: ArchMap, task: str) -> list[re.Pattern[str]]:
    """Patterns for the names of the parameters of a task's heads.

    They match full names, because optional parts of a body (CROSS_ATTENTION) have no common prefix.
    """
    rules = ((place, rule) for part, place in arch.tasks[task].parts.items() for rule in arch.parts[part].rules)
    return [template_regex(place + template) for place, rule in rules for template in rule.native_templates()]

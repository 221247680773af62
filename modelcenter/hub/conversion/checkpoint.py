"""A checkpoint in any format, opened for conversion: tensors read by boxes, matched with an architecture."""

import functools
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import expanduser
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from modelcenter.config import ModelConfig
from modelcenter.convert.contents import (
    CheckpointContents,
    CompileTask,
    check_patterns,
    contents_of_hub,
    contents_of_native,
    ignored_names,
    missing_keys,
)
from modelcenter.convert.kept_layers import KeptLayers
from modelcenter.convert.layout import Layout
from modelcenter.convert.match import Match, belongs_to_part, to_key, unknown_message
from modelcenter.convert.pieces import HUB, NATIVE, Piece, full_box
from modelcenter.convert.rules import ArchMap
from modelcenter.convert.stream import CHUNK_BYTES, Source, chunks
from modelcenter.hub.architecture import Blueprint, find_spec, make_blueprint
from modelcenter.hub.dtypes import refuse_quantised
from modelcenter.hub.files.dcp import open_model
from modelcenter.hub.files.dense_files import add_dense_weights
from modelcenter.hub.files.described_tasks import (
    FIELDS,
    check_dense_inputs,
    dense_steps,
    described_task,
    stored_fields,
)
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.multi_vector_files import STANFORD_CLASS
from modelcenter.hub.files.names import CONFIG_FILE, MANIFEST_FILE
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.files.weight_files import open_weight_files
from modelcenter.hub.kept_layers import keep_layers, with_kept_layers
from modelcenter.hub.legacy import in_hf_form, open_hf_source
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import ModelFiles, read_config, refuse_two_models, resolve
from modelcenter.hub.run_folder import find_step
from modelcenter.hub.sidecar import SidecarFiles
from modelcenter.hub.weights import represented_key

SIDES = {HUB: "hf", NATIVE: "distributed"}


class TensorSource(Source, Protocol):
    """A source that lists its tensors. Reading must work in a forked process."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """{name: info with the tensor's shape and dtype}."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Request:
    """How to read a checkpoint, as requested by the user.

    Attributes:
        config: a name, directory or JSON file whose config.json replaces the checkpoint's.
        prefix: text before the names in the file that is not part of them ("module.").
        ignore: shell patterns of tensors to leave out.
        kept: the layers to keep; None: all.
    """

    config: str | None = None
    prefix: str = ""
    ignore: tuple[str, ...] = ()
    options: HubOptions = field(default_factory=HubOptions)
    kept: KeptLayers | None = None


@dataclass
class Checkpoint:
    """An open checkpoint: its tensors and their meaning. A context manager.

    Attributes:
        source: its tensors under their stored names.
        side: HUB or NATIVE, the side of the keys of `names`. names: name in the layout -> name in `source`.
        files: its location and config.json. arch, config, whole: see ArchMap, ModelConfig and CheckpointContents.
        ignored: tensors that the user left out.
        absent_heads: as in `whole`, without those that the user left out.
    """

    source: TensorSource
    side: int
    files: ModelFiles
    arch: ArchMap
    config: ModelConfig
    whole: CheckpointContents
    names: dict[str, str]
    ignored: list[str] = field(default_factory=list)
    absent_heads: dict[str, list[str]] = field(default_factory=dict)
    options: HubOptions = field(default_factory=HubOptions)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.close()

    @property
    def origin(self) -> str:
        return self.files.origin

    @property
    def layout(self) -> Layout:
        return self.whole.layout

    @functools.cached_property
    def sidecar(self) -> SidecarFiles:
        """The files other than weights, such as the tokenizer's."""
        return _sidecar(self.files, self.options)

    def hub_keys(self) -> list[str]:
        """The hub keys of the tensors in this checkpoint."""
        if self.side == HUB:
            return [key for key in self.layout.shapes if key in self.names]
        return [key for key in self.layout.shapes if all(n in self.names for n in self.layout.natives(key))]

    def native_names(self) -> list[str]:
        """The names of the parameters in this checkpoint."""
        if self.side == NATIVE:
            return [name for name in self.layout.native_shapes if name in self.names]
        filled = {name for key in self.hub_keys() for name in self.layout.natives(key)}
        lacking = {n for key in self.layout.shapes if key not in self.names for n in self.layout.natives(key)}
        return [name for name in self.layout.native_shapes if name in filled and name not in lacking]

    def pieces(self, side: int, name: str) -> list[Piece]:
        """The pieces of a tensor of either side."""
        return self.layout.pieces[name] if side == HUB else self._pieces_by_native_name[name]

    @functools.cached_property
    def _pieces_by_native_name(self) -> dict[str, list[Piece]]:
        pieces: dict[str, list[Piece]] = {name: [] for name in self.layout.native_shapes}
        for piece in self.layout.all_pieces():
            pieces[piece.names[NATIVE]].append(piece)
        return pieces

    def source_names(self, side: int, name: str) -> list[str]:
        """The names in `source` of the tensors that a tensor of either side consists of."""
        if side == self.side:
            return [self.names[name]]
        return list(dict.fromkeys(self.names[piece.names[1 - side]] for piece in self.pieces(side, name)))

    def check_heads(self) -> None:
        """Raise ValueError if the class in config.json has a head, but the checkpoint none of its tensors: without an
        index, nothing else shows that a file is missing."""
        if not self.absent_heads:
            return
        names = [name for part in self.absent_heads.values() for name in part]
        shown = ", ".join(names[:10]) + (", ..." if names[10:] else "")
        patterns = " ".join(shlex.quote(_common_pattern(part)) for part in self.absent_heads.values())
        raise ValueError(
            f"{self.origin}: {self.arch.tasks[self.whole.task].hf_class}, which its config names, has a head, but all "
            f"its tensors are missing: {shown}. If this is intended, convert without it: --ignore {patterns}"
        )

    def check_repeats(self) -> None:
        """Raise ValueError if a tensor that should repeat another differs from it."""
        for name, key in self.whole.repeats:
            first = self.names[key]
            if not _same_values(self.source, name, first):
                advice = self.layout.advice_on_repeat(name, "set tie_word_embeddings to false in its config.json")
                raise ValueError(
                    f"{self.origin}: tensor {name!r} should repeat {first!r} (they are tied), but its values differ"
                    + advice
                )


def _sidecar(files: ModelFiles, options: HubOptions) -> SidecarFiles:
    return SidecarFiles(files.directory, files.repo, replace(options, revision=files.revision))


def open_checkpoint(path: Any, request: Request | None = None) -> Checkpoint:
    """Open a checkpoint in any format, or the last one of a training run.

    Raises:
        ValueError: there is nothing readable, it is damaged, or tensors are missing, unknown or of the wrong shape.
    """
    request = request or Request()
    place = str(find_step(path, None))
    directory = Path(expanduser(place))
    if (directory / MANIFEST_FILE).is_file():
        return _open_distributed(directory, request)
    return _open_hf(place, request)


def _open_distributed(directory: Path, request: Request) -> Checkpoint:
    """Open a distributed checkpoint of a model or of training."""
    refuse_two_models(directory)
    source = open_model(directory)
    values = None if request.config is None else read_config(request.config, request.options)
    if values is None:
        if not (directory / CONFIG_FILE).is_file():
            raise ValueError(f"{directory} has no {CONFIG_FILE}; name its model with --config NAME|FILE")
        values = read_json(directory / CONFIG_FILE)
    files = ModelFiles(str(directory), values, directory, distributed=True)
    if request.kept is not None:
        source.close()
        files = with_kept_layers(files, request.kept)  # raises the error
    return _interpret(source, NATIVE, files, request)


def _open_hf(path: str, request: Request) -> Checkpoint:
    """Open a Hugging Face directory, a model of `modelcenter list`, a Hub id, or ModelCenter's and Megatron's files."""
    files = resolve(path, request.options, config=request.config)
    if request.kept is not None:
        files = with_kept_layers(in_hf_form(files), request.kept)
    renamed = in_hf_form(replace(files, prefix=request.prefix, ignore=request.ignore))
    if renamed.legacy is not None:  # the prefix and ignored tensors are removed already
        return _interpret(open_hf_source(renamed), HUB, renamed, replace(request, prefix="", ignore=()))
    if request.prefix or request.ignore:  # interpreted under its own names
        assert files.weights is not None
        del renamed  # so that a file that can only be read whole is not in memory twice
        source = open_weight_files(files.weights)
        if request.kept is not None:
            keep_layers(source, files, request.kept, request.prefix)
        return _interpret(source, HUB, files, request)
    return _interpret(open_hf_source(renamed), HUB, files, request)


# -- matching tensors with the architecture ---------------------------------------------------------------------------


def _interpret(source: TensorSource, side: int, files: ModelFiles, request: Request) -> Checkpoint:
    """Match the tensors of a source with its architecture, and check that all exist with the right shapes.

    Raises:
        ValueError: tensors are missing, unknown, quantised or of the wrong shape (all are listed), or the config is not
            understood.
    """
    try:
        return _match_source(source, side, files, request)
    except ValueError as error:
        source.close()
        origin = files.origin
        raise ValueError(str(error) if str(error).startswith(origin) else f"{origin}: {error}") from error
    except BaseException:
        source.close()
        raise


def _match_source(source: TensorSource, side: int, files: ModelFiles, request: Request) -> Checkpoint:
    """Match the tensors of an open source with its architecture. Raises ValueError if they do not fit."""
    spec = find_spec(files.config, None, files.origin)
    arch: ArchMap = spec.arch_map()
    find = _sidecar(files, request.options).file
    if STANFORD_CLASS in (files.config.get("architectures") or ()):
        raise ValueError(
            f"its class {STANFORD_CLASS} is Stanford's, which stores the projection and the settings elsewhere; use "
            f"modelcenter.from_pretrained({files.origin!r}).save_pretrained(DST) to write the usual files"
        )
    described = described_task(find, arch) if files.legacy is None else None
    dense = dense_steps(described, find)
    named_task = described if dense else None  # the class in the config has no dense layers
    if dense and side == HUB:
        assert isinstance(source, FileSource)
        add_dense_weights(source, dense, find)
    absent: dict[str, str] = getattr(source, "absent", {})  # listed by an index, but in no file
    ignored = ignored_names(request.ignore, [*source.tensors, *absent])
    kept = _without_prefix([name for name in source.tensors if name not in set(ignored)], request.prefix)
    shapes = {short: tuple(source.tensors[name].shape) for short, name in kept.items()}
    overrides = dict(arch.infer_config(files.config, shapes)) if arch.infer_config is not None and side == HUB else {}
    if named_task is not None:
        overrides[FIELDS[named_task]] = stored_fields(named_task, find)

    @functools.cache
    def blueprint(task: str) -> Blueprint:
        return make_blueprint(spec, task, files.config, overrides, files.origin)

    def compile_task(task: str) -> Layout:
        return blueprint(task).layout

    compile_whole = contents_of_hub if side == HUB else contents_of_native
    if named_task is not None:
        check_dense_inputs(named_task, find, blueprint(named_task).model)
    whole = compile_whole(arch, compile_task, shapes, files.config.get("architectures"), named_task)
    # The config of ModelCenter's files names no class.
    heads = {} if files.legacy is not None else whole.absent_heads
    if heads and not dense and described is not None:
        bare = {**files.config, "architectures": [arch.tasks[described].hf_class]}
        if bare != files.config:
            return _match_source(source, side, replace(files, config=bare), request)
    heads = {part: [request.prefix + name for name in names] for part, names in heads.items()}
    check_patterns(request.ignore, [*source.tensors, *absent, *itertools.chain(*heads.values())])
    absent_heads = {p: names for p, names in heads.items() if not _is_ignored(arch, p, names, ignored, request)}
    for name in absent:
        if name not in ignored and _is_needed(arch, compile_task, whole, name.removeprefix(request.prefix)):
            raise ValueError(absent[name])
    _check(arch, whole, side, shapes)
    refuse_quantised((kept[short], source.tensors[kept[short]].dtype) for short in whole.found.values())
    names = {name: kept[short] for name, short in whole.found.items()}
    whole.repeats = [(kept[short], key) for short, key in whole.repeats]
    whole.dropped = [kept[short] for short in whole.dropped]
    config = blueprint(whole.task).config
    return Checkpoint(source, side, files, arch, config, whole, names, ignored, absent_heads, request.options)


def _is_ignored(arch: ArchMap, part: str, names: Sequence[str], ignored: Sequence[str], request: Request) -> bool:
    """Whether the user leaves a part out: with patterns that match all of `names`, or existing tensors of the part."""
    if len(ignored_names(request.ignore, names)) == len(names):
        return True
    return any(belongs_to_part(arch, part, to_key(arch, name.removeprefix(request.prefix))) for name in ignored)


def _without_prefix(names: Sequence[str], prefix: str) -> dict[str, str]:
    """{name without the prefix: name}."""
    if prefix and not any(name.startswith(prefix) for name in names):
        raise ValueError(f"--prefix: no tensor name begins with {prefix!r}; the names are {', '.join(names[:5])}, ...")
    short = {name.removeprefix(prefix): name for name in names}
    if len(short) < len(names):
        raise ValueError(f"--prefix: without {prefix!r} two tensors have the same name")
    return short


def _is_needed(arch: ArchMap, compile_task: CompileTask, whole: CheckpointContents, name: str) -> bool:
    """Whether a missing tensor of this name would hold values that nothing else in the checkpoint holds."""
    for task, entry in arch.tasks.items():
        if task == whole.task or any(belongs_to_part(arch, part, to_key(arch, name)) for part in entry.parts):
            key = represented_key(arch, layout := compile_task(task), name)
            if key in layout.shapes:
                return key not in whole.found
    return False


def _check(arch: ArchMap, whole: CheckpointContents, side: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    layout = whole.layout
    expected = layout.shapes if side == HUB else layout.native_shapes
    if whole.unknown:
        where = dict.fromkeys(whole.unknown, "the checkpoint")
        raise ValueError(unknown_message(arch, layout, Match(unknown=whole.unknown), where))
    missing = missing_keys(whole, side)
    if missing:
        shown = [f"  {layout.written[n] if side == HUB else n!r} of shape {expected[n]}" for n in missing[:20]]
        raise ValueError(f"{len(missing)} tensors are missing:\n" + "\n".join(shown))
    wrong = [(n, short) for n, short in whole.found.items() if shapes[short] != expected[n]]
    if wrong:
        lines = [f"  {short!r} has shape {shapes[short]}, expected {expected[n]}" for n, short in wrong[:20]]
        raise ValueError(f"{len(wrong)} tensors of the wrong shape:\n" + "\n".join(lines))


def _common_pattern(names: Sequence[str]) -> str:
    """A shell pattern that matches these names."""
    return names[0] if len(names) == 1 else f"{os.path.commonprefix(names)}*"


def _same_values(source: Any, first: str, second: str) -> bool:
    """Whether two tensors are equal in shape, and in value (NaN equals NaN; -0 equals 0), read in chunks."""
    x, y = source.tensors[first], source.tensors[second]
    if tuple(x.shape) != tuple(y.shape):
        return False
    for box in chunks(full_box(tuple(x.shape)), CHUNK_BYTES // x.dtype.itemsize):
        left, right = source.read(first, box), source.read(second, box)
        if not torch.allclose(left, right.to(left.dtype), rtol=0, atol=0, equal_nan=True):
            return False
    return True

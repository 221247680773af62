"""A checkpoint of any kind, opened for conversion: named tensors that are read by boxes, and what they mean.

`OPENERS` is the list of kinds. Each opener is given the path and the request, and returns an `Opened` for what it
knows, None for anything else; the first that answers is taken.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from engine import checkpoint
from modelcenter.config import ModelConfig
from modelcenter.convert.match import Match, names_of_part, to_key, unknown_message
from modelcenter.convert.pieces import HUB, NATIVE, Box, Piece
from modelcenter.convert.rules import ArchMap, Layout, compile_layout
from modelcenter.convert.whole import Compile, Whole, ignored_names, missing_keys, whole_of_hub, whole_of_native
from modelcenter.hub.files.dcp import StoredSource, refuse_adapter
from modelcenter.hub.files.names import CONFIG_FILE, MANIFEST_FILE
from modelcenter.hub.files.reader import open_checkpoint, refuse_quantised
from modelcenter.hub.legacy import in_hf_form, open_source
from modelcenter.hub.load import find_spec, needed_key, on_meta, read_config
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import read_json, resolve
from modelcenter.hub.sidecar import Beside

SIDES = {HUB: "hf", NATIVE: "distributed"}


class TensorInfo(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class WeightSource(Protocol):
    """A convert.stream.Source that says what it holds. Reading must be safe in a forked process."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def position(self, name: str) -> tuple[str, int]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def cost(self, name: str, box: Box) -> int: ...
    def read(self, name: str, box: Box | None = None, out: torch.Tensor | None = None) -> torch.Tensor: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Request:
    """What the user said about a source.

    Attributes:
        config: a name, directory or JSON file whose config.json to take in place of the checkpoint's.
        prefix: what precedes the names in the file and is no part of them ("module.").
        ignore: shell patterns of tensors to leave out.
    """

    config: str | None = None
    prefix: str = ""
    ignore: tuple[str, ...] = ()
    options: HubOptions = field(default_factory=HubOptions)


@dataclass
class Opened:
    """A checkpoint: its tensors and their meaning. A context manager.

    Attributes:
        source: its tensors under the names it has.
        side: whose names those are after `names`: HUB or NATIVE. names: layout name -> name in `source`.
        origin, repo, revision: where it comes from. directory: of its other files, if it has one.
        values: its config.json. arch, config, whole: see ArchMap, ModelConfig and Whole.
        left_out: tensors that the user ignored.
    """

    source: Any
    side: int
    origin: str
    values: dict[str, Any]
    arch: ArchMap
    whole: Whole
    config: ModelConfig
    names: dict[str, str]
    directory: Path | None = None
    repo: str | None = None
    revision: str | None = None
    left_out: list[str] = field(default_factory=list)
    options: HubOptions = field(default_factory=HubOptions)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.close()

    @functools.cached_property
    def beside(self) -> Beside:
        """The files that lie beside the weights, such as the tokenizer's."""
        return Beside(self.directory, self.repo, replace(self.options, revision=self.revision))

    @property
    def layout(self) -> Layout:
        return self.whole.layout

    def keys(self) -> list[str]:
        """The hub keys that this checkpoint fills."""
        if self.side == HUB:
            return [key for key in self.layout.shapes if key in self.names]
        return [key for key in self.layout.shapes if all(n in self.names for n in self.layout.natives(key))]

    def natives(self) -> list[str]:
        """The parameters that this checkpoint fills."""
        if self.side == NATIVE:
            return [name for name in self.layout.native_shapes if name in self.names]
        filled = {name for key in self.keys() for name in self.layout.natives(key)}
        lacks = {n for key in self.layout.shapes if key not in self.names for n in self.layout.natives(key)}
        return [name for name in self.layout.native_shapes if name in filled and name not in lacks]

    def pieces(self, side: int, name: str) -> list[Piece]:
        """The pieces of a tensor of either side."""
        return self.layout.pieces[name] if side == HUB else self._by_native[name]

    @functools.cached_property
    def _by_native(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {name: [] for name in self.layout.native_shapes}
        for piece in self.layout.all_pieces():
            found[piece.names[NATIVE]].append(piece)
        return found

    def stored_as(self, side: int, name: str) -> list[str]:
        """The names in `source` of what a tensor of either side consists of."""
        if side == self.side:
            return [self.names[name]]
        return list(dict.fromkeys(self.names[piece.names[1 - side]] for piece in self.pieces(side, name)))


Opener = Callable[[str, Request], Opened | None]


def interpret(
    source: Any,
    side: int,
    values: Mapping[str, Any],
    origin: str,
    request: Request,
    *,
    arch: ArchMap | None = None,
    directory: Path | None = None,
    repo: str | None = None,
    revision: str | None = None,
) -> Opened:
    """Find what the tensors of a source mean, and check that they are all there with the right shapes.

    Args:
        values: config.json. arch: rules in place of the architecture's own, for files of another tool.

    Raises:
        ValueError: tensors are missing, unknown, misshapen or quantised; the config is not understood. All are listed.
    """
    try:
        return _interpret(source, side, dict(values), origin, request, arch, directory, repo, revision)
    except ValueError as error:
        source.close()
        raise ValueError(str(error) if str(error).startswith(origin) else f"{origin}: {error}") from error
    except BaseException:
        source.close()
        raise


def _interpret(
    source: Any,
    side: int,
    values: dict[str, Any],
    origin: str,
    request: Request,
    arch: ArchMap | None,
    directory: Path | None,
    repo: str | None,
    revision: str | None,
) -> Opened:
    spec = find_spec(values, None, origin)
    arch = arch or spec.arch_map()
    absent: dict[str, str] = getattr(source, "absent", {})  # the kinds that openers add need not have an index
    left_out = ignored_names(request.ignore, [*source.tensors, *absent])
    there = _unprefixed([name for name in source.tensors if name not in set(left_out)], request.prefix)
    shapes = {short: tuple(source.tensors[name].shape) for short, name in there.items()}
    overrides = dict(arch.settle(values, shapes)) if arch.settle is not None and side == HUB else {}
    configs: dict[str, ModelConfig] = {}

    @functools.cache
    def compile_task(task: str) -> Layout:
        configs[task] = read_config(spec, arch, values, task, overrides, origin)
        model = on_meta(spec, configs[task], task)
        return compile_layout(arch, task, configs[task], {n: tuple(p.shape) for n, p in model.named_parameters()})

    architectures = values.get("architectures")
    if side == HUB:
        whole = whole_of_hub(arch, compile_task, shapes, architectures)
    else:
        whole = whole_of_native(arch, compile_task, shapes, architectures)
    for name in absent:
        if name not in left_out and _is_needed(arch, compile_task, whole, name.removeprefix(request.prefix)):
            raise ValueError(absent[name])
    _check(arch, whole, side, shapes)
    refuse_quantised((there[short], source.tensors[there[short]].dtype) for short in whole.found.values())
    names = {name: there[short] for name, short in whole.found.items()}
    whole.repeats = [(there[short], key) for short, key in whole.repeats]
    whole.dropped = [there[short] for short in whole.dropped]
    return Opened(
        source, side, origin, values, arch, whole, configs[whole.task], names, directory, repo, revision, left_out,
        request.options,
    )  # fmt: skip


def _unprefixed(names: Sequence[str], prefix: str) -> dict[str, str]:
    """Name without the prefix -> name."""
    if prefix and not any(name.startswith(prefix) for name in names):
        raise ValueError(f"--prefix: no tensor begins with {prefix!r}; they are {', '.join(names[:5])}, ...")
    short = {name.removeprefix(prefix): name for name in names}
    if len(short) < len(names):
        raise ValueError(f"--prefix: without {prefix!r} two tensors have one name")
    return short


def _is_needed(arch: ArchMap, compile_task: Compile, whole: Whole, name: str) -> bool:
    """Whether a tensor of this name, which is not there, would be one that nothing else in the checkpoint holds."""
    for task, entry in arch.tasks.items():
        if task == whole.task or any(names_of_part(arch, part, to_key(arch, name)) for part in entry.parts):
            key = needed_key(arch, layout := compile_task(task), name)
            if key in layout.shapes:
                return key not in whole.found
    return False


def _check(arch: ArchMap, whole: Whole, side: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    layout = whole.layout
    expected = layout.shapes if side == HUB else layout.native_shapes
    if whole.unknown:
        text = unknown_message(
            arch, layout, Match(unknown=whole.unknown), dict.fromkeys(whole.unknown, "the checkpoint")
        )
        raise ValueError(text.replace("strict=False tolerates them", "--ignore GLOB leaves them out"))
    missing = missing_keys(whole, side)
    if missing:
        shown = [f"  {layout.written[n] if side == HUB else n!r} of shape {expected[n]}" for n in missing[:20]]
        raise ValueError(f"{len(missing)} tensors are missing:\n" + "\n".join(shown))
    wrong = [(n, short) for n, short in whole.found.items() if shapes[short] != expected[n]]
    if wrong:
        lines = [f"  {short!r} has shape {shapes[short]}, expected {expected[n]}" for n, short in wrong[:20]]
        raise ValueError(f"{len(wrong)} tensors of the wrong shape:\n" + "\n".join(lines))


# -- kinds of checkpoints --------------------------------------------------------------------------------------------


def _config_of(request: Request) -> dict[str, Any] | None:
    """The config.json that the user named."""
    if request.config is None:
        return None
    path = Path(request.config).expanduser()
    if path.is_file():
        return read_json(path)
    return resolve(request.config, request.options, weights=False).config


def open_distributed(path: str, request: Request) -> Opened | None:
    """A distributed checkpoint, of a model or of training."""
    directory = Path(path).expanduser()
    if not (directory / MANIFEST_FILE).is_file():
        return None
    checkpoint.check_manifest(directory)
    values = _config_of(request)
    if values is None:
        if not (directory / CONFIG_FILE).is_file():
            raise ValueError(f"{directory} has no {CONFIG_FILE}; say with --config NAME|FILE of which model it is")
        values = read_json(directory / CONFIG_FILE)
    source = StoredSource(directory)
    refuse_adapter(source.tensors, directory)
    return interpret(source, NATIVE, values, str(directory), request, directory=directory)


def open_hub(path: str, request: Request) -> Opened | None:
    """A Hugging Face directory, a model of `modelcenter list` or a Hub id; ModelCenter's and Megatron's files."""
    found = resolve(path, request.options, config=request.config)
    old = in_hf_form(replace(found, prefix=request.prefix, ignore=request.ignore))
    if old.legacy is not None:  # its names are taken apart already
        found, source, request = old, open_source(old), replace(request, prefix="", ignore=())
    elif request.prefix or request.ignore:  # interpreted with the names it has
        assert found.weights is not None
        del old  # a file that can only be read whole is not held twice
        source = open_checkpoint(found.weights)
    else:
        source = open_source(old)
    return interpret(
        source, HUB, found.config, found.origin, request,
        directory=found.directory, repo=found.repo, revision=found.revision,
    )  # fmt: skip


OPENERS: list[Opener] = [open_distributed, open_hub]


def open_any(path: Any, request: Request | None = None) -> Opened:
    """Open a checkpoint of any kind, or the last one of a training run.

    Raises:
        ValueError: there is nothing that can be read; it is damaged; tensors are missing, unknown or misshapen.
    """
    request = request or Request()
    place = str(find_step(path, None))
    for opener in OPENERS:
        found = opener(place, request)
        if found is not None:
            return found
    raise AssertionError("open_hub answers or raises")


def find_step(path: Any, step: str | None) -> Any:
    """What to read of a training run's folder: its final model, else its last checkpoint; or the step that is named.

    Args:
        step: a number, "best" or "last"; None: as above. A path that is no run is returned as it is.

    Raises:
        ValueError: there is no such step.
    """
    folder = Path(str(path)).expanduser()
    if (other := checkpoint.named_checkpoint(folder)) != folder:
        path = folder = other
    steps = next((p for p in (folder / "checkpoints", folder) if _is_steps(p)), None)
    if step is None:
        if (folder / MANIFEST_FILE).is_file() or (folder / CONFIG_FILE).is_file():
            return path
        if (folder / "model" / CONFIG_FILE).is_file():
            return folder / "model"
        if steps is None:
            return path
        step = "last"
    if steps is None:
        raise ValueError(f"--step {step}: {folder} holds no checkpoints/step-...")
    name = f"step-{int(step):08d}" if step.isdigit() else step
    found = checkpoint.named_checkpoint(steps / name)
    if not (found / MANIFEST_FILE).is_file():
        if name == "last":
            latest = checkpoint.latest_checkpoint(steps)
            if latest is not None:
                return latest
        held = ", ".join(sorted(p.name for p in steps.iterdir() if not p.name.startswith("."))) or "nothing"
        raise ValueError(f"--step {step}: {steps} holds no complete checkpoint of that name; it holds {held}")
    return found.resolve()


def _is_steps(folder: Path) -> bool:
    return folder.is_dir() and any(p.is_dir() for p in folder.glob("step-*"))

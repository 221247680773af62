"""Reading checkpoints of ModelCenter as files in Hugging Face's form: names, shapes, dtypes, and boxes read lazily.

All access to the weight files of a checkpoint goes through `open_hf_source`. Tensors get their Hugging Face names,
whatever the names in the files. Only requested boxes are read, and nothing in a pickle is executed.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from modelcenter import registry
from modelcenter.convert.legacy.megatron import is_megatron, merge_ranks
from modelcenter.convert.legacy.recognise import NETWORKS, find_network, has_legacy_names, legacy_prefix
from modelcenter.convert.legacy.translation import TranslatedTensor, hf_config, translate_tensors
from modelcenter.convert.pieces import HUB, NATIVE, Box, bounds, full_box, restrict, view
from modelcenter.hub.files.reader import FileSource, TensorInfo
from modelcenter.hub.files.weight_files import open_weight_files
from modelcenter.hub.kept_layers import keep_layers
from modelcenter.hub.resolve import ModelFiles
from modelcenter.registry import ARCHITECTURES


class LegacySource(FileSource):
    """The tensors of a ModelCenter checkpoint in Hugging Face's form (convert.stream.Source)."""

    def __init__(self, base: FileSource, translated: Mapping[str, TranslatedTensor]):
        tensors = {}
        for name, entry in translated.items():
            first = base.tensors[entry.pieces[0].names[HUB]]
            tensors[name] = TensorInfo(first.file, first.offset, first.dtype, entry.shape, ())
        super().__init__(tensors)
        self._base, self._translated = base, translated

    def close(self) -> None:
        self._base.close()

    @property
    def bytes_read(self) -> int:
        return self._base.bytes_read

    def cost(self, name: str, box: Box) -> int:
        """The number of bytes of the file that reading the box requires."""
        parts = [part for piece in self._translated[name].pieces for part in restrict(piece, NATIVE, box)]
        return sum(self._base.cost(part.names[HUB], bounds(part, HUB)) for part in parts)

    def read(self, name: str, box: Box | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """A box of a tensor (all of it by default) as a contiguous CPU tensor; into `out` if given."""
        entry = self._translated[name]
        box = full_box(entry.shape) if box is None else box
        if entry.plain_source is not None:
            return self._base.read(entry.plain_source, box, out)
        if out is None:
            out = torch.empty([high - low for low, high in box], dtype=self.dtype(name))
        shaped, origin = out.view([high - low for low, high in box]), [low for low, _ in box]
        for piece in entry.pieces:
            for part in restrict(piece, NATIVE, box):
                region = bounds(part, HUB)
                values = view(self._base.read(part.names[HUB], region), part, HUB, [low for low, _ in region])
                if entry.factor != 1:
                    values = (values.float() * entry.factor).to(shaped.dtype)
                view(shaped, part, NATIVE, origin).copy_(values)
        return out


def open_hf_source(files: ModelFiles) -> FileSource:
    """Open a checkpoint's weights, with names in Hugging Face's form (see `in_hf_form`); reads headers.

    Raises:
        ValueError: as open_weight_files; or a ModelCenter checkpoint that transformers' architecture cannot express.
    """
    base = _open(files)
    entry = files.legacy
    if entry is None:
        if files.kept is not None:
            base = base if files.opened is None else base.copy()  # copied, because several readers may open it
            keep_layers(base, files, files.kept)
        return base
    try:
        shapes = {name: info.shape for name, info in base.tensors.items()}
        if is_megatron(shapes):
            translated, duplicates = merge_ranks(shapes)
        else:
            translated, duplicates = translate_tensors(entry, files.config, shapes)
        for name, other in duplicates:
            if not torch.equal(base.read(name), base.read(other)):
                raise ValueError(
                    f"{name!r} and {other!r} differ: training separated them, but {entry.model_type} has a single "
                    "tensor for both, so this checkpoint cannot be converted"
                )
    except ValueError as error:
        base.close()
        raise ValueError(f"{files.origin}: {error}") from error
    return LegacySource(base, translated)


def in_hf_form(files: ModelFiles, model_type: str | None = None) -> ModelFiles:
    """The files with their config.json in Hugging Face's form, and `legacy` set if they are ModelCenter's.

    Args:
        model_type: the architecture that the caller expects.

    Raises:
        ValueError: the network or config of a ModelCenter checkpoint is not understood.
    """
    kind = files.config.get("model_type")
    if not isinstance(kind, str | None):
        return files  # architecture.find_spec refuses it
    if kind in ARCHITECTURES:  # two may share a model_type
        kind = registry.get(kind, files.config.get("architectures")).model_type
    readable = {name for entry in NETWORKS for name in entry.model_types}
    if files.weights is None or (kind is not None and kind not in readable):
        return files
    of_transformers = files.weights.suffix in (".safetensors", ".json")
    if kind is not None and of_transformers:  # no need to open it
        return files
    with _open(files) as source:
        shapes = {name: info.shape for name, info in source.tensors.items()}
        if source.is_loaded:
            files = replace(files, opened=source)
        if not (has_legacy_names(shapes) or is_megatron(shapes)):
            if kind is None and (prefix := legacy_prefix(shapes)):
                raise ValueError(
                    f"{files.origin}: a checkpoint of ModelCenter whose names begin with {prefix!r}; pass it: "
                    f"prefix={prefix!r} in from_pretrained, --prefix {prefix} in convert"
                )
            return files
    try:
        entry = find_network(files.config, shapes, kind or model_type)
        # A config.json that names an architecture is in Hugging Face's form already, unless it says "dim_model".
        if kind is None or "dim_model" in files.config:
            return replace(files, legacy=entry, config=hf_config(entry, files.config, kind or model_type))
    except ValueError as error:
        raise ValueError(f"{files.origin}: {error}") from error
    return replace(files, legacy=entry)


def _open(files: ModelFiles) -> FileSource:
    """Open the files with their own names, without the tensors and the prefix that the caller excludes."""
    assert files.weights is not None
    if files.opened is not None:
        return files.opened
    source = open_weight_files(files.weights)
    if files.prefix or files.ignore:
        source.rename(_names([*source.tensors, *source.absent], files.prefix, files.ignore))
    return source


def _names(names: Iterable[str], prefix: str, ignore: Iterable[str]) -> dict[str, str]:
    """{name in the file: name without the prefix}, without names that match a pattern to ignore in either form."""
    kept: dict[str, str] = {}
    for name in names:
        short = name.removeprefix(prefix)
        if not any(fnmatch.fnmatchcase(n, pattern) for n in (name, short) for pattern in ignore):
            kept[name] = short
    if prefix and not any(old != new for old, new in kept.items()):
        raise ValueError(f"prefix: no tensor of the file starts with {prefix!r}; it holds {', '.join(kept)[:200]}")
    if len(set(kept.values())) != len(kept):
        twice = sorted(n for n in kept.values() if list(kept.values()).count(n) > 1)
        raise ValueError(f"prefix {prefix!r}: without it two tensors of the file are called {twice[0]!r}")
    return kept

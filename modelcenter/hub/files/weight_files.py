"""Opening the weights of a checkpoint: a single file, the shards of an index, or one file of each Megatron rank."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from modelcenter.convert.legacy.megatron import is_megatron
from modelcenter.hub.files.links import refuse_broken_link
from modelcenter.hub.files.reader import FileSource, TensorInfo
from modelcenter.hub.files.safetensors import safetensors_header
from modelcenter.hub.files.torch_pickle import pickle_tensors
from modelcenter.hub.files.weight_index import MEGATRON_FIRST_PART, MEGATRON_PARTS, index_files


def open_weight_files(weights: Path) -> FileSource:
    """Open a weight file, or the files that an index lists (find_weights), and check them; reads only headers.

    Raises:
        ValueError: a file is missing, truncated or malformed, or two hold the same tensor.
    """
    if weights.name == MEGATRON_FIRST_PART:
        parts = sorted(weights.parent.glob(MEGATRON_PARTS))
        source = _open_megatron_parts(parts)
        if len(parts) == 1 and not is_megatron({name: info.shape for name, info in source.tensors.items()}):
            source.rename({name: name.removeprefix("0:") for name in source.tensors})  # DeepSpeed's, for any model
        return source
    if weights.suffix == ".json":
        return _open_shards(weights)
    tensors, loaded = _read_headers([weights])
    return FileSource(tensors[weights], loaded)


def _open_shards(index: Path) -> FileSource:
    entries = index_files(index)
    files = [index.parent / name for name in sorted(set(entries.values()))]
    for path in files:
        refuse_broken_link(path)
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ValueError(f"{index} lists {len(files)} files, but {len(absent)} are missing: {', '.join(absent)}")
    shards, loaded = _read_headers(files)
    tensors, lacking = {}, {}
    for name, file in entries.items():
        shard = shards[index.parent / file]
        if name in shard:
            tensors[name] = shard[name]
        else:  # the Hub's own converter copied indices, but left duplicates of tied tensors out of the shards
            lacking[name] = f"{index} says that {file} holds tensor {name!r}, but it does not"
    # transformers takes only the file names from an index, and loads all tensors of each; of duplicates the last wins.
    for path, shard in shards.items():
        for name in sorted(shard.keys() - lacking.keys()):
            if tensors.setdefault(name, shard[name]) is not shard[name]:
                raise ValueError(
                    f"tensor {name!r} is in {tensors[name].file.name} and in {path.name}, which {index} lists; "
                    "transformers takes the last. Remove one of them, or save the model again"
                )
    return FileSource(tensors, loaded, lacking)


def _open_megatron_parts(files: Sequence[Path]) -> FileSource:
    """Open the files of ranks, with the rank before each name: "2:word_embeds.weight" (convert.legacy.megatron joins
    them)."""
    tensors: dict[str, TensorInfo] = {}
    loaded: dict[str, torch.Tensor] = {}
    for path in files:
        rank = int(path.name.split("_")[2])
        found, whole_tensors = pickle_tensors(path)
        tensors |= {f"{rank}:{name}": info for name, info in found.items()}
        loaded |= {f"{rank}:{name}": tensor for name, tensor in whole_tensors.items()}
    return FileSource(tensors, loaded)


def add_folder(source: FileSource, folder: str, weights: Path) -> dict[str, tuple[int, ...]]:
    """Add the tensors of a weight file in a folder to those of a source, under "folder/name".

    Returns:
        {name in the file: shape}.

    Raises:
        ValueError: the file is truncated or malformed.
    """
    refuse_broken_link(weights)
    found, loaded = _read_headers([weights])
    tensors = found[weights]
    source.add(
        {f"{folder}/{name}": info for name, info in tensors.items()},
        {f"{folder}/{name}": tensor for name, tensor in loaded.items()},
    )
    return {name: tuple(info.shape) for name, info in tensors.items()}


def _read_headers(files: Iterable[Path]) -> tuple[dict[Path, dict[str, TensorInfo]], dict[str, torch.Tensor]]:
    found, loaded = {}, {}
    for path in files:
        if path.suffix == ".safetensors":
            found[path] = safetensors_header(path)[0]
        else:
            found[path], whole_tensors = pickle_tensors(path)
            loaded.update(whole_tensors)
    return found, loaded

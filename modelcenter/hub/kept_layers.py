"""A checkpoint of which some layers are taken: what its config.json says then, and which tensors it holds."""

from dataclasses import replace

import torch

from modelcenter import registry
from modelcenter.convert.kept_layers import KeptLayers, config_of_kept, names_of_kept
from modelcenter.convert.match import to_key
from modelcenter.convert.rules import ArchMap
from modelcenter.hub.architecture import find_spec
from modelcenter.hub.files.reader import FileSource, TensorInfo, row_major_strides
from modelcenter.hub.resolve import ModelFiles
from modelcenter.registry import model_type_of


def with_kept_layers(files: ModelFiles, kept: KeptLayers, architecture: str | None = None) -> ModelFiles:
    """The files of a checkpoint with these of its layers, as hub.legacy.open_hf_source opens them.

    Args:
        architecture: the model_type that the checkpoint must have.

    Raises:
        ValueError: no such layers, or layers of which none can be left out; the weights are in no files of
            transformers' form.
    """
    if files.distributed or files.legacy is not None:
        what = "a distributed checkpoint" if files.distributed else "a checkpoint of ModelCenter"
        raise ValueError(
            f"keep_layers: {files.origin} is {what}; `modelcenter convert --to hf` makes files of it first"
        )
    spec = find_spec(files.config, architecture, files.origin)
    arch: ArchMap = spec.arch_map()
    try:
        config = arch.config.read(files.config, spec.config_class())
        values = config_of_kept(arch, config, files.config, kept)
    except ValueError as error:
        raise ValueError(f"{files.origin}: {error}") from error
    return replace(files, config=values, kept=kept)


def keep_layers(source: FileSource, files: ModelFiles, kept: KeptLayers, prefix: str = "") -> None:
    """Leave in a source of hub tensors those of the layers that are kept, under the names that they have then.

    Args:
        files: as of with_kept_layers. prefix: of the names in the source, which is no part of them.

    Raises:
        ValueError: layers that are not alike.
    """
    arch: ArchMap = registry.get(model_type_of(files.config), files.config.get("architectures")).arch_map()
    whole = source.tensors
    for name in [name for name in whole if to_key(arch, name.removeprefix(prefix)) in arch.layer_columns]:
        _keep_columns(source, name, files, kept)
    source.rename(names_of_kept(arch, {**source.tensors, **source.absent}, kept, prefix))


def _keep_columns(source: FileSource, name: str, files: ModelFiles, kept: KeptLayers) -> None:
    """Of a tensor (1, layers * n), those columns that belong to layers which are kept."""
    info, numbers = source.tensors[name], kept.layers
    if numbers is None:
        return
    count = int(files.config["num_attention_heads"])
    columns = torch.tensor([number * count + head for number in numbers for head in range(count)])
    values = source.read(name)[:, columns].clone()
    shape = tuple(values.shape)
    place = TensorInfo(info.file, info.offset, info.dtype, shape, row_major_strides(shape))
    source.add({name: place}, {name: values})

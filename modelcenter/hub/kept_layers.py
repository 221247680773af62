"""Keeping only some layers of a checkpoint: the resulting config.json and tensors."""

from dataclasses import replace

import torch

from modelcenter import registry
from modelcenter.convert.kept_layers import KeptLayers, config_of_kept, names_of_kept
from modelcenter.convert.match import to_key
from modelcenter.convert.rules import ArchMap
from modelcenter.hub.architecture import find_spec
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.resolve import ModelFiles
from modelcenter.registry import model_type_of


def with_kept_layers(files: ModelFiles, kept: KeptLayers, architecture: str | None = None) -> ModelFiles:
    """The files of a checkpoint with only the kept layers, to be opened by hub.legacy.open_hf_source.

    Args:
        architecture: the model_type that the checkpoint must have.

    Raises:
        ValueError: a layer does not exist, the architecture does not allow leaving layers out, or the weights are not
            in files of transformers' form.
    """
    if files.distributed or files.legacy is not None:
        what = "a distributed checkpoint" if files.distributed else "a checkpoint of ModelCenter"
        raise ValueError(f"keep_layers: {files.origin} is {what}; convert it first with `modelcenter convert --to hf`")
    spec = find_spec(files.config, architecture, files.origin)
    arch: ArchMap = spec.arch_map()
    try:
        config = arch.config.read(files.config, spec.config_class())
        values = config_of_kept(arch, config, files.config, kept)
    except ValueError as error:
        raise ValueError(f"{files.origin}: {error}") from error
    return replace(files, config=values, kept=kept)


def keep_layers(source: FileSource, files: ModelFiles, kept: KeptLayers, prefix: str = "") -> None:
    """Remove the tensors of other layers from a source of hub tensors, and rename those of the kept layers.

    Args:
        files: as in with_kept_layers. prefix: of the names in the source, not part of hub names.

    Raises:
        ValueError: the layers differ in their tensors.
    """
    arch: ArchMap = registry.get(model_type_of(files.config), files.config.get("architectures")).arch_map()
    whole = source.tensors
    for name in [name for name in whole if to_key(arch, name.removeprefix(prefix)) in arch.layer_columns]:
        _keep_columns(source, name, files, kept)
    source.rename(names_of_kept(arch, {**source.tensors, **source.absent}, kept, prefix))


def _keep_columns(source: FileSource, name: str, files: ModelFiles, kept: KeptLayers) -> None:
    """Keep the columns of a tensor (1, layers * n) that belong to kept layers."""
    numbers = kept.layers
    if numbers is None:
        return
    count = int(files.config["num_attention_heads"])
    columns = torch.tensor([number * count + head for number in numbers for head in range(count)])
    source.hold(name, source.read(name)[:, columns].clone(), of=name)

"""Finding the files of a model from a directory, one of our names, or a Hub id."""

import functools
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter._paths import nearest_beside
from modelcenter.convert.kept_layers import KeptLayers
from modelcenter.convert.legacy.translation import LegacyNetwork
from modelcenter.hub.files.adapter_files import describe_adapter
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.links import refuse_broken_link
from modelcenter.hub.files.names import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    GENERATOR_FILE,
    MANIFEST_FILE,
)
from modelcenter.hub.files.weight_index import find_weights
from modelcenter.hub.remote.download import (
    HubOptions,
    download_config,
    download_file,
    download_weights,
    from_hub_or_cache,
)
from modelcenter.registry import model_type_of, own_preset, preset

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_FILE_SUFFIXES = (*WEIGHT_SUFFIXES, ".json")


@dataclass(frozen=True)
class ModelFiles:
    """A model's files.

    Attributes:
        name: as given by the user. repo, revision: the Hub repository and commit; None for a directory.
        directory: of its files; None for a preset whose files were not requested.
        config: content of config.json.
        weights: the weight file or index; None for a distributed checkpoint, or if not requested.
        distributed: whether `directory` is a distributed checkpoint.
        prefix: a prefix to remove from the names in the weight file. ignore: fnmatch patterns of tensors to skip.
        legacy: the ModelCenter network to which the weights belong (hub.legacy.in_hf_form).
        kept: the layers to keep, which `config` describes; None: all.
        opened: the weight file, if it could only be read whole and has been (hub.files.reader.FileSource).
    """

    name: str
    config: dict[str, Any]
    directory: Path | None = None
    repo: str | None = None
    revision: str | None = None
    weights: Path | None = None
    distributed: bool = False
    prefix: str = ""
    ignore: tuple[str, ...] = ()
    legacy: LegacyNetwork | None = None
    kept: KeptLayers | None = None
    opened: Any = None

    @property
    def origin(self) -> str:
        """The repository with its commit, or the directory."""
        return str(self.directory or self.name) if self.repo is None else f"{self.repo}@{self.revision or 'main'}"


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a config.json. If it has no model_type, as MiniCPM's, that of its `architectures` is added."""
    values = read_json(path)
    kind = model_type_of(values)
    return values if kind is None else values | {"model_type": kind}


def repo_of(name: str) -> tuple[str, str | None]:
    """The Hub id of a name, and its pinned revision, if any; an unknown name is returned unchanged.

    Raises:
        ValueError: the preset has no published weights.
    """
    try:
        entry = preset(name)
    except KeyError:
        return name, None
    if entry.get("hub") is None:
        if entry.get("parameters") is None:
            raise ValueError(
                f"weights and sizes of {name!r} were never published; name a directory with its config.json and weights"
            )
        raise ValueError(
            f"{name!r} is a preset without weights: modelcenter.from_config({name!r}) initialises it at random, as "
            "--from_scratch does in training"
        )
    return entry["hub"], entry.get("revision")


def is_hub_id(name: str) -> bool:
    """Whether a name may be a Hub id: there is no such local file, and it does not look like a path or a file."""
    like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((*_FILE_SUFFIXES, "/"))
    return not like_a_path and not Path(name).exists()


def local_directory(name: str) -> Path | None:
    """The path of `name`, if it is a checkpoint directory.

    Raises:
        ValueError: it is a path, but not of a checkpoint directory of one model, or a link to a missing file.
    """
    path = Path(expanduser(name))
    refuse_broken_link(path)
    if path.is_dir():
        refuse_broken_link(path / CONFIG_FILE)
        refuse_two_models(path)
        if (path / CONFIG_FILE).is_file() or (path / MANIFEST_FILE).is_file():
            return path
        if own_preset(name) is not None:
            return None
        raise ValueError(_why_no_checkpoint(path))
    if path.is_file() and own_preset(name) is None:
        if path.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            raise ValueError(f"{path} is a weight file; expected its directory: {path.parent}")
        raise ValueError(
            f"{path} is a file; give the directory that holds {CONFIG_FILE} and the weights, or a weight file "
            f"({', '.join(WEIGHT_SUFFIXES)})"
        )
    if not path.exists():
        # If put_in_place cannot exchange names, nothing has this name for a moment.
        for old in path.parent.glob(f".{glob.escape(path.name)}.replaced-*"):
            raise ValueError(
                f"no such directory: {path}. A save that was replacing it was killed; {old} is the old directory: "
                "rename it, or save there again"
            )
        if is_hub_id(name):
            return None
        kind = "file" if name.endswith(_FILE_SUFFIXES) else "directory"
        raise ValueError(f"no such {kind}: {path}.{nearest_beside(path)}")
    return None


def refuse_two_models(directory: Path) -> None:
    """Raise ValueError for a checkpoint of replaced token detection, which holds a generator and a discriminator."""
    if (directory / GENERATOR_FILE).is_file() and (directory / MANIFEST_FILE).is_file():
        raise ValueError(
            f"{directory} is a checkpoint of replaced token detection, which holds two models; `modelcenter export "
            f"{directory} DST` makes a Hugging Face directory of each"
        )


def _why_no_checkpoint(directory: Path) -> str:
    """For a message: what a directory is or contains instead of a checkpoint."""
    adapter = directory / ADAPTER_CONFIG_FILE
    if adapter.is_file():
        return f"{directory} is {describe_adapter(adapter)}"
    inner = next((path.parent for path in sorted(directory.glob("*/" + CONFIG_FILE))), None)
    if inner is None and (adapter := directory / "adapter" / ADAPTER_CONFIG_FILE).is_file():  # of a 4-bit run
        return f"{adapter.parent} is {describe_adapter(adapter)}"
    hint = f" Did you mean {str(inner)!r}?" if inner is not None else ""
    return f"{directory} is a directory without {CONFIG_FILE}, so not a checkpoint.{hint}"


def given_fields(config: Any) -> dict[str, Any] | None:
    """The fields of a mapping, a ModelConfig or a config of transformers; None: it is a name or a path."""
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    return to_dict() if callable(to_dict) and not isinstance(config, type) else None


def read_config(config: Any, options: HubOptions | None = None) -> dict[str, Any]:
    """The caller's config for a bare weight file: as in given_fields, or a JSON file, directory, name or Hub id."""
    if (fields := given_fields(config)) is not None:
        return fields
    path = Path(expanduser(name_of(config)))
    return read_model_config(path) if path.is_file() else resolve(config, options, weights=False).config


def resolve_file(path: Path, config: Any = None, options: HubOptions | None = None) -> ModelFiles:
    """A single weight file, or an index of shards, with the caller's config or the config.json in its folder.

    Raises:
        ValueError: there is neither.
    """
    beside = path.parent / CONFIG_FILE
    if config is None and not beside.is_file():
        raise ValueError(
            f"there is no {CONFIG_FILE} next to the file {path}; pass config=, the name of a model or a JSON file"
        )
    values = read_model_config(beside) if config is None else read_config(config, options)
    return ModelFiles(str(path), values, path.parent, weights=path)


def name_of(name_or_path: Any) -> str:
    """The name or path of a model as a string. Raises ValueError for another type."""
    name = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(name, str):
        raise ValueError(f"got {name_or_path!r:.80}, expected a name or the path of a model, as a str or Path")
    return name


def resolve(
    name_or_path: Any, options: HubOptions | None = None, *, weights: bool = True, config: Any = None
) -> ModelFiles:
    """Find a model's files, downloading what is needed and not cached.

    Args:
        name_or_path: a directory, a weight file, a name of `list_models`, or a Hub id.
        weights: False: its config only.
        config: used instead of the config.json in a local directory or next to a local file (read_config).

    Raises:
        ValueError: there is no such model (the message suggests the nearest names), or files are missing.
    """
    name, options = name_of(name_or_path), options or HubOptions()
    path = Path(expanduser(name))
    if weights and path.is_file() and path.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
        return resolve_file(path, config, options)
    if config is not None and path.is_dir():
        distributed = (path / MANIFEST_FILE).is_file()
        weight_file = None if distributed else find_weights(path)
        return ModelFiles(name, read_config(config, options), path, weights=weight_file, distributed=distributed)
    if config is not None:
        local_directory(name)  # reports what is wrong with a file that is not a weight file
        raise ValueError(f"config: {name!r} is not a local file or directory; it has its own config, so leave it out")
    directory = local_directory(name)
    if directory is not None:
        distributed = (directory / MANIFEST_FILE).is_file()
        if not (directory / CONFIG_FILE).is_file():
            raise ValueError(
                f"{directory} is a distributed checkpoint without {CONFIG_FILE}; pass config=, the name of a model or "
                "a JSON file"
            )
        weight_file = None
        if weights and not distributed:
            weight_file = find_weights(directory)
        return ModelFiles(
            name, read_model_config(directory / CONFIG_FILE), directory, weights=weight_file, distributed=distributed
        )
    if not weights and (entry := own_preset(name)) is not None:
        return ModelFiles(name, entry["config"], repo=entry.get("hub"))
    repo, pinned = repo_of(name)
    options = replace(options, revision=options.revision or pinned)
    return from_hub_or_cache(repo, functools.partial(_resolve_repo, name, repo, weights), options)


def _resolve_repo(name: str, repo: str, weights: bool, options: HubOptions) -> ModelFiles:
    file = download_config(repo, options)
    commit = file.parent.name  # snapshots/<commit>/config.json: all files come from one commit
    options = replace(options, revision=commit)
    held = download_weights(repo, options) if weights else None
    if weights:
        download_file(repo, GENERATION_FILE, options)  # many have none
    return ModelFiles(name, read_model_config(file), file.parent, repo, commit, held)

"""Describing a model and the memory it needs without loading it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter import registry
from modelcenter.convert.config_map import names_of_numbers
from modelcenter.hub.files.cross_encoder_files import (
    activation_path,
    is_cross_encoder,
    stored_score_tokens,
    with_stored_activation,
)
from modelcenter.hub.files.described_tasks import FIELDS, dense_steps, described_task, settings_over
from modelcenter.hub.files.embedding_files import DenseStep, FindFile, beside
from modelcenter.hub.files.names import CONFIG_FILE, MANIFEST_FILE
from modelcenter.hub.info.config_fields import config_fields, our_names
from modelcenter.hub.info.head_counts import linear_size
from modelcenter.hub.info.memory import PRECISIONS, inference_bytes, training_bytes
from modelcenter.hub.info.parameter_counts import body_sizes, idle_parameters, task_sizes
from modelcenter.hub.info.stored_files import cached_files, describe_files, newest_snapshot
from modelcenter.hub.remote.download import HubOptions, download_config, is_offline
from modelcenter.hub.resolve import local_directory, read_model_config, repo_of
from modelcenter.registry import ARCHITECTURES, preset

_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes of a parameter in inference
_SHOWN = (
    *("hidden_size", "num_layers", "num_decoder_layers", "num_heads", "num_kv_heads", "vocab_size", "max_positions"),
    *("num_experts", "experts_per_token"),
)


def model_info(name: str, options: HubOptions | None = None, gpus: int = 8) -> dict[str, Any]:
    """Everything that `modelcenter info NAME --json` prints.

    Args:
        name: a name of `list_models`, a Hub id, a Hugging Face directory, a run's folder or a distributed checkpoint.
            For a Hub id without a preset, config.json is read from the cache or the Hub.
        gpus: over which the ZeRO levels shard.

    Raises:
        ValueError: the name is not found, a file cannot be read, or gpus is below 1.
    """
    options = options or HubOptions()
    if gpus < 1:
        raise ValueError(f"gpus: got {gpus}, expected at least 1")
    folder = Path(expanduser(name))
    if (folder / "config.yaml").is_file() and (folder / "model" / CONFIG_FILE).is_file():
        name = str(folder / "model")  # a run
    location, config, weights = _locate(name, options)
    described = _describe_config(config, weights)
    stored = None if weights is None else describe_files(weights, config)
    # A preset with unpublished sizes can be sized only from the config.json of a user's directory.
    known = location.get("confirmed") is not False or "hidden_size" in described["sizes"]
    dense = sum(described.get(field, {}).get("dense_parameters", 0) for field in FIELDS.values())
    counts = _count(config, described["task"], stored, known, dense)
    memory = _memory(counts["components"], _unit_count(config, described["sizes"]), gpus)
    return {"name": name, **location, **described, "stored": stored, **counts, "memory": memory}


def _locate(name: str, options: HubOptions) -> tuple[dict[str, Any], dict[str, Any], Path | None]:
    """The location of a model, as reported; its config.json; and the directory of its weights, if it is local."""
    directory = local_directory(name)
    if directory is not None:
        distributed = (directory / MANIFEST_FILE).is_file()
        source = "distributed checkpoint" if distributed else "directory"
        return {"source": source}, read_model_config(directory / CONFIG_FILE), directory
    entry = None if options.revision is not None else _preset(name)
    location: dict[str, Any]
    if entry is not None:
        repo, config = entry.get("hub"), entry["config"]
        location = {
            "source": "preset",
            "hub": repo,
            "confirmed": bool(entry.get("confirmed")),
            "revision": entry.get("revision"),
        }
    else:
        repo, pinned = repo_of(name)
        options = replace(options, revision=options.revision or pinned)
        path = download_config(repo, options)
        config = read_model_config(path)
        location = {"source": "hub", "hub": repo, "revision": path.parent.name}
    if repo is None:
        return location, config, None
    cached = cached_files(repo, options)
    return {**location, "cached": cached, "offline": is_offline(options)}, config, newest_snapshot(cached)


def _preset(name: str) -> dict[str, Any] | None:
    try:
        return preset(name)
    except KeyError:
        return None


def _describe_config(config: Mapping[str, Any], directory: Path | None) -> dict[str, Any]:
    kind = config.get("model_type")
    described: dict[str, Any] = {
        "model_type": kind,
        "architectures": config.get("architectures"),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "unknown").removeprefix("torch."),
    }
    if str(kind) in ARCHITECTURES:
        arch = registry.get(str(kind), config.get("architectures")).arch_map()
        ours = our_names(config, arch)
        described["task"] = arch.declared_task(config.get("architectures"))
        described["tasks"] = list(arch.tasks)
        if directory is not None and (task := described_task(beside(directory), arch)) is not None:
            described |= {"task": task, FIELDS[task]: _describe_vectors(task, directory)}
        elif directory is not None and stored_score_tokens(beside(directory)):
            described["task"] = "sequence-classification"
        if (
            described["task"] == "sequence-classification"
            and (activation := _activation(config, directory)) is not None
        ):
            described["activation"] = activation
        described["sizes"] = {key: ours[key] for key in _SHOWN if key in ours}
    else:
        described |= {"task": None, "tasks": [], "sizes": {}}
    labels = config.get("id2label") or names_of_numbers(config)
    if labels:
        described["labels"] = list(labels.values()) if isinstance(labels, dict) else list(labels)
    return described


def _describe_vectors(task: str, directory: Path) -> dict[str, Any]:
    """The embeddings of a task as the files describe them, and the parameters of its dense layers; or why they are not
    supported."""
    find = beside(directory)
    try:
        steps = dense_steps(task, find)
        return {**settings_over(task, find, None).to_dict(), "dense_parameters": sum(map(_size, steps))}
    except ValueError as error:
        return {"unsupported": str(error)}


def _size(step: DenseStep) -> int:
    """The number of parameters of a dense layer."""
    of = step.settings
    residual = of.residual and step.inputs != of.width
    return linear_size(step.inputs, of.width, of.bias) + residual * linear_size(step.inputs, of.width, False)


def _activation(config: Mapping[str, Any], directory: Path | None) -> str | None:
    """The function from a reranker's output to its score; None if the model is not a reranker."""
    find: FindFile = (lambda name: None) if directory is None else beside(directory)
    if not is_cross_encoder(config, find):
        return None
    return (activation_path(with_stored_activation(config, find)) or "Sigmoid").rpartition(".")[2].lower()


def _count(
    config: Mapping[str, Any], task: str | None, stored: Mapping[str, Any] | None, known: bool, dense: int
) -> dict[str, Any]:
    """Parameters by component: from the headers of the files if they can be read, else computed from the config.

    Args:
        known: whether the config gives the sizes of the model. dense: parameters of dense layers, which it does not
            describe.
    """
    bare = body_sizes(config) if known else None
    whole = task_sizes(config, task) if known else None
    if whole is not None and dense:
        whole["head"] = dense
    if stored is not None and stored["components"]:
        sizes, source = stored["components"], "files"
    elif whole is not None:
        sizes, source = whole, "config"
    else:
        sizes, source = bare, "config, without its head"
    idle = idle_parameters(config) if known else 0
    return {
        "active_parameters": None if sizes is None else sum(sizes.values()) - idle,
        "bare_parameters": None if bare is None else sum(bare.values()),
        "components": sizes,
        "counted_from": None if sizes is None else source,
        "parameters": None if sizes is None else sum(sizes.values()),
    }


def _unit_count(config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """The number of units that are gathered one by one; 0: everything is in the root, as for shared layers."""
    layers = sizes.get("num_layers", 1)
    if str(config.get("model_type")) in ARCHITECTURES:
        fields = config_fields(config)
        if fields.num_groups:  # groups of layers, each with its own parameters
            return layers * fields.group_layers if fields.num_groups == layers else 0
    return layers + sizes.get("num_decoder_layers", 0)


def _memory(components: Mapping[str, int] | None, layers: int, gpus: int) -> dict[str, Any] | None:
    if components is None:
        return None
    total = sum(components.values())
    return {
        "gpus": gpus,
        "training": {
            precision: {
                f"zero-{level}": training_bytes(components, layers, precision, level, gpus) for level in (0, 1, 2, 3)
            }
            for precision in PRECISIONS
        },
        "inference": {
            precision: {"whole": inference_bytes(total, width), "sharded": inference_bytes(total, width, gpus)}
            for precision, width in _WIDTHS.items()
        },
    }

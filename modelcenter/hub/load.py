"""Loading a model: build it on meta, allocate each rank's slices, and fill them from the files."""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

import engine
from engine.collectives import gather_objects
from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import GENERATION
from modelcenter.convert.kept_layers import KeptLayers
from modelcenter.hub.architecture import Blueprint, choose_task, find_spec, make_blueprint
from modelcenter.hub.dtypes import common_dtype, parse_dtype
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import ADAPTER_CONFIG_FILE, GENERATION_FILE
from modelcenter.hub.kept_layers import with_kept_layers
from modelcenter.hub.legacy import in_hf_form
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import ModelFiles, given_fields, name_of, resolve
from modelcenter.hub.score_tokens import token_numbers
from modelcenter.hub.sidecar import SidecarFiles
from modelcenter.hub.weights import Weights, blueprint_of, open_weights

log = logging.getLogger("modelcenter")


@dataclass
class LoadReport:
    """What happened to every tensor of a checkpoint; `str()` is one line.

    Attributes:
        source: repository and commit, or directory. directory: of its files. repo: the Hub id, if it has one.
        sidecar: the other files of the checkpoint, such as its tokenizer's.
        loaded: parameters filled from the files. initialised: parameters that the files lack, drawn with `seed`.
        skipped: tensors of other heads. ignored: tensors without content. unknown: tensors tolerated by strict=False.
        dtype: of the parameters. file_dtypes: those in the files.
        bytes_read: by this rank. seconds: wall time without downloads.
    """

    source: str
    directory: Path | None = None
    repo: str | None = None
    sidecar: SidecarFiles = field(default_factory=lambda: SidecarFiles(None), repr=False, compare=False)
    loaded: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    dtype: str = ""
    file_dtypes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} parameters loaded in {self.dtype} ({self.seconds:.1f} s)"]
        for what in ("initialised", "skipped", "ignored", "unknown"):
            names = getattr(self, what)
            if names:
                shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                parts.append(f"{len(names)} {what}: {shown}")
        return f"{self.source}: " + "; ".join(parts)


def load_model(
    name_or_path: str | os.PathLike[str],
    task: str | None = None,
    *,
    num_labels: int | None = None,
    id2label: Any = None,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    strict: bool = True,
    ignore_mismatched_sizes: bool = False,
    policy: Any = None,
    seed: int = 0,
    architecture: str | None = None,
    config: Any = None,
    prefix: str = "",
    ignore: str | Sequence[str] = (),
    adapter: Any = None,
    score_tokens: Sequence[str | int] | None = None,
    keep_layers: Sequence[int] | None = None,
    keep_decoder_layers: Sequence[int] | None = None,
    **config_overrides: Any,
) -> Any:
    """See modelcenter.from_pretrained, which documents the arguments.

    Args:
        architecture: the model_type that the checkpoint must have.
    """
    dtype = _requested_dtype(dtype, config_overrides.pop("torch_dtype", None))
    architecture = architecture or config_overrides.pop("model_type", None)
    adapters = _adapter_list(adapter)
    options = HubOptions(revision, token, cache_dir, local_files_only)
    sharded = policy is not False and engine.is_initialized()
    files = _find_checkpoint(name_or_path, options, config, prefix, ignore, architecture, sharded)
    if (kept := KeptLayers.of(keep_layers, keep_decoder_layers)) is not None:
        files = with_kept_layers(files, kept, architecture)
    began = time.perf_counter()
    generation = _taken_generation(config_overrides)
    sidecar = SidecarFiles(files.directory, files.repo, replace(options, revision=files.revision))
    overrides = _with_labels(config_overrides, num_labels, id2label)
    words: tuple[int, ...] = ()
    if score_tokens is not None:
        hub = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        words = token_numbers(score_tokens, name_or_path, **hub)
    blueprint = blueprint_of(files, task, architecture, overrides, sidecar.file, words)
    model = blueprint.model
    if files.directory is not None and (files.directory / GENERATION_FILE).is_file():
        tokens = {name: value for name, value in config_overrides.items() if name.endswith("_token_id")}
        model.generation_config = read_json(files.directory / GENERATION_FILE) | tokens  # generate reads these first
    model.set_generation_defaults(generation)
    model.base_name, model.base_revision = files.repo or str(files.directory or files.origin), files.revision
    with open_weights(files, blueprint, sidecar.file) as weights:
        weights.check(strict, ignore_mismatched_sizes, head_requested=task is not None)
        parameter_dtype = parse_dtype(dtype) or common_dtype(weights.dtypes(), files.config)
        buffers = blueprint.layout.buffer_names  # these already have their values
        drawn = [name for name in weights.fresh if name not in buffers]
        _place(model, parameter_dtype, policy, adapters, drawn)
        weights.fill(model)
        fresh = [name for name in _without_saved(drawn, model) if name not in model.constants]
    if drawn:  # values that no file has
        engine.init.init_parameters_(model, seed, drawn)
    _start(model, policy, adapters, seed)
    report = _report(files, sidecar, blueprint, weights, fresh, time.perf_counter() - began)
    model.load_report = report
    _log_report(report, adapters)
    return model.eval()


def build_model(
    config: Any,
    task: str | None = None,
    *,
    seed: int = 0,
    num_labels: int | None = None,
    id2label: Any = None,
    dtype: str | torch.dtype | None = None,
    policy: Any = None,
    architecture: str | None = None,
    adapter: Any = None,
    **config_overrides: Any,
) -> Any:
    """See modelcenter.from_config. architecture: the model_type that the config must have."""
    dtype = _requested_dtype(dtype, config_overrides.pop("torch_dtype", None))
    architecture = architecture or config_overrides.pop("model_type", None)
    adapters = _adapter_list(adapter)
    generation = _taken_generation(config_overrides)
    overrides = _with_labels(config_overrides, num_labels, id2label)
    values, origin = _config_values(config)
    identity = {"model_type": config.model_type} if isinstance(config, ModelConfig) else values
    spec = find_spec(identity, architecture, origin)
    tasks = spec.arch_map().tasks
    usual = "base" if "base" in tasks else next(iter(tasks))
    chosen = choose_task(spec.arch_map(), task or usual, values, "the config")
    model = make_blueprint(spec, chosen, values, overrides, "the config").model
    model.set_generation_defaults(generation)
    _place(model, parse_dtype(dtype) or torch.float32, policy, adapters)
    engine.init.init_parameters_(model, seed)
    _start(model, policy, adapters, seed)
    return model.eval()


# -- arguments -------------------------------------------------------------------------------------------------------


def _requested_dtype(dtype: str | torch.dtype | None, old: str | torch.dtype | None) -> str | torch.dtype | None:
    """The dtype of the parameters. Raises ValueError if torch_dtype, its name in transformers 4, differs."""
    if old is not None and dtype is not None and parse_dtype(old) != parse_dtype(dtype):
        raise ValueError(f"dtype is {dtype!r} but torch_dtype, its old name, is {old!r}; give one")
    return old if dtype is None else dtype


def _taken_generation(overrides: dict[str, Any]) -> dict[str, Any]:
    """Remove the generation settings from the overrides and return them."""
    return {name: overrides.pop(name) for name in [*overrides] if name in GENERATION and overrides[name] is not None}


def _with_labels(overrides: Mapping[str, Any], num_labels: int | None, id2label: Any) -> dict[str, Any]:
    labels = {"num_labels": num_labels, "id2label": id2label}
    return {**overrides, **{name: value for name, value in labels.items() if value is not None}}


def _adapter_list(adapter: Any) -> list[Any]:
    """The adapters as a list. Raises ValueError for anything else, such as the path of an adapter."""
    given = list(adapter) if isinstance(adapter, list | tuple) else [] if adapter is None else [adapter]
    for each in given:
        if not hasattr(each, "attach"):
            raise ValueError(
                f"adapter: got {each!r:.80}, expected Lora(...), PromptTuning(...) or Freeze(...); load a saved one "
                "with modelcenter.adapters.load_lora or load_prompt"
            )
    return given


def _config_values(config: Any) -> tuple[Mapping[str, Any], str]:
    """The fields of the config given to build_model, and their origin for messages."""
    if (fields := given_fields(config)) is not None:
        return fields, "the config"
    name = name_of(config)
    if name.endswith(".json"):
        return read_json(Path(expanduser(name))), name
    return resolve(name, weights=False).config, name


# -- steps -----------------------------------------------------------------------------------------------------------


def _find_checkpoint(
    name_or_path: str | os.PathLike[str],
    options: HubOptions,
    config: Any,
    prefix: str,
    ignore: str | Sequence[str],
    architecture: str | None,
    sharded: bool,
) -> ModelFiles:
    """The files of a checkpoint, with its config in Hugging Face's form; the same commit on all ranks if sharded."""
    files = resolve(name_or_path, options, config=config)
    if sharded:
        check_same_commit(files.repo or files.name, files.revision)
    if prefix or ignore:
        if files.distributed:
            raise ValueError(f"{files.origin} is a distributed checkpoint: prefix and ignore are for weight files")
        files = replace(files, prefix=prefix, ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore))
    return in_hf_form(files, architecture)


def check_same_commit(name: str, commit: str | None) -> None:
    """Raise ValueError on all ranks if one found another commit of a repository than rank 0. Collective.

    A branch may move, and a node without a network uses its own cache. Each rank fills its slices from the commit that
    it found, so the model would mix several.
    """
    every = gather_objects(commit)
    other = next((rank for rank, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        raise ValueError(
            f"{name}: rank 0 found the commit {every[0]} but rank {other} {every[other]}; pass the one that all should "
            "load as the revision, and download it on every node (modelcenter download --revision)"
        )


def _place(model: Any, dtype: torch.dtype, policy: Any, adapters: Sequence[Any], fresh: Collection[str] = ()) -> None:
    """Attach adapters, shard by the policy, and allocate this rank's parameters."""
    model.to(dtype)
    for each in adapters:
        each.attach(model, fresh)
    if not _quantizes(adapters):
        _shard(model, policy)
    engine.materialize(model)


def _start(model: Any, policy: Any, adapters: Sequence[Any], seed: int) -> None:
    """Initialise adapters and quantise weights to 4 bits, which needs whole weights and so comes before `_shard`."""
    for each in adapters:
        each.start(model, seed)
    if _quantizes(adapters):
        _shard(model, policy)


def _quantizes(adapters: Sequence[Any]) -> bool:
    return any(getattr(each, "quantize", None) is not None for each in adapters)


def _shard(model: Any, policy: Any) -> None:
    if policy is not False and (policy is not None or engine.is_initialized()):
        engine.shard(model, policy=policy)


def _without_saved(fresh: Sequence[str], model: Any) -> list[str]:
    """The parameters that neither the checkpoint nor a saved adapter has."""
    values = None if model.adapter is None else model.adapter.initial
    return [name for name in fresh if values is None or name not in values.saved]


def _report(
    files: ModelFiles,
    sidecar: SidecarFiles,
    blueprint: Blueprint,
    weights: Weights,
    fresh: list[str],
    seconds: float,
) -> LoadReport:
    return LoadReport(
        files.origin,
        files.directory,
        files.repo,
        sidecar,
        loaded=[name for name in blueprint.layout.native_shapes if name not in fresh],
        initialised=fresh,
        skipped=weights.skipped,
        ignored=weights.ignored,
        unknown=weights.unknown,
        dtype=_dtype_name(next(blueprint.model.parameters()).dtype),
        file_dtypes=sorted(map(_dtype_name, weights.dtypes())),
        bytes_read=weights.bytes_read,
        seconds=seconds,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _log_report(report: LoadReport, adapters: Sequence[Any]) -> None:
    if engine.is_initialized() and engine.rank() != 0:
        return
    log.log(logging.WARNING if report.initialised or report.unknown else logging.INFO, "%s", report)
    beside = report.repo is None and report.directory is not None and (report.directory / ADAPTER_CONFIG_FILE).is_file()
    if beside and not any(getattr(each, "saved", None) for each in adapters):  # transformers would apply it
        log.warning(
            "%s: the directory also holds an adapter (%s), and the model is loaded without it; "
            "modelcenter.adapters.load_lora or load_prompt adds it",
            report.source,
            ADAPTER_CONFIG_FILE,
        )

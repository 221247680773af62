"""Load a model: build it on meta, give each rank memory for its own slices, and fill those from the files."""

import functools
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import engine
from modelcenter.config import ModelConfig
from modelcenter.convert.match import Match, match_names, shape_errors, to_key, unknown_message
from modelcenter.convert.rules import ArchMap, Layout, compile_layout
from modelcenter.convert.stream import fill_targets
from modelcenter.hub.files.names import GENERATION_FILE
from modelcenter.hub.files.reader import FileSource, reading_threads, refuse_quantised
from modelcenter.hub.legacy import in_hf_form, open_source
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import Resolved, read_json, resolve
from modelcenter.hub.sidecar import Beside
from modelcenter.hub.weights import StoredModel
from modelcenter.registry import ARCHITECTURES, ArchSpec, get, model_type_of, nearest

log = logging.getLogger("modelcenter")

_DTYPES = {
    "fp32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass
class LoadReport:
    """What became of every tensor; `str()` is one line.

    Attributes:
        source: repository and commit, or directory. directory: where its files lie. repo: the Hub id, if it has one.
        beside: the other files of the checkpoint, such as its tokenizer's.
        loaded: parameters filled from the files. initialised: parameters that the files lack, drawn by `seed`.
        skipped: tensors of other heads. ignored: tensors without content. unknown: tensors tolerated by strict=False.
        dtype: of the parameters. file_dtypes: those found.
        bytes_read: by this rank. seconds: wall time, downloads apart.
    """

    source: str
    directory: Path | None = None
    repo: str | None = None
    beside: Beside = field(default_factory=lambda: Beside(None), repr=False, compare=False)
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


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating dtype from torch's or its short name; None and "auto" are None.

    Raises:
        ValueError: no floating dtype of that name.
    """
    if dtype is None or dtype == "auto":
        return None
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype).removeprefix("torch."))
    if found not in _DTYPES.values():
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(_DTYPES)}, or None: as the file says")
    return found


def load_model(
    name_or_path: Any,
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
    **config_overrides: Any,
) -> Any:
    """Load a pretrained model, in eval mode. `model.load_report` says what became of every tensor.

    Args:
        name_or_path: a name of `list_models`, a Hub id, a Hugging Face directory, a distributed checkpoint, a directory
            of ModelCenter's (config.json and pytorch_model.pt), or a weight file.
        task: one of registry.TASKS; None: the head that the checkpoint's `architectures` names. A head that is named
            here and missing in the files is initialised by `seed`.
        num_labels, id2label: outputs of a classification head, and their names.
        dtype: of the parameters; None: as the files hold them. torch_dtype is its old name.
        strict: False tolerates tensors that the architecture does not know.
        ignore_mismatched_sizes: tensors of heads whose shapes differ are initialised instead.
        policy: an engine.Policy; None: as engine.init_distributed said, a plain module without it; False: plain always.
        architecture: the model_type that the checkpoint must have.
        config: of a weight file that has no config.json beside it: a name, a JSON file or a dictionary.
        prefix: what to take off the names in the weight file ("bert." of a wrapped model).
        ignore: patterns of names in it to pass over ("dense.*").
        adapter: what to put in before the model is sharded (modelcenter.adapters: Lora, Freeze, ...), or a list.
        config_overrides: fields of the config, in our names or Hugging Face's; None drops a field of the file that is
            not understood, model_type says what a file is that does not.

    Raises:
        ValueError: no such model; a file is missing, truncated or malformed; a config field is not understood, or an
            override of one has no effect here; a tensor is missing, unknown or misshapen. The message lists them.
    """
    dtype = _dtype(dtype, config_overrides)
    architecture = architecture or config_overrides.pop("model_type", None)
    options = HubOptions(revision, token, cache_dir, local_files_only)
    found = resolve(name_or_path, options, config=config)
    if policy is not False and engine.is_initialized():
        same_commits(found.repo or found.name, found.revision)
    if prefix or ignore:
        if found.distributed:
            raise ValueError(f"{found.origin} is a distributed checkpoint: prefix and ignore are for weight files")
        found = replace(found, prefix=prefix, ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore))
    found = in_hf_form(found, architecture)
    start = time.perf_counter()
    spec = find_spec(found.config, architecture, found.origin)
    arch: ArchMap = spec.arch_map()
    overrides = _overrides(config_overrides, num_labels, id2label)
    chosen = task_of(arch, task, found.config, found.origin)
    if arch.settle is not None and found.weights is not None:
        with open_source(found) as source:
            overrides = {**arch.settle(found.config, source.tensors), **overrides}
    settings = read_config(spec, arch, found.config, chosen, overrides, found.origin)
    model = on_meta(spec, settings, chosen)
    layout = compile_layout(arch, chosen, settings, {n: tuple(p.shape) for n, p in model.named_parameters()})
    model.base_name, model.base_revision = found.repo or str(found.directory or found.origin), found.revision
    beside = Beside(found.directory, found.repo, replace(options, revision=found.revision))
    report = LoadReport(found.origin, found.directory, found.repo, beside)
    if found.distributed:
        stored = StoredModel(arch, layout, found, chosen)
        stored.check(strict, ignore_mismatched_sizes, task is not None)
        fresh = stored.fresh
        kept = parse_dtype(dtype) or _one_dtype(stored.dtypes(), found.config, report)
        _place(model, kept, policy, adapter, fresh)
        report.bytes_read = stored.fill(model)
        report.skipped, report.unknown = stored.skipped, stored.unknown
    else:
        assert found.weights is not None
        with open_source(found) as source:
            match = match_names(arch, layout, source.tensors, found.config.get("architectures"))
            check_match(arch, layout, match, source, found, strict, ignore_mismatched_sizes)
            fresh = fresh_tensors(arch, layout, match, found, task, chosen)
            dtypes = {source.dtype(name) for name in match.found.values()}
            kept = parse_dtype(dtype) or _one_dtype(dtypes, found.config, report)
            _place(model, kept, policy, adapter, fresh)
            fill_targets(layout, match, source, engine.local_slices(model), reading_threads())
            report.bytes_read = source.bytes_read
        report.skipped, report.ignored, report.unknown = match.skipped, match.ignored, match.unknown
    if fresh:
        engine.init.init_parameters_(model, seed, fresh)
    report.loaded = [name for name in layout.native_shapes if name not in fresh]
    report.initialised = fresh
    for each in _listed(adapter):
        each.start(model, seed)
    model.eval()
    report.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    report.seconds = time.perf_counter() - start
    model.load_report = report
    if found.directory is not None and (found.directory / GENERATION_FILE).is_file():
        model.generation_config = read_json(found.directory / GENERATION_FILE)
    if not engine.is_initialized() or engine.rank() == 0:
        log.log(logging.WARNING if report.initialised or report.unknown else logging.INFO, "%s", report)
        halves = report.dtype == "float16" or getattr(policy, "precision", None) == "fp16"
        if halves and model.exceeds_fp16:
            log.warning(
                "%s: the hidden states of published weights of this architecture exceed float16's range, which ends in "
                "NaN or in one token repeated; use bfloat16 or float32",
                found.origin,
            )
    return model


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
    """A model with random weights, in eval mode: bitwise the same on any number of ranks.

    Args:
        config: a ModelConfig, a dictionary or JSON file in Hugging Face's names or ours, or a name ("tiny/bert").
        task: one of registry.TASKS; None: "base", or where there is none the first.
        seed: of the weights. The rest: as load_model.

    Raises:
        ValueError: no such name, task or field.
    """
    dtype = _dtype(dtype, config_overrides)
    architecture = architecture or config_overrides.pop("model_type", None)
    overrides = _overrides(config_overrides, num_labels, id2label)
    if isinstance(config, ModelConfig):
        spec = find_spec({"model_type": config.model_type}, architecture, "the config")
        values: Mapping[str, Any] = config.to_dict()
    else:
        if isinstance(config, Mapping):
            values, origin = config, "the config"
        elif str(config).endswith(".json"):
            values, origin = read_json(Path(config).expanduser()), str(config)
        else:
            values, origin = resolve(config, weights=False).config, str(config)
        spec = find_spec(values, architecture, origin)
    arch: ArchMap = spec.arch_map()
    usual = "base" if "base" in arch.tasks else next(iter(arch.tasks))
    chosen = task_of(arch, task or usual, values, "the config")
    built = read_config(spec, arch, values, chosen, overrides, "the config")
    model = on_meta(spec, built, chosen)
    _place(model, parse_dtype(dtype) or torch.float32, policy, adapter)
    engine.init.init_parameters_(model, seed)
    for each in _listed(adapter):
        each.start(model, seed)
    return model.eval()


# -- steps -----------------------------------------------------------------------------------------------------------


def same_commits(name: str, commit: str | None) -> None:
    """Raise ValueError, on all ranks, if they found other commits of a repository than rank 0. Collective.

    A branch may move, and a node without network takes what its own cache has. Each rank fills its slices from what it
    found, so the model would be a mixture.
    """
    every = [commit] * engine.world_size()
    if engine.world_size() > 1:
        torch.distributed.all_gather_object(every, commit)
    other = next((rank for rank, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        raise ValueError(
            f"{name}: rank 0 found the commit {every[0]} and rank {other} {every[other]}; give one "
            "that all are to load as the revision, and download it on every node (modelcenter download --revision)"
        )


def find_spec(config: Mapping[str, Any], architecture: str | None, origin: str) -> ArchSpec:
    """The architecture that a config.json names. Raises ValueError: none, an unknown one, or not `architecture`."""
    kind = model_type_of(config) or architecture
    if kind is None:
        raise ValueError(
            f"{origin}: config.json names no model_type, and no class in its architectures that is known here; say it: "
            "model_type='bert' in from_pretrained, --model_config model_type=bert in training, or in config.json. "
            f"Known: {', '.join(ARCHITECTURES)}"
        )
    spec = (
        None if architecture is not None and str(kind) not in ARCHITECTURES else get(kind, config.get("architectures"))
    )
    if spec is None:
        raise ValueError(f"{origin} has the model_type {kind!r}, expected {architecture!r}; load it with its own class")
    if architecture not in (None, spec.model_type):
        held = repr(kind) if kind == spec.model_type else f"{kind!r} and is of {spec.model_type!r}"
        raise ValueError(f"{origin} has the model_type {held}, expected {architecture!r}; load it with its own class")
    return spec


def task_of(arch: ArchMap, task: str | None, config: Mapping[str, Any], origin: str) -> str:
    if task is not None:
        if task not in arch.tasks:
            close = nearest(task, arch.tasks)
            raise ValueError(f"task: got {task!r}, {arch.model_type} has {', '.join(arch.tasks)}.{close}")
        return task
    declared = arch.declared_task(config.get("architectures"))
    if declared is None:
        raise ValueError(
            f"{origin}: its architectures, {config.get('architectures')}, name no head that {arch.model_type} has "
            f"here; pass task=, one of {', '.join(arch.tasks)}, or name its class in the architectures of config.json"
        )
    return declared


def _dtype(dtype: str | torch.dtype | None, overrides: dict[str, Any]) -> str | torch.dtype | None:
    """The dtype of the parameters, which transformers 4 called torch_dtype. Raises ValueError: given twice."""
    old = overrides.pop("torch_dtype", None)
    if old is not None and dtype is not None and parse_dtype(old) != parse_dtype(dtype):
        raise ValueError(f"dtype is {dtype!r} and torch_dtype, its old name, {old!r}; give either")
    return old if dtype is None else dtype


def _overrides(given: dict[str, Any], num_labels: int | None, id2label: Any) -> dict[str, Any]:
    if num_labels is not None:
        given["num_labels"] = num_labels
    if id2label is not None:
        given["id2label"] = id2label
    return given


def read_config(
    spec: ArchSpec, arch: ArchMap, values: Mapping[str, Any], task: str, overrides: dict[str, Any], origin: str
) -> ModelConfig:
    """Our config of a config.json for a task. Raises ValueError: a field is not understood."""
    fixed = arch.tasks[task].labels
    if fixed is not None:
        overrides = {"num_labels": fixed, **overrides}
    try:
        return arch.config.read(values, spec.config_class(), overrides)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


class _NoInit(TorchFunctionMode):
    """Skips torch.nn.init: on meta it does nothing, but imports torch's compiler, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def on_meta(spec: ArchSpec, config: ModelConfig, task: str) -> Any:
    """A model without memory: names and shapes. Raises ValueError: sizes beyond what a tensor can have."""
    try:
        with torch.device("meta"), _NoInit():
            return spec.model_class()(config, task)
    except RuntimeError as error:
        raise ValueError(f"the sizes in the config make no {config.model_type}: {error}") from error


def _listed(adapter: Any) -> list[Any]:
    """The adapters as a list. Raises ValueError for what is none, such as the path of one."""
    given = list(adapter) if isinstance(adapter, list | tuple) else [] if adapter is None else [adapter]
    for each in given:
        if not hasattr(each, "attach"):
            raise ValueError(
                f"adapter: got {each!r:.80}, expected Lora(...), PromptTuning(...) or Freeze(...); a saved one is read "
                "by modelcenter.adapters.load_lora or load_prompt"
            )
    return given


def _place(model: Any, dtype: torch.dtype, policy: Any, adapter: Any = None, fresh: Collection[str] = ()) -> None:
    """Put adapters in, shard as the policy says and give this rank's parameters their memory."""
    model.to(dtype)
    for each in _listed(adapter):
        each.attach(model, fresh)
    if policy is not False and (policy is not None or engine.is_initialized()):
        engine.shard(model, policy=policy)
    engine.materialize(model)


def needed_key(arch: ArchMap, layout: Layout, name: str) -> str:
    """The key of the tensor that a name in a file stands for: of a repetition, that of what it repeats."""
    key = to_key(arch, name)
    key = layout.aliases.get(key, key)
    return layout.ties[key].to if key in layout.ties else key


def check_match(
    arch: ArchMap, layout: Layout, match: Match, source: FileSource, found: Resolved, strict: bool, ignore_sizes: bool
) -> None:
    """Raise for tensors that are unknown, misshapen, not floating, or only promised by an index; misshapen heads are
    set aside if allowed."""
    for name, error in source.absent.items():
        if needed_key(arch, layout, name) in match.missing:
            raise ValueError(error)
    files = {name: info.file.name for name, info in source.tensors.items()}
    if match.unknown and strict:
        raise ValueError(f"{found.origin}: {unknown_message(arch, layout, match, files)}")
    shapes = {name: info.shape for name, info in source.tensors.items()}
    wrong = shape_errors(layout, match, shapes)
    heads = [key for key in wrong if layout.key_part[key]]
    if ignore_sizes:
        for key in heads:
            match.resized.append(key)
            match.skipped.append(match.found.pop(key))
            del wrong[key]
    if wrong:
        lines = [
            f"  {match.found[key]!r} in {files[match.found[key]]} has shape {shape}, expected {expected} "
            f"({', '.join(layout.natives(key))})"
            for key, (shape, expected) in wrong.items()
        ]
        fix = ""
        if len(heads) == len(wrong):
            fix = "\nThey belong to the head: change num_labels, or pass ignore_mismatched_sizes=True to initialise it"
        raise ValueError(f"{found.origin}: {len(wrong)} of the wrong shape:\n" + "\n".join(lines[:20]) + fix)
    try:
        refuse_quantised((name, source.dtype(name)) for name in match.found.values())
    except ValueError as error:
        raise ValueError(f"{found.origin}: {error}") from None


def fresh_tensors(
    arch: ArchMap, layout: Layout, match: Match, found: Resolved, task: str | None, chosen: str
) -> list[str]:
    """The parameters to initialise because the files lack them.

    Args:
        task: that the caller named. chosen: it, or the one that the files declare.

    Raises:
        ValueError: one of them belongs to the body, to a head that the caller did not name, or to a head of which the
            files hold a part.
    """
    absent = [key for key in match.missing if key not in layout.optional]
    held = {layout.key_part[key] for key in match.found}
    errors = []
    for key in absent:
        if layout.key_part[key] in held | {""} or task is None:
            errors.append(f"  {layout.written[key]!r} of shape {layout.shapes[key]} ({', '.join(layout.natives(key))})")
    if errors:
        more = f"\n  and {len(errors) - 20} more" if len(errors) > 20 else ""
        fix = ""
        if task is None and all(layout.key_part[key] for key in absent):
            fix = f"\nThey belong to the head: pass task={chosen!r} to initialise it at random"
            if "base" in arch.tasks and not {layout.key_part[key] for key in absent} & set(arch.tasks["base"].parts):
                fix += ", or task='base' for the model without it"
        elif not any(not layout.key_part[key] for key in match.found):
            fix = "\nNo tensor of the body is there: are these the weights of another architecture?"
        files = found.weights.name if found.weights is not None else found.origin
        raise ValueError(f"{found.origin}: {len(errors)} missing in {files}:\n" + "\n".join(errors[:20]) + more + fix)
    fresh = {name for key in (*match.missing, *match.resized) for name in layout.natives(key)}
    return [name for name in layout.native_shapes if name in fresh]


def _one_dtype(dtypes: set[torch.dtype], config: Mapping[str, Any], report: LoadReport) -> torch.dtype:
    """What "as the files hold them" means: their one dtype; of several, the one config.json names, else the widest."""
    report.file_dtypes = sorted(str(d).removeprefix("torch.") for d in dtypes)
    if len(dtypes) == 1:
        return next(iter(dtypes))
    named = parse_dtype(config.get("dtype") or config.get("torch_dtype"))
    if named in dtypes:
        return named
    return functools.reduce(torch.promote_types, dtypes, torch.float16) if dtypes else torch.float32

"""Merging an adapter on disk into its base to get an ordinary checkpoint: `modelcenter export --adapter`."""

from collections.abc import Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter.adapters.load import AdapterFile
from modelcenter.adapters.lora import Lora, load_lora, merge_lora
from modelcenter.adapters.peft_format import PREFIX, TASK_TYPES
from modelcenter.adapters.state import materialize_adapter
from modelcenter.convert.match import to_key
from modelcenter.hub.architecture import Blueprint
from modelcenter.hub.files.atomic_directory import checked_target
from modelcenter.hub.files.described_tasks import FIELDS, described_task, stored_fields
from modelcenter.hub.files.names import TOKENIZER_CONFIG_FILE
from modelcenter.hub.files.occupied import refuse_occupied
from modelcenter.hub.legacy import in_hf_form
from modelcenter.hub.load import load_model
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import ModelFiles, is_hub_id, resolve
from modelcenter.hub.sidecar import SidecarFiles
from modelcenter.hub.tokenizer import load_tokenizer
from modelcenter.hub.weights import blueprint_of
from modelcenter.registry import own_preset

# peft's name of a task -> ours. Tasks that peft does not have, such as masked language modelling, have no name.
_TASKS = {named: task for task, named in TASK_TYPES.items() if task not in ("text-encoding", *FIELDS)}


def merge_adapter(
    base: Any,
    adapter: Any,
    target: Any,
    *,
    task: str | None = None,
    labels: Sequence[str] | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    config: Any = None,
    prefix: str = "",
    ignore: Sequence[str] = (),
    options: HubOptions | None = None,
) -> str:
    """Merge LoRA into a base and write the result as a Hugging Face directory, in one process.

    The head has as many classes as the adapter's, and the embedding table as many rows. Sums are computed in fp32 and
    rounded once.

    Args:
        base: anything that from_pretrained accepts. adapter: a directory in peft's format, or a Hub id.
        task: head of the model; None: the task that the adapter was trained for or, if it gives none, the base's own.
        labels: names of the classes of the adapter's head.
        dtype: of the written weights; None: that of the base.
        max_shard_size: as in save_pretrained. config, prefix, ignore: of the base, as in from_pretrained.
        options: of the Hub; the revision is the base's.

    Returns:
        A sentence about what was written.

    Raises:
        ValueError: the adapter is missing, cannot be merged or does not fit the base; the target cannot be written.
    """
    options, place = options or HubOptions(), checked_target(Path(str(target)))
    refuse_occupied(place)
    lora = load_lora(adapter, **_hub(replace(options, revision=None)))
    file: AdapterFile = lora.saved
    options = _as_trained_on(base, file, options)
    files = resolve(base, options, config=config)
    if files.directory is not None and files.directory.resolve() == place:
        raise ValueError(f"{place} is the base itself; name another directory")
    _refuse_merged(files, adapter)
    options = replace(options, revision=files.revision or options.revision)  # the branch may move in the meantime
    beside = _sidecar(adapter, file, replace(options, revision=None))
    described = described_task(beside.file)
    task = task or described or _TASKS.get(str(file.config.get("task_type")))
    # Not reading from `files` itself: a file that can only be read whole would be in memory twice.
    renamed = in_hf_form(replace(files, prefix=prefix, ignore=tuple(ignore)))
    blueprint = blueprint_of(renamed, task, find=SidecarFiles(files.directory, files.repo, options).file)
    del renamed
    sizes = _sizes(file, blueprint)
    model = _with_adapter(
        base,
        lora,
        sizes.get("vocab_size"),
        task=task,
        dtype=None if dtype is None else "float32",  # rounded once, to the written dtype
        ignore_mismatched_sizes="num_labels" in sizes,  # the adapter has the head
        config=config,
        prefix=prefix,
        ignore=ignore,
        **({FIELDS[described]: stored_fields(described, beside.file)} if described and task == described else {}),
        **_label_options(labels, blueprint, sizes.get("num_labels")),
        **_hub(options),
    )
    _check_complete(model, base, adapter)
    held = beside.tokenizer()  # may have added tokens or a chat template
    tokenizer = load_tokenizer(held[TOKENIZER_CONFIG_FILE].parent) if TOKENIZER_CONFIG_FILE in held else None
    merge_lora(model).save_pretrained(place, tokenizer=tokenizer, dtype=dtype, max_shard_size=max_shard_size)
    return f"{target}: {base} with the adapter {adapter}{_other_base(base, file, files)} merged"


def _refuse_merged(files: ModelFiles, adapter: Any) -> None:
    """Raise ValueError if the base is the model/ of the run whose adapter/ this is: it already has the updates."""
    if files.directory is None or files.directory.name != "model":
        return
    run = files.directory.resolve().parent
    if Path(expanduser(str(adapter))).resolve() == run / "adapter":
        raise ValueError(
            f"{files.directory} has {adapter} merged already; name the base that the adapter was trained on, or leave "
            f"--adapter out: `modelcenter export {run} DST` writes the merged model"
        )


def _as_trained_on(base: Any, file: AdapterFile, options: HubOptions) -> HubOptions:
    """The options with the base's commit on which the adapter was trained, if recorded and none is requested."""
    trained_on = file.config.get("base_model_name_or_path")
    if options.revision is None and is_hub_id(str(base)) and _repo(trained_on) == _repo(str(base)):
        return replace(options, revision=file.config.get("revision"))
    return options


def _with_adapter(base: Any, lora: Lora, rows: int | None, **options: Any) -> Any:
    """The base with the adapter attached; rows: of the adapter's embedding table, if the base's has another number."""
    model = load_model(base, policy=False, adapter=lora if rows is None else None, **options)
    if rows is not None:  # the adapter only fits a table of this size
        model.resize_token_embeddings(rows)
        lora.attach(model)
        materialize_adapter(model)
        lora.start(model)
    return model


def _check_complete(model: Any, base: Any, adapter: Any) -> None:
    """Raise ValueError for parameters that neither the base nor the adapter holds."""
    lacking = [name for name in model.load_report.initialised if name not in model.adapter.trained]
    if lacking:
        raise ValueError(
            f"{base} lacks {', '.join(lacking[:5])}, and {adapter} does not hold it either. Use the model that the "
            "adapter was trained on, or name a task for which the base has a head (--task)"
        )


def _other_base(base: Any, file: AdapterFile, files: ModelFiles) -> str:
    """A note on the model that the adapter was trained on, if it is not known to be the base."""
    trained_on = file.config.get("base_model_name_or_path")
    here = files.directory.resolve() if files.directory is not None and files.repo is None else None
    known = trained_on in (None, str(base)) or _repo(trained_on) == files.repo or Path(trained_on).resolve() == here
    return "" if known else f" (which was trained on {trained_on})"


def _repo(name: Any) -> Any:
    """The Hub id of one of our names; any other name unchanged."""
    entry = own_preset(name) if isinstance(name, str) else None
    return name if entry is None else entry.get("hub") or name


def _hub(options: HubOptions) -> dict[str, Any]:
    names = ("revision", "token", "cache_dir", "local_files_only")
    return {name: getattr(options, name) for name in names}


def _sizes(file: AdapterFile, blueprint: Blueprint) -> dict[str, int]:
    """The numbers of classes and of tokens in an adapter's tensors, if they differ from the base's."""
    layout, sizes = blueprint.layout, dict[str, int]()
    for name, tensor in file.tensors.items():
        key = to_key(blueprint.arch, name.removeprefix(PREFIX))
        shape = layout.shapes.get(layout.aliases.get(key, key))
        if shape is None or not tensor.dim() or tensor.shape[0] == shape[0] or tensor.shape[1:] != shape[1:]:
            continue
        for field in ("num_labels", "vocab_size"):
            if getattr(blueprint.config, field, None) == shape[0]:
                sizes[field] = tensor.shape[0]
    return sizes


def _label_options(labels: Sequence[str] | None, blueprint: Blueprint, count: int | None) -> dict[str, Any]:
    """Arguments of load_model for the classes of the head. Raises ValueError if it has none, or another number.

    Args:
        count: classes of the adapter's head, if not the base's number.
    """
    if labels is None:
        return {} if count is None else {"num_labels": count}
    task, expected = blueprint.task, blueprint.config.num_labels if count is None else count
    if not task.endswith("-classification"):
        raise ValueError(f"labels: the task {task} has no head with classes; leave them out, or name the task (--task)")
    if len(labels) != expected:
        raise ValueError(f"labels: got {len(labels)} names, but the head has {expected} classes")
    return {"id2label": list(labels)}


def _sidecar(adapter: Any, file: AdapterFile, options: HubOptions) -> SidecarFiles:
    """The other files that were saved with the adapter."""
    repo = str(adapter) if is_hub_id(str(adapter)) else None
    if repo is not None:
        options = replace(options, revision=file.directory.name)
    return SidecarFiles(file.directory, repo, options)

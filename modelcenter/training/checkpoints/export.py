"""Export of checkpoints of runs with low-rank updates, as a Hugging Face directory or as an adapter."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import modelcenter
from engine.checkpoint import check_manifest, load_model
from engine.names import clean_name
from modelcenter import registry
from modelcenter.adapters import merge_lora, save_adapter
from modelcenter.adapters.state import is_adapter
from modelcenter.hub.architecture import choose_task
from modelcenter.hub.files.atomic_directory import new_directory
from modelcenter.hub.files.dcp import DCPSource
from modelcenter.hub.files.described_tasks import FIELDS, stored_fields
from modelcenter.hub.files.embedding_files import beside
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import CONFIG_FILE, GENERATION_FILE, RUN_FILE, TOKENIZER_FILES
from modelcenter.hub.resolve import repo_of
from modelcenter.hub.tokenizer import load_tokenizer
from modelcenter.models.base import Model
from modelcenter.training.setup.model import make_adapters
from modelcenter.training.tasks import TASKS
from modelcenter.training.trained import check_leaves_model, how_to_merge


def has_adapter(path: Path) -> bool:
    """Whether a path is a checkpoint of a run with low-rank updates, or the output of such a run: model/, or adapter/
    if the weights are in 4 bits."""
    if (path / RUN_FILE).is_file():
        return json.loads((path / RUN_FILE).read_text(encoding="utf-8"))["flags"].get("lora_rank") is not None
    if path.name == "adapter":
        return (path.parent / "config.yaml").is_file()
    return (path.parent / "adapter").is_dir() and path.name == "model"


def export_adapter(path: Path, target: Path, keep: bool, idle: Sequence[str], **options: Any) -> str | None:
    """Write the model with its updates merged or, with `keep`, only the adapter, in peft's format. One process.

    Args:
        path: a checkpoint, or the model/ or adapter/ of a finished run.
        idle: flags that were given and have no effect here.
        options: of save_pretrained.

    Returns:
        A message that says what was written; None: the model of a finished run is merged already, and is converted like
        any other.

    Raises:
        ValueError: the weights are in 4 bits, with which an adapter cannot be merged; the target exists; flags would
            have no effect.
    """
    finished = not (path / RUN_FILE).is_file()
    if finished and not keep:
        if path.name == "adapter":
            check_leaves_model(path.parent)
        return None
    if idle:
        what = "the adapter is written unchanged" if keep else "its model is merged in memory instead of converted"
        raise ValueError(f"{idle[0]}: {path} comes from a run with an adapter; {what}. Leave {' and '.join(idle)} out")
    if finished:
        if target.exists():
            raise ValueError(f"{target} exists; give a new directory")
        with new_directory(target) as scratch:
            shutil.copytree(path.parent / "adapter", scratch, dirs_exist_ok=True)
        return f"{target}: the adapter of {path.parent}"
    run = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    quantize = run["flags"].get("quantize")
    if quantize is not None and not keep:
        raise ValueError(
            f"{path} comes from a run with weights in 4 bits ({quantize}), with which an adapter cannot be merged. "
            f"`modelcenter export {shlex.quote(str(path))} ADAPTER --keep_adapter` writes the adapter; then "
            + how_to_merge(run["flags"], run["task"], "ADAPTER")
        )
    model = _trained_model(path, run)
    has_tokenizer = any((path / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(path) if has_tokenizer else None
    if keep:
        save_adapter(model, target, tokenizer)
        return f"{target}: the adapter of {path}"
    merge_lora(model)
    model.save_pretrained(target, tokenizer=tokenizer, **options)
    return f"{target}: the model of {path} with its adapter merged"


def _trained_model(path: Path, run: Mapping[str, Any]) -> Model:
    """The model of a checkpoint, with its updates separate from the weights. If the run's weights were in 4 bits, the
    model's are random: only its adapter is used."""
    kind = TASKS[run["task"]].flags()
    known = {field.name for field in dataclasses.fields(kind)}  # another version may have had other flags
    known.discard("quantize")  # only the adapter is read
    cfg = kind(**{name: value for name, value in run["flags"].items() if name in known})
    values = read_json(path / CONFIG_FILE)
    arch = registry.get(registry.model_type_of(values), values.get("architectures")).arch_map()
    task = choose_task(arch, None, values, str(path), beside(path))  # one of the heads that the task may train
    described: dict[str, Any] = {FIELDS[task]: stored_fields(task, beside(path))} if task in FIELDS else {}
    model = modelcenter.from_config(
        values,
        task,
        # Only run.json lists the parameters that the run trained in full because the initial model lacked them.
        adapter=make_adapters(cfg, run.get("trained")),
        policy=False,
        dtype=values.get("dtype", "float32"),
        **described,
    )
    if not cfg.from_scratch:
        # The same name as in a finished run: the repository's, if the name is a preset.
        model.adapter.base = cfg.model if Path(str(cfg.model)).exists() else repo_of(str(cfg.model))[0]
        model.adapter.revision = cfg.revision
    if (path / GENERATION_FILE).is_file():
        model.generation_config = read_json(path / GENERATION_FILE)
    if run["flags"].get("quantize") is None:
        load_model(path, model)
    else:
        _load_adapter(path, model)
    return model


def _load_adapter(path: Path, model: Model) -> None:
    """Load the trained parameters of a run with weights in 4 bits, in their dtypes; the weights stay packed in
    checkpoints."""
    check_manifest(path)
    with DCPSource(path) as stored:
        for raw, parameter in model.named_parameters():
            name = clean_name(raw)
            if is_adapter(name) or name in model.adapter.trained:
                parameter.data = stored.read(name)

"""The files that a conversion writes other than weights: config, card, tokenizer, conversion.json, manifest.json."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import FORMAT_VERSION, hash_ranges
from modelcenter._version import __version__
from modelcenter.convert.rules import DENSE, PROJECTION
from modelcenter.hub.conversion.checkpoint import SIDES, Checkpoint
from modelcenter.hub.conversion.fill import file_parts
from modelcenter.hub.conversion.plan import Job, Plan
from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.names import CARD_FILE, CONFIG_FILE, CONVERSION_FILE, GENERATION_FILE, MANIFEST_FILE
from modelcenter.hub.resolve import ModelFiles
from modelcenter.registry import shipped_file


def write_model_files(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, keep_card: bool) -> None:
    """Write config.json and copy the source's sidecar files.

    Args:
        dtype: recorded as the dtype in which to load the target.
        keep_card: the target has a README.md of its own, so the source's is left out.
    """
    arch = checkpoint.arch
    hf_class = arch.tasks[checkpoint.whole.task].hf_class
    write_json(directory / CONFIG_FILE, arch.config.write(checkpoint.config, hf_class, _dtype_name(dtype)))
    for name in arch.files:
        shutil.copyfile(shipped_file(name), directory / Path(name).name)
    for name in (GENERATION_FILE, *(() if keep_card else (CARD_FILE,))):
        if (path := checkpoint.sidecar.file(name)) is not None:
            shutil.copyfile(path, directory / name)
    checkpoint.sidecar.copy_tokenizer(directory)
    dense = not {DENSE, PROJECTION}.isdisjoint(checkpoint.layout.key_parts.values())
    checkpoint.sidecar.copy_embedding_files(directory, dense)


def write_conversion_record(
    checkpoint: Checkpoint, plan: Plan, directory: Path, dtype: torch.dtype | None, hashes: Mapping[str, str]
) -> None:
    """Write conversion.json: the source, the versions, and the sha256 of each tensor.

    Args:
        dtype: requested by the user. hashes: name -> sha256 of the elements.
    """
    files, whole = checkpoint.files, checkpoint.whole
    tensors = {
        job.name: {
            "shape": list(job.shape),
            "dtype": _dtype_name(job.dtype),
            "sha256": hashes[job.name],
            "file": job.file,
        }
        for job in plan.jobs
    }
    write_json(
        directory / CONVERSION_FILE,
        {
            "format_version": 1,
            "tool": {"name": "modelcenter", "version": __version__, "torch": torch.__version__},
            "source": {
                "origin": _public_origin(files),
                "repository": files.repo,
                "revision": files.revision,
                "format": SIDES[checkpoint.side],
                "architectures": files.config.get("architectures"),
                **({} if files.kept is None else asdict(files.kept)),  # the layers' numbers in the source
            },
            "format": SIDES[plan.side],
            "model_type": checkpoint.arch.model_type,
            "task": whole.task,
            "dtype": None if dtype is None else _dtype_name(dtype),
            "further_heads": whole.further_heads,
            "dropped": whole.dropped,
            "ignored": checkpoint.ignored,
            "tied": dict(whole.repeats),
            "tensors": tensors,
        },
    )


def write_manifest(plan: Plan, directory: Path, hashes: Mapping[str, str]) -> None:
    """Write manifest.json from the hashes of the tensors computed on writing; only small files are read again."""
    files: dict[str, Any] = {}
    jobs_of: dict[str, list[Job]] = {name: [] for name in plan.sizes}
    for job in plan.jobs:
        jobs_of[job.file].append(job)
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name, size = str(path.relative_to(directory)), path.stat().st_size
        files[name] = {"size": size}
        if name in jobs_of:
            files[name]["parts"] = file_parts(path, size, jobs_of[name], hashes)
        else:
            with open(path, "rb", buffering=0) as file:
                files[name]["sha256"] = hash_ranges(file, [(0, size)])
    write_json(directory / MANIFEST_FILE, {"format_version": FORMAT_VERSION, "files": files})


def _public_origin(files: ModelFiles) -> str:
    """The repository with its commit, or the name of the directory without its path, which is not for publication."""
    return files.origin if files.directory is None or files.repo is not None else files.directory.resolve().name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""`modelcenter info`: what is known of a model without loading it, and what it takes. Imports no torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from engine.memory import readable
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import CONFIG_FILE, MANIFEST_FILE, WEIGHT_FILES
from modelcenter.hub.info.parameter_counts import (
    COMPONENTS,
    PRECISIONS,
    body_sizes,
    components_of_file,
    inference_bytes,
    our_names,
    task_sizes,
    training_bytes,
)
from modelcenter.hub.remote.download import HubOptions, download_config, is_offline
from modelcenter.hub.resolve import local_directory, read_model_config, repo_of
from modelcenter.registry import ARCHITECTURES, get, preset

_WIDE = ("fp32", "fp16", "bf16")
_SHOWN = ("hidden_size", "num_layers", "num_decoder_layers", "num_heads", "num_kv_heads", "vocab_size", "max_positions")


def model_info(name: str, options: HubOptions | None = None, gpus: int = 8) -> dict[str, Any]:
    """Everything `modelcenter info NAME --json` prints.

    Args:
        name: a name of `list_models`, a Hub id, a Hugging Face directory, a run's folder or a distributed checkpoint.
            A Hub id that no preset stands for takes its config.json from the cache, or from the Hub.
        gpus: over which the ZeRO levels shard.

    Raises:
        ValueError: nothing of that name; a file cannot be read; gpus is below 1.
    """
    options = options or HubOptions()
    if gpus < 1:
        raise ValueError(f"gpus: got {gpus}, expected at least 1")
    folder = Path(name).expanduser()
    if (folder / "config.yaml").is_file() and (folder / "model" / CONFIG_FILE).is_file():
        name = str(folder / "model")  # a run
    directory = local_directory(name)
    about: dict[str, Any] = {"name": name}
    weights: Path | None = None
    if directory is not None:
        distributed = (directory / MANIFEST_FILE).is_file()
        about["source"] = "distributed checkpoint" if distributed else "directory"
        config = read_model_config(directory / CONFIG_FILE)
        weights = directory
    else:
        entry = None if options.revision is not None else _preset(name)
        if entry is not None:
            about |= {"source": "preset", "hub": entry.get("hub"), "confirmed": bool(entry.get("confirmed"))}
            about["revision"] = entry.get("revision")
            config = entry["config"]
            repo = entry.get("hub")
        else:
            repo, pinned = repo_of(name)
            options = replace(options, revision=options.revision or pinned)
            path = download_config(repo, options)
            about |= {"source": "hub", "hub": repo, "revision": path.parent.name}
            config = read_model_config(path)
        if repo is not None:
            about["cached"] = cached_files(repo, options)
            weights = _newest(about["cached"])
            about["offline"] = is_offline(options)
    about |= _of_config(config)
    about["stored"] = None if weights is None else stored(weights, config)
    _count(about, config)
    about["memory"] = _memory(about, config, gpus)
    return about


def _preset(name: str) -> dict[str, Any] | None:
    try:
        return preset(name)
    except KeyError:
        return None


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type")
    found: dict[str, Any] = {
        "model_type": kind,
        "architectures": config.get("architectures"),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "unknown").removeprefix("torch."),
    }
    if str(kind) in ARCHITECTURES:
        arch = get(str(kind), config.get("architectures")).arch_map()
        ours = our_names(config, arch)
        found["task"] = arch.declared_task(config.get("architectures"))
        found["tasks"] = list(arch.tasks)
        found["sizes"] = {key: ours[key] for key in _SHOWN if key in ours}
    else:
        found |= {"task": None, "tasks": [], "sizes": {}}
    labels = config.get("id2label")
    if labels:
        found["labels"] = list(labels.values()) if isinstance(labels, dict) else list(labels)
    return found


def _count(about: dict[str, Any], config: Mapping[str, Any]) -> None:
    """parameters, components, counted_from: the files where their headers can be read, else arithmetic."""
    # A preset whose sizes nobody published has a file's own config.json to say them.
    known = about.get("confirmed") is not False or "hidden_size" in about["sizes"]
    bare = body_sizes(config) if known else None
    about["bare_parameters"] = None if bare is None else sum(bare.values())
    held, whole = about["stored"], task_sizes(config, about["task"]) if known else None
    if held is not None and held["components"]:
        sizes, source = held["components"], "files"
    elif whole is not None:
        sizes, source = whole, "config"
    else:
        sizes, source = bare, "config, without its head"
    about |= {"components": sizes, "counted_from": None if sizes is None else source}
    about["parameters"] = None if sizes is None else sum(sizes.values())


def _memory(about: Mapping[str, Any], config: Mapping[str, Any], gpus: int) -> dict[str, Any] | None:
    sizes = about["components"]
    if sizes is None:
        return None
    layers = about["sizes"].get("num_layers", 1) + about["sizes"].get("num_decoder_layers", 0)
    total = sum(sizes.values())
    widths = {name: 4 if name == "fp32" else 2 for name in _WIDE}
    return {
        "gpus": gpus,
        "training": {
            precision: {
                f"zero-{level}": training_bytes(sizes, layers, precision, level, gpus) for level in (0, 1, 2, 3)
            }
            for precision in PRECISIONS
        },
        "inference": {
            precision: {"whole": inference_bytes(total, width), "sharded": inference_bytes(total, width, gpus)}
            for precision, width in widths.items()
        },
    }


# -- files -----------------------------------------------------------------------------------------------------------


def stored(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint directory holds: format, files, bytes, and parameters where headers of safetensors say them.

    Raises:
        ValueError: a header cannot be read.
    """
    if (directory / MANIFEST_FILE).is_file():
        files = read_json(directory / MANIFEST_FILE).get("files", {})
        try:
            sizes = {name: int(entry["size"]) for name, entry in files.items() if name.startswith("model/")}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{directory / MANIFEST_FILE} is damaged: {error!r}") from None
        return _stored("distributed", sizes)
    for name in WEIGHT_FILES:
        stem, _, suffix = name.rpartition(".")
        shards = sorted(directory.glob(f"{stem}-*-of-*.{suffix}"))
        paths = [directory / name] if (directory / name).is_file() else shards
        if paths:
            found = _stored("safetensors" if suffix == "safetensors" else "pickle", {p.name: _size(p) for p in paths})
            expected = re.fullmatch(r".*-of-(\d+)\..*", paths[0].name)
            if expected and int(expected[1]) != len(paths):
                found["missing"] = int(expected[1]) - len(paths)
            elif suffix == "safetensors":
                _read_headers(found, paths, config)
            return found
    return _stored(None, {})


def _size(path: Path) -> int:
    return path.stat().st_size


def _stored(form: str | None, sizes: dict[str, int]) -> dict[str, Any]:
    return {"format": form, "files": sizes, "bytes": sum(sizes.values()), "missing": 0, "dtypes": {}, "components": {}}


def _read_headers(found: dict[str, Any], paths: list[Path], config: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[str, int]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    shapes[name] = (part.get_dtype(), prod(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
    kind = config.get("model_type")
    known = str(kind) in ARCHITECTURES
    arch = get(str(kind), config.get("architectures")).arch_map() if known else None
    where: dict[str, str | None] = dict.fromkeys(shapes, "other")
    if arch is not None:
        where = components_of_file(shapes, config, arch)
    parts = dict.fromkeys(COMPONENTS, 0)
    for name, (dtype, count) in shapes.items():
        if (part := where[name]) is not None:
            parts[part] += count
        found["dtypes"][dtype] = found["dtypes"].get(dtype, 0) + count
    found["components"] = {name: count for name, count in parts.items() if count}


def cached_files(repo: str, options: HubOptions) -> list[dict[str, Any]]:
    """The commits of a repository in huggingface_hub's cache, newest first: revision, names of it, files with sizes."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser()
    home = root / repo_folder_name(repo_id=repo, repo_type="model")
    refs = home / "refs"
    names: dict[str, list[str]] = {}
    for ref in sorted(p for p in refs.rglob("*") if p.is_file()) if refs.is_dir() else ():
        names.setdefault(ref.read_text(encoding="utf-8").strip(), []).append(ref.relative_to(refs).as_posix())
    found = []
    snapshots = home / "snapshots"
    for commit in sorted(snapshots.iterdir(), key=lambda p: -p.stat().st_mtime) if snapshots.is_dir() else ():
        if options.revision not in (None, commit.name, *names.get(commit.name, ())):
            continue
        files = {p.relative_to(commit).as_posix(): _size(p) for p in sorted(commit.rglob("*")) if p.is_file()}
        found.append(
            {"revision": commit.name, "names": names.get(commit.name, []), "path": str(commit), "files": files}
        )
    return found


def _newest(cached: list[dict[str, Any]]) -> Path | None:
    """The directory of the commit that loading by name would take from the cache, if it is there."""
    main = [entry for entry in cached if "main" in entry["names"]] or cached
    return Path(main[0]["path"]) if main else None


# -- text ------------------------------------------------------------------------------------------------------------


def render(about: Mapping[str, Any]) -> str:
    """The text of `modelcenter info NAME`."""
    lines = [f"{label:<12} {value}" for label, value in _facts(about)]
    memory = about["memory"]
    if memory is not None:
        lines += ["", *_tables(memory)]
    return "\n".join(lines)


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("name", about["name"]), ("source", _source(about))]
    facts.append(("model", f"{about['model_type']}, {', '.join(about['architectures'] or ['no class named'])}"))
    if about["sizes"]:
        facts.append(("sizes", ", ".join(f"{key} {value:,}" for key, value in about["sizes"].items())))
    if about["tasks"]:
        facts.append(("head", f"{about['task'] or 'none that is known'}; loads as {', '.join(about['tasks'])}"))
    if "labels" in about:
        labels = about["labels"]
        facts.append(("labels", ", ".join(map(str, labels[:8])) + (f", ... ({len(labels)})" if labels[8:] else "")))
    if about["parameters"] is None:
        known = str(about["model_type"]) in ARCHITECTURES
        why = "its config says no sizes" if known else f"{about['model_type']!r} is no architecture that is known here"
        facts.append(("parameters", f"unknown: {why}"))
    else:
        bare = "" if about["bare_parameters"] is None else f"; the bare model has {about['bare_parameters']:,}"
        facts.append(("parameters", f"{about['parameters']:,} by the {about['counted_from']}{bare}"))
        facts += [("", f"{name:<10} {count:>16,}") for name, count in about["components"].items()]
    facts.append(("dtype", about["dtype"]))
    if (held := about["stored"]) is not None:
        facts.append(("on disk", _on_disk(held)))
    for entry in about.get("cached", ()):
        known_as = f" ({', '.join(entry['names'])})" if entry["names"] else ""
        size = readable(sum(entry["files"].values()))
        facts.append(("cached", f"{entry['revision'][:12]}{known_as}: {len(entry['files'])} files, {size}"))
    if about.get("cached") == []:
        facts.append(("cached", "nothing" + (", and HF_HUB_OFFLINE is set" if about.get("offline") else "")))
    return facts


def _source(about: Mapping[str, Any]) -> str:
    if about["source"] != "preset":
        return about["source"] + (f" {about['hub']}@{about['revision']}" if "hub" in about else "")
    mark = "confirmed" if about["confirmed"] else "UNCONFIRMED: its parameters were not compared with published ones"
    weights = "no weights; from_config makes a random start"
    if about["parameters"] is None:  # its sizes were never published
        weights = "no weights and no sizes; a directory with a config.json of its own loads"
    return f"preset of {about['hub'] or weights}; {mark}"


def _on_disk(held: Mapping[str, Any]) -> str:
    if held["format"] is None:
        return "no weights"
    text = f"{held['format']}, {len(held['files'])} file{'s' * (len(held['files']) != 1)}, {readable(held['bytes'])}"
    if held["dtypes"]:
        text += f", {', '.join(f'{dtype} {count:,}' for dtype, count in held['dtypes'].items())}"
    return text + (f"; INCOMPLETE: {held['missing']} files are missing" if held["missing"] else "")


def _tables(memory: Mapping[str, Any]) -> list[str]:
    gpus = memory["gpus"]
    levels = list(next(iter(memory["training"].values())))
    lines = [f"Training with AdamW on {gpus} GPU{'s' * (gpus != 1)}, bytes of each (kept + working, no activations):"]
    rows = [["", *levels]]
    for precision, by_level in memory["training"].items():
        rows.append([precision, *(f"{readable(v['kept'])} + {readable(v['working'])}" for v in by_level.values())])
    lines += _aligned(rows)
    lines += ["", f"Inference, bytes of the weights (whole on each, and sharded over {gpus}):"]
    rows = [["", "whole", "sharded"]]
    rows += [[name, readable(row["whole"]), readable(row["sharded"])] for name, row in memory["inference"].items()]
    return lines + _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join([row[0].strip().ljust(widths[0]), *row[1:]]) for row in padded]


def as_json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=2, ensure_ascii=False)

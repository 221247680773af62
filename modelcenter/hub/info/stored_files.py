"""The files of a model on disk: those of a directory, and the commits in huggingface_hub's cache.

Imports no torch.
"""

import re
from collections.abc import Mapping
from math import prod
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter import registry
from modelcenter.hub.files.embedding_files import dense_weight_files
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import MANIFEST_FILE, WEIGHT_FILES
from modelcenter.hub.files.safetensors_header import read_header
from modelcenter.hub.info.components import components_of_file
from modelcenter.hub.info.parameter_counts import COMPONENTS
from modelcenter.hub.remote.download import HubOptions
from modelcenter.registry import ARCHITECTURES


def describe_files(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint directory: format, files, bytes, and parameters if safetensors headers list them.

    Raises:
        ValueError: a header cannot be read.
    """
    if (directory / MANIFEST_FILE).is_file():
        files = read_json(directory / MANIFEST_FILE).get("files", {})
        try:
            sizes = {name: int(entry["size"]) for name, entry in files.items() if name.startswith("model/")}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{directory / MANIFEST_FILE} is damaged: {error!r}") from None
        return _summary("distributed", sizes)
    for name in WEIGHT_FILES:
        stem, _, suffix = name.rpartition(".")
        shards = sorted(directory.glob(f"{stem}-*-of-*.{suffix}"))
        paths = [directory / name] if (directory / name).is_file() else shards
        if paths:
            dense = [directory / file for file in dense_weight_files(_files_of_folders(directory))]
            held = {path.relative_to(directory).as_posix(): _size(path) for path in (*paths, *dense)}
            found = _summary("safetensors" if suffix == "safetensors" else "pickle", held)
            expected = re.fullmatch(r".*-of-(\d+)\..*", paths[0].name)
            if expected and int(expected[1]) != len(paths):
                found["missing"] = int(expected[1]) - len(paths)
            elif suffix == "safetensors":
                readable = [path for path in dense if path.suffix == ".safetensors"]
                found["dtypes"], found["components"] = _read_headers(paths, readable, config)
            return found
    return _summary(None, {})


def _size(path: Path) -> int:
    return path.stat().st_size


def _summary(form: str | None, sizes: dict[str, int]) -> dict[str, Any]:
    return {"format": form, "files": sizes, "bytes": sum(sizes.values()), "missing": 0, "dtypes": {}, "components": {}}


def _files_of_folders(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.glob("*/*") if path.is_file()}


def _read_headers(
    paths: list[Path], dense: list[Path], config: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters by dtype and by component, from the headers of safetensors files.

    Args:
        dense: the files of dense layers after a pooling.
    """
    shapes: dict[str, tuple[str, int]] = {}
    for path in (*paths, *dense):
        folder = f"{path.parent.name}/" if path in dense else ""
        entries = read_header(path)[0]
        shapes |= {folder + name: (entry.dtype, prod(entry.shape)) for name, entry in entries.items()}
    kind = config.get("model_type")
    known = str(kind) in ARCHITECTURES
    arch = registry.get(str(kind), config.get("architectures")).arch_map() if known else None
    where: dict[str, str | None] = dict.fromkeys(shapes, "other")
    if arch is not None:
        where = components_of_file(shapes, config, arch)
    dtypes: dict[str, int] = {}
    components = dict.fromkeys(COMPONENTS, 0)
    for name, (dtype, count) in shapes.items():
        if (part := where[name]) is not None:
            components[part] += count
        dtypes[dtype] = dtypes.get(dtype, 0) + count
    return dtypes, {name: count for name, count in components.items() if count}


def cached_files(repo: str, options: HubOptions) -> list[dict[str, Any]]:
    """The commits of a repository in huggingface_hub's cache, newest first: revision, its names, files with sizes."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(expanduser(options.cache_dir or constants.HF_HUB_CACHE))
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


def newest_snapshot(cached: list[dict[str, Any]]) -> Path | None:
    """The directory of the commit that loading by name would use from the cache, if there is one."""
    main = [entry for entry in cached if "main" in entry["names"]] or cached
    return Path(main[0]["path"]) if main else None

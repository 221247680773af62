"""`modelcenter download`: get a snapshot of the files that a model needs; huggingface_hub resumes broken downloads."""

import glob
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.memory import readable
from modelcenter.hub.files.embedding_files import MODULES_FILE, dense_weight_files, is_embedding_file
from modelcenter.hub.files.names import (
    CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATES_FOLDER,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILES,
    WEIGHT_FILES,
)
from modelcenter.hub.files.weight_index import index_files
from modelcenter.hub.remote.download import (
    HubOptions,
    download_config,
    download_file,
    download_weights,
    explain_errors,
    is_offline,
)
from modelcenter.hub.resolve import local_directory, repo_of


@dataclass(frozen=True)
class Snapshot:
    """A downloaded model. `revision`: its commit. `files`: bytes by name, including files that already existed."""

    repo: str
    revision: str
    path: Path
    files: dict[str, int]


def download_snapshot(
    name: str,
    options: HubOptions,
    *,
    local_dir: str | Path | None = None,
    everything: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Snapshot:
    """Download a model into the cache, or into a directory.

    Args:
        name: a name of `list_models` or a Hub id.
        local_dir: the directory; None: huggingface_hub's cache.
        everything: all files of the repository, instead of only config, tokenizer and weights in one format.
        say: called with what happens next.

    Raises:
        ValueError: as hub.remote.download; the name is an existing directory; offline, a file is not in the cache.
    """
    if local_directory(name) is not None:
        raise ValueError(f"{name} is a local directory: nothing to download")
    repo, pinned = repo_of(name)
    options = replace(options, revision=options.revision or pinned)
    if is_offline(options):
        return _cached(repo, options, local_dir, everything, say)
    from huggingface_hub import HfApi, constants, snapshot_download

    if local_dir is None:  # the config first, which records in the cache the commit of the branch
        config = download_file(repo, CONFIG_FILE, options) if everything else download_config(repo, options)
        options = options if config is None else replace(options, revision=config.parent.name)
    with explain_errors(repo, options):
        limit = constants.HF_HUB_ETAG_TIMEOUT
        about = HfApi().model_info(
            repo, revision=options.revision, files_metadata=True, token=options.token, timeout=limit
        )
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    options = replace(options, revision=about.sha)
    wanted = list(sizes) if everything else needed_files(repo, sizes, options)
    total = sum(sizes[file] for file in wanted)
    say(f"{repo}@{about.sha}: {len(wanted)} of {len(sizes)} files, {readable(total)}, into {local_dir or 'the cache'}")
    with explain_errors(repo, options):
        path = snapshot_download(
            repo,
            revision=about.sha,
            token=options.token,
            cache_dir=options.cache_dir,
            local_dir=local_dir,
            allow_patterns=[glob.escape(file) for file in wanted],
        )
    if local_dir is None:
        _note_absent(repo, sizes, options)
    return Snapshot(repo, str(about.sha), Path(path), {file: sizes[file] for file in wanted})


def needed_files(repo: str, names: Iterable[str], options: HubOptions) -> list[str]:
    """The files of a repository needed to load the model and its tokenizer, with weights in one format only.

    Raises:
        ValueError: it has no config.json, or no readable weights.
    """
    held = set(names)
    if CONFIG_FILE not in held:
        raise ValueError(f"{repo} has no {CONFIG_FILE}, so it is not a transformers model; --all downloads it anyway")
    texts = [file for file in (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES) if file in held]
    texts += sorted(file for file in held if file.startswith(f"{TEMPLATES_FOLDER}/") or is_embedding_file(file))
    texts += dense_weight_files(held)
    for weights in WEIGHT_FILES:
        if weights in held:
            return [*texts, weights]
        index = f"{weights}.index.json"
        if index in held:
            path = download_file(repo, index, options)
            assert path is not None
            shards = sorted(set(index_files(path).values()))
            absent = [file for file in shards if file not in held]
            if absent:
                raise ValueError(f"{repo}: {index} lists {len(shards)} files, but {absent[0]} is missing")
            return [*texts, index, *shards]
    raise ValueError(
        f"{repo}: no weights in the repository; expected {' or '.join(WEIGHT_FILES)}, or an index of shards. Weights "
        "in TensorFlow, Flax or GGUF format are not read; --all downloads them anyway"
    )


def _note_absent(repo: str, names: Container[str], options: HubOptions) -> None:
    """Record in the cache which optional files the commit lacks, so that loading works without a network."""
    looked_for = [GENERATION_FILE, MODULES_FILE, TOKENIZER_CONFIG_FILE]
    for weights in WEIGHT_FILES:
        if weights in names:
            break
        looked_for += [weights, f"{weights}.index.json"]
    with suppress(ValueError):  # the files themselves are complete
        for name in looked_for:
            if name not in names:
                download_file(repo, name, options)


def _cached(repo: str, options: HubOptions, local_dir: Any, everything: bool, say: Callable[[str], None]) -> Snapshot:
    """The files of a model in the cache, if it is complete; for use offline."""
    for flag, given in (("--local_dir", local_dir is not None), ("--all", everything)):
        if given:
            raise ValueError(f"{flag} needs the Hub, but HF_HUB_OFFLINE (or local_files_only) is set")
    config = download_config(repo, options)
    options = replace(options, revision=config.parent.name)
    download_weights(repo, options)
    files = {str(p.relative_to(config.parent)): p.stat().st_size for p in config.parent.rglob("*") if p.is_file()}
    tokenizer = "" if any(name in files for name in TOKENIZER_FILES) else ", no tokenizer"
    size = readable(sum(files.values()))
    say(f"{repo}@{options.revision}: offline; {len(files)} files in the cache, {size}{tokenizer}")
    return Snapshot(repo, config.parent.name, config.parent, files)


def as_json(snapshot: Snapshot) -> Mapping[str, Any]:
    """The object that --json prints."""
    return {
        "repo": snapshot.repo,
        "revision": snapshot.revision,
        "path": str(snapshot.path),
        "bytes": sum(snapshot.files.values()),
        "files": snapshot.files,
    }

"""`modelcenter push`: upload a directory once it has proved to be a whole Hugging Face checkpoint without pickles."""

import fnmatch
import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from engine.memory import readable
from modelcenter.hub.access_tokens import without_tokens
from modelcenter.hub.card import check_card, read_card
from modelcenter.hub.files.embedding_files import beside
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILES,
    CARD_FILE,
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHT_FILES,
    is_replaced,
)
from modelcenter.hub.files.weight_index import find_weights
from modelcenter.hub.remote.download import XET_ADVICE, hub_address
from modelcenter.hub.resolve import resolve
from modelcenter.registry import ARCHITECTURES

# What executes code when it is loaded, or may.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz", ".npy", ".dill", ".h5", ".keras")


@dataclass(frozen=True)
class PushResult:
    """What a push did. `files`: bytes by name."""

    repo: str
    commit: str
    address: str
    files: dict[str, int]


def model_directory(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that a path means: itself, or the `model` of a run's folder.

    Raises:
        ValueError: no such directory; a run that did not finish.
    """
    folder = Path(expanduser(path))
    if not folder.is_dir():
        raise ValueError(f"{folder} is {'a file' if folder.exists() else 'not there'}; give a directory to push")
    if (folder / CONFIG_FILE).is_file() or not (folder / "config.yaml").is_file():
        return folder
    if not (folder / "model" / CONFIG_FILE).is_file():
        why = "it has not finished, or its weights are in 4 bits (--quantize), which leave an adapter alone"
        raise ValueError(f"{folder} is a run that left no model: {why}")
    return folder / "model"


def check_directory(directory: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, int]:
    """Make sure that a directory is what transformers loads, whole, and holds nothing that runs when it is loaded.

    Returns:
        Bytes by name of the files to upload: all but hidden ones.

    Raises:
        ValueError: it is a distributed checkpoint, holds a pickle, a partial download or a link that leads out of it,
            has no readable config.json or weights, a shard is missing or truncated, a tensor is missing, unknown or
            misshapen.
    """
    if (directory / MANIFEST_FILE).is_file():
        raise ValueError(
            f"{directory} is a distributed checkpoint, which only this project reads. Make a Hugging Face directory of "
            f"it first: modelcenter export {directory} DST"
        )
    files = _files(directory)
    pickles = [name for name in files if name.lower().endswith(PICKLES)]
    if pickles:
        raise ValueError(
            f"{directory} holds {pickles[0]}, which may run code on whoever loads it. Weights belong in safetensors: "
            "from_pretrained reads them and save_pretrained writes those; delete or move what is no weight"
        )
    partial = next((name for name in files if name.endswith((".incomplete", ".tmp", ".part"))), None)
    if partial is not None:
        raise ValueError(f"{directory} holds {partial}, the rest of something unfinished; make the directory anew")
    if CONFIG_FILE not in files and ADAPTER_CONFIG_FILE in files:
        raise ValueError(
            f"{directory} is an adapter, and only whole models are pushed here: push the run, whose model has it "
            "merged, or upload the adapter with huggingface_hub (`hf upload REPO_ID DIR`)"
        )
    if CONFIG_FILE not in files:
        raise ValueError(f"{directory} has no {CONFIG_FILE}, so it is no Hugging Face checkpoint")
    if ADAPTER_CONFIG_FILE in files:
        raise ValueError(
            f"{directory} holds a model and an adapter ({ADAPTER_CONFIG_FILE}): of such a repository transformers "
            "loads the adapter's base and the adapter, and not this model. Move the adapter to a directory of its own"
        )
    if not {WEIGHT_FILES[0], f"{WEIGHT_FILES[0]}.index.json"} & files.keys():
        raise ValueError(f"{directory} has no weights: expected {WEIGHT_FILES[0]} or an index of shards")
    for code in _code_of(directory) - files.keys():
        say(
            f"{directory}: {CONFIG_FILE} names {code} (auto_map), which is not there; without it transformers loads "
            "the model only if it has a class of its own for it. Copy the file from where the model came from"
        )
    _check_tensors(directory, say)
    return files


def _code_of(directory: Path) -> set[str]:
    """The files of Python that a config.json names; "owner/name--module.Class" is in another repository."""
    named = read_json(directory / CONFIG_FILE).get("auto_map")
    places = named.values() if isinstance(named, dict) else ()
    return {f"{place.split('.')[0]}.py" for place in places if isinstance(place, str) and "--" not in place}


def _check_tensors(directory: Path, say: Callable[[str], None]) -> None:
    """Compare headers with config.json: every tensor there, and known, and of its shape. Reads no weights."""
    from modelcenter.hub.files.weight_files import open_weight_files  # torch, which the checks before this do without
    from modelcenter.hub.weights import FileWeights, blueprint_of

    with open_weight_files(find_weights(directory)) as source:
        files = resolve(directory)
        if str(files.config.get("model_type")) not in ARCHITECTURES:
            # Of transformers or the user's own: the files are complete, what must be in them is not known here.
            return say(
                f"{directory}: {files.config.get('model_type')!r} is not known here; its tensors' names and "
                "shapes are not checked"
            )
        weights = FileWeights.with_further_tensors(source, blueprint_of(files), files, beside(directory))
        weights.check(strict=True, ignore_mismatched_sizes=False, head_requested=False)


def _files(directory: Path) -> dict[str, int]:
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if any(part.startswith(".") for part in name.parts) or path.is_dir():
            continue
        if not path.resolve().is_file():
            raise ValueError(f"{path} is a link that leads nowhere, or no plain file")
        if path.is_symlink() and not _allowed_link(path, directory):
            raise ValueError(f"{path} is a link to {os.readlink(path)}, outside the directory; copy the file")
        found[name.as_posix()] = path.stat().st_size
    return found


def _allowed_link(path: Path, directory: Path) -> bool:
    """Links inside the directory, and those of huggingface_hub's cache: snapshots/<commit>/file -> blobs/<hash>."""
    target, root = path.resolve(), directory.resolve()
    return target.is_relative_to(root) or target.parent == root.parent.parent / "blobs"


def push_directory(
    path: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Upload model",
    say: Callable[[str], None] = lambda text: None,
) -> PushResult:
    """Check a directory, or the model of a run's folder, and upload it; after a failure a second call continues.

    Args:
        repo_id: "owner/name"; made if there is none. private: for a new repository; True is refused where it is public.
        token: with write access; None: HF_TOKEN or that of `hf auth login`.
        revision, create_pr: as of upload.
        say: told what was checked and is about to happen.

    Raises:
        ValueError: the directory is not whole or the card is not valid (check_directory), or the Hub refuses.
    """
    directory = model_directory(path)
    files = check_directory(directory, say)
    if (directory / CARD_FILE).is_file():
        check_card(read_card(directory / CARD_FILE), directory / CARD_FILE)
    else:
        say(f"{directory} has no {CARD_FILE}: the repository will have no model card")
    say(f"uploading {len(files)} files, {readable(sum(files.values()))}, of {directory} to {repo_id}")
    commit = upload(directory, repo_id, token, private, revision, message, create_pr=create_pr)
    return PushResult(commit["repo"], commit["commit"], commit["address"], files)


def upload(
    folder: Path,
    repo_id: str,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload model",
    keep: tuple[tuple[str, ...], ...] = (),
    create_pr: bool = False,
) -> Mapping[str, str]:
    """Upload a model's directory; files of an earlier model in the repository are deleted, as when saving over one.

    Args:
        revision: a branch, made if there is none, or a pull request (refs/pr/1). create_pr: open a pull request with
            the commit, against `revision` or main.
        keep: groups of patterns; of a group of which the repository has a file already, none is uploaded.

    Returns:
        repo: its id, owner included. commit: its hash. address: of the commit, or of the new pull request.

    Raises:
        ValueError: the Hub refuses, or cannot be reached; the repository is public, though a private one is wanted.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    _refuse_offline(repo_id)
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:  # create_repo leaves one that exists as it is
            raise ValueError(
                f"{hub_address(repo_id)} exists and is public, so a push with private=True (--private) would "
                "publish the model; nothing was sent. Make it private in its settings, or name another repository"
            )
        if revision is not None and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo_id, revision=revision)
        held = [name for group in keep if any(fnmatch.filter(there, name) for name in group) for name in group]
        sent = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        sent = {name for name in sent if not any(fnmatch.fnmatch(name, pattern) for pattern in held)}
        stale = [name for name in there if is_replaced(name, sent) or name in ADAPTER_FILES]
        commit = api.upload_folder(
            repo_id=repo_id,
            ignore_patterns=[".*", "*/.*", *held],
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=message,
            delete_patterns=[glob.escape(name) for name in stale],
        )
    except (HFValidationError, HfHubHTTPError, HTTPError, OSError, RuntimeError) as error:
        # A RuntimeError is huggingface_hub's, around what went wrong with one of the files, or hf_xet's own.
        within = isinstance(error, RuntimeError) and isinstance(error.__cause__, (HTTPError, OSError))
        advice = _advice(error.__cause__ if within and error.__cause__ is not None else error)
        told = f"pushing to {hub_address(repo_id)} failed: {advice}"
        raise ValueError(without_tokens(told)) from None
    return {"repo": repo_id, "commit": str(commit.oid), "address": str(commit.pr_url or commit.commit_url)}


def check_push(repo_id: str) -> None:
    """Find what would keep a push from starting, without asking the Hub: hours before there is a model to push.

    Raises:
        ValueError: huggingface_hub is offline, the name cannot be one, or there is no token.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    _refuse_offline(repo_id)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"pushing to {repo_id} would fail: {_advice(error)}") from None
    if huggingface_hub.get_token() is None:
        raise ValueError(f"pushing to {repo_id} needs a token that may write there: HF_TOKEN or `hf auth login`")


def _refuse_offline(repo_id: str) -> None:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        raise ValueError(f"pushing to {repo_id} needs the Hub, but HF_HUB_OFFLINE is set: unset it")


def _advice(error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    said = " ".join(str(error).split())
    if isinstance(error, HFValidationError):
        return f"{said}. Give it as owner/name"
    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        if response.status_code in (401, 403, 404):
            return f"{said}. A token that may write there is needed (token=, HF_TOKEN or `hf auth login`)"
        return f"{said}. What was uploaded stays: another push goes on from there"
    xet = XET_ADVICE if isinstance(error, RuntimeError) else ""
    return f"{said}. Check the network, HF_ENDPOINT and proxies; another push goes on from there{xet}"

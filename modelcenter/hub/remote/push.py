"""`modelcenter push`: check that a directory is a complete Hugging Face checkpoint without pickles, and upload it."""

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

# Files that execute code when loaded, or may do so.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz", ".npy", ".dill", ".h5", ".keras")


@dataclass(frozen=True)
class PushResult:
    """The result of a push. `files`: bytes by name."""

    repo: str
    commit: str
    address: str
    files: dict[str, int]


def model_directory(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that a path denotes: itself, or the `model` folder of a run.

    Raises:
        ValueError: the directory does not exist, or it is a run without a model.
    """
    folder = Path(expanduser(path))
    if not folder.is_dir():
        raise ValueError(f"{folder} is {'a file' if folder.exists() else 'missing'}; give a directory to push")
    if (folder / CONFIG_FILE).is_file() or not (folder / "config.yaml").is_file():
        return folder
    if not (folder / "model" / CONFIG_FILE).is_file():
        why = "it has not finished, or it trained an adapter on 4-bit weights (--quantize)"
        raise ValueError(f"{folder} is a run without a final model: {why}")
    return folder / "model"


def check_directory(directory: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, int]:
    """Check that a directory is a complete checkpoint for transformers, and holds nothing that runs when loaded.

    Returns:
        Bytes by name of the files to upload: all except hidden ones.

    Raises:
        ValueError: it is a distributed checkpoint, holds a pickle, a partial download or a link to a file outside,
            has no readable config.json or weights, a shard is missing or truncated, or a tensor is missing, unknown or
            of the wrong shape.
    """
    if (directory / MANIFEST_FILE).is_file():
        raise ValueError(
            f"{directory} is a distributed checkpoint, which only this project reads. Convert it to a Hugging Face "
            f"directory first: modelcenter export {directory} DST"
        )
    files = _files(directory)
    pickles = [name for name in files if name.lower().endswith(PICKLES)]
    if pickles:
        raise ValueError(
            f"{directory} holds {pickles[0]}, which may run code when it is loaded. Weights belong in safetensors: "
            "convert the model with from_pretrained and save_pretrained; delete or move a file that is not weights"
        )
    partial = next((name for name in files if name.endswith((".incomplete", ".tmp", ".part"))), None)
    if partial is not None:
        raise ValueError(f"{directory} holds {partial}, an unfinished download or save; create the directory again")
    if CONFIG_FILE not in files and ADAPTER_CONFIG_FILE in files:
        raise ValueError(
            f"{directory} is an adapter, but only complete models can be pushed: push the run, whose model has it "
            "merged, or upload the adapter with huggingface_hub (`hf upload REPO_ID DIR`)"
        )
    if CONFIG_FILE not in files:
        raise ValueError(f"{directory} has no {CONFIG_FILE}, so it is not a Hugging Face checkpoint")
    if ADAPTER_CONFIG_FILE in files:
        raise ValueError(
            f"{directory} holds a model and an adapter ({ADAPTER_CONFIG_FILE}): from such a repository transformers "
            "loads the adapter and its base, not this model. Move the adapter to a directory of its own"
        )
    if not {WEIGHT_FILES[0], f"{WEIGHT_FILES[0]}.index.json"} & files.keys():
        raise ValueError(f"{directory} has no weights: expected {WEIGHT_FILES[0]} or an index of shards")
    for code in _code_of(directory) - files.keys():
        say(
            f"{directory}: {CONFIG_FILE} names {code} (auto_map), which is missing; without it transformers loads the "
            "model only if it has its own class for it. Copy the file from the source of the model"
        )
    _check_tensors(directory, say)
    return files


def _code_of(directory: Path) -> set[str]:
    """The Python files that a config.json names, except "owner/name--module.Class", which is in another repository."""
    named = read_json(directory / CONFIG_FILE).get("auto_map")
    places = named.values() if isinstance(named, dict) else ()
    return {f"{place.split('.')[0]}.py" for place in places if isinstance(place, str) and "--" not in place}


def _check_tensors(directory: Path, say: Callable[[str], None]) -> None:
    """Compare the headers with config.json: every tensor must exist, be known, and have its shape. Reads no weights."""
    from modelcenter.hub.files.weight_files import open_weight_files  # needs torch, unlike earlier checks
    from modelcenter.hub.weights import FileWeights, blueprint_of

    with open_weight_files(find_weights(directory)) as source:
        files = resolve(directory)
        if str(files.config.get("model_type")) not in ARCHITECTURES:
            # transformers' or the user's own architecture: the files are complete, but their tensors are unknown here.
            return say(
                f"{directory}: {files.config.get('model_type')!r} is not known here; the names and shapes of its "
                "tensors are not checked"
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
            raise ValueError(f"{path} is a broken link, or not a regular file")
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
        repo_id: "owner/name", created if it does not exist. private: for a new repository; True is refused if an
            existing one is public.
        token: with write access; None: HF_TOKEN or that of `hf auth login`.
        revision, create_pr: as in upload.
        say: called with what was checked and what happens next.

    Raises:
        ValueError: the directory is incomplete, the card is invalid (check_directory), or the Hub denies the upload.
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
    """Upload a model's directory; files of an earlier model in the repository are deleted, as in a save.

    Args:
        revision: a branch, created if it does not exist, or a pull request (refs/pr/1). create_pr: open a pull request
            with the commit, against `revision` or main.
        keep: groups of patterns; if the repository has a file of a group, no file of that group is uploaded.

    Returns:
        repo: its id, with the owner. commit: its hash. address: URL of the commit, or of the new pull request.

    Raises:
        ValueError: the Hub denies the upload or cannot be reached; the repository is public and `private` is True.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    _refuse_offline(repo_id)
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:  # create_repo does not change an existing one
            raise ValueError(
                f"{hub_address(repo_id)} exists and is public, so a push with private=True (--private) would "
                "publish the model; nothing was uploaded. Make it private in its settings, or name another repository"
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
        # A RuntimeError is huggingface_hub's, for any error with one of the files, or hf_xet's own.
        within = isinstance(error, RuntimeError) and isinstance(error.__cause__, (HTTPError, OSError))
        advice = _advice(error.__cause__ if within and error.__cause__ is not None else error)
        told = f"pushing to {hub_address(repo_id)} failed: {advice}"
        raise ValueError(without_tokens(told)) from None
    return {"repo": repo_id, "commit": str(commit.oid), "address": str(commit.pr_url or commit.commit_url)}


def check_push(repo_id: str) -> None:
    """Check what would prevent a push, without a request to the Hub: hours before there is a model to push.

    Raises:
        ValueError: huggingface_hub is offline, the name is invalid, or there is no token.
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
        raise ValueError(f"pushing to {repo_id} needs a token with write access: HF_TOKEN or `hf auth login`")


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
            return f"{said}. A token with write access is needed (token=, HF_TOKEN or `hf auth login`)"
        return f"{said}. Uploaded data is kept: another push continues from there"
    xet = XET_ADVICE if isinstance(error, RuntimeError) else ""
    return f"{said}. Check the network, HF_ENDPOINT and proxies; another push continues from there{xet}"

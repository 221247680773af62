"""Downloading files of a Hub repository with huggingface_hub, its cache, tokens, offline mode and HF_ENDPOINT.

Every failure is a single ValueError that names the repository or file, the cause and the fix.
"""

import errno
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import engine
from modelcenter._paths import nearest_beside
from modelcenter.hub.access_tokens import without_tokens
from modelcenter.hub.files.adapter_files import describe_adapter
from modelcenter.hub.files.names import ADAPTER_CONFIG_FILE, CONFIG_FILE, WEIGHT_FILES
from modelcenter.hub.files.weight_index import index_files
from modelcenter.registry import list_models, nearest_preset

log = logging.getLogger("modelcenter")

T = TypeVar("T")

_COMMIT = re.compile("[0-9a-f]{40}")
XET_ADVICE = "; HF_HUB_DISABLE_XET=1 transfers without hf_xet"
_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which hf_hub_download retries
# By name: huggingface_hub 1 raises httpx's errors, 2 those of httpx2. Early versions of 1 do not resume by themselves.
_BROKEN_OFF = ("ReadError", "RemoteProtocolError")


class UnreachableError(ValueError):
    """The Hub cannot be reached, or the connection breaks, and what was requested is not in the cache."""


class RefusedError(ValueError):
    """The Hub reports that a repository is gated, or that it is private or does not exist."""


@dataclass(frozen=True)
class HubOptions:
    """Options of downloads: huggingface_hub's own arguments."""

    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    local_files_only: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "token": None}  # a pickled model must not contain secrets


def download_file(repo: str, name: str, options: HubOptions, listed: bool = False) -> Path | None:
    """The path of a file of a repository, from the cache or the Hub; None if the repository has no such file.

    Offline, a file that is not in the cache is treated as absent from the repository.

    Args:
        listed: the Hub has just listed the file, so its existence need not be checked.

    Raises:
        UnreachableError: the Hub cannot be reached, and the file is not in the cache.
        ValueError: the repository or revision does not exist, or access to it is denied; the cache is not writable.
    """
    from huggingface_hub import _CACHED_NO_EXIST

    with explain_errors(repo, options, name):
        cached = _in_cache(repo, name, options)
    lacked = cached is _CACHED_NO_EXIST  # at the last request
    if lacked and _COMMIT.fullmatch(options.revision or ""):
        return None  # a commit does not change
    try:
        asked = not listed and not isinstance(cached, str) and not is_offline(options)
        if asked and not _exists(repo, name, options):
            with suppress(ValueError):  # the cache is not writable
                _download(repo, name, options)  # records there that the repository has no such file
            return None
        return _download(repo, name, options)
    except UnreachableError:
        if lacked:
            return None
        raise


def _exists(repo: str, name: str, options: HubOptions) -> bool:
    """Ask the Hub once whether a repository has a file.

    Without a network or a repository this raises immediately, whereas hf_hub_download retries for half a minute.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with explain_errors(repo, options, name):
        try:
            get_hf_file_metadata(hf_hub_url(repo, name, revision=options.revision), token=options.token)
        except hub.EntryNotFoundError:
            return False
        except hub.HfHubHTTPError as error:
            if error.response.status_code not in _TRANSIENT_STATUSES:
                raise
    return True


def is_reachable(repo: str, name: str, options: HubOptions) -> bool:
    """Whether the Hub answers a request for a file, whatever the answer; False offline."""
    if is_offline(options):
        return False
    try:
        _exists(repo, name, options)
    except UnreachableError:
        return False
    except ValueError:
        pass
    return True


def _download(repo: str, name: str, options: HubOptions) -> Path | None:
    """As download_file, without first asking whether the file exists."""
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    with explain_errors(repo, options, name):
        try:
            path = hf_hub_download(
                repo,
                name,
                revision=options.revision,
                token=options.token,
                cache_dir=options.cache_dir,
                local_files_only=options.local_files_only,
            )
        except hub.LocalEntryNotFoundError:
            if is_offline(options):
                return None
            raise
        except hub.EntryNotFoundError:
            return None
    return Path(path)


def list_files(repo: str, options: HubOptions) -> list[str]:
    """The names of all files of a repository, from the Hub. Raises as download_file."""
    from huggingface_hub import HfApi, constants

    with explain_errors(repo, options, "list of files"):
        # Without a timeout it would wait forever if the network drops packets.
        limit = constants.HF_HUB_ETAG_TIMEOUT
        about = HfApi().model_info(repo, revision=options.revision, token=options.token, timeout=limit)
    return [file.rfilename for file in about.siblings or ()]


def from_hub_or_cache(repo: str, work: Callable[[HubOptions], T], options: HubOptions) -> T:
    """The result of `work`; if the Hub cannot be reached or denies access, its result from the cache alone.

    A model that is complete in the cache often lacks optional files, which are requested because others have them.

    Raises:
        ValueError: as `work`; the Hub cannot be reached or denies access, and the cache lacks a required file.
    """
    try:
        return work(options)
    except (UnreachableError, RefusedError) as error:
        why = "the Hub cannot be reached" if isinstance(error, UnreachableError) else "the Hub now denies access to it"
        with suppress(ValueError):
            found = work(replace(options, local_files_only=True))
            if not engine.is_initialized() or engine.rank() == 0:
                log.warning("%s: %s; using the cached files. HF_HUB_OFFLINE=1 skips the request", repo, why)
            return found
        raise


def is_offline(options: HubOptions) -> bool:
    """Whether only the cache may be used."""
    from huggingface_hub import constants

    return options.local_files_only or constants.is_offline_mode()


def _nearest(name: str) -> str:
    known = any(name == info.hub for info in list_models())  # it is not misspelt then
    return "" if known else nearest_preset(name) or nearest_beside(Path(name))


def hub_address(repo: str | None = None) -> str:
    """The URL of the Hub or of a repository there, for display: passwords, which a mirror's may hold, are masked."""
    from huggingface_hub import constants

    return without_tokens(constants.ENDPOINT if repo is None else f"{constants.ENDPOINT}/{repo}")


@contextmanager
def explain_errors(repo: str, options: HubOptions, name: str = "files") -> Iterator[None]:
    """Turn the errors of huggingface_hub while it reads `name` of a repository into ValueErrors that say what to do."""
    from huggingface_hub import errors as hub

    where = hub_address(repo)
    signed = "with the given token" if options.token else "with the token of this machine, if it has one"
    try:
        yield
    except hub.GatedRepoError as error:
        raise RefusedError(
            f"{repo} is gated: its owners ask you to accept conditions. Open {where} while logged in, accept them, "
            "then pass token=, set HF_TOKEN or run `hf auth login`"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise RefusedError(
            f"{repo!r} is not a local directory, and {where} does not exist or is private (asked {signed}); for a "
            f"private one pass token=, set HF_TOKEN or run `hf auth login`.{_nearest(repo)}"
        ) from error
    except hub.DisabledRepoError as error:
        raise ValueError(f"{where} has been disabled by the Hub") from error
    except hub.RevisionNotFoundError as error:
        raise ValueError(f"{where} has no revision (branch, tag or commit) {options.revision!r}") from error
    except hub.LocalEntryNotFoundError as error:
        raise _unreachable(repo, name, error.__cause__ or error) from error
    except hub.HFValidationError as error:
        raise ValueError(
            f"{repo!r} is not a local directory and cannot be a Hub id: {str(error).rstrip('.')}.{_nearest(repo)}"
        ) from error
    except hub.HfHubHTTPError as error:
        raise ValueError(f"downloading {name} of {where} failed ({signed}): {_said(error)}") from error
    except hub.HTTPError as error:
        if type(error).__name__ in _BROKEN_OFF:
            raise UnreachableError(
                f"downloading {name} of {where} was interrupted ({_said(error)}). Check the network and run it again: "
                "downloaded data is kept"
            ) from error
        raise _unreachable(repo, name, error) from error
    except RuntimeError as error:  # hf_xet's, for any failure
        raise UnreachableError(
            f"downloading {name} of {where} failed: {_said(error)}. Check the network and run it "
            f"again: downloaded data is kept{XET_ADVICE}"
        ) from error
    except OSError as error:  # errors of huggingface_hub that are also OSErrors are handled above
        at = f" ({error.filename})" if error.filename else ""
        # Without an errno it is huggingface_hub's own, for a file that arrived damaged.
        passing = error.errno in (None, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN)
        place = "Free space there, or name a writable directory (cache_dir, HF_HOME)"
        fix = "Run it again" if passing else place
        raise ValueError(f"downloading {name} of {where} failed: {error.strerror or error}{at}. {fix}") from error


def _in_cache(repo: str, name: str, options: HubOptions) -> Any:
    """The path of a file in the cache; a marker if the repository is known to lack it; or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return try_to_load_from_cache(repo, name, cache_dir=options.cache_dir, revision=options.revision)
    except HFValidationError:
        return None  # the download will report it


def _said(error: BaseException) -> str:
    return without_tokens(" ".join(str(error).split()))


def _unreachable(repo: str, name: str, error: BaseException) -> UnreachableError:
    endpoint, said = hub_address(), _said(error).rstrip(".")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:  # the network works
        fix = "Run it again later" if status in _TRANSIENT_STATUSES else "Check HF_ENDPOINT and the token's rights"
        fix += "; logged-in users (HF_TOKEN, `hf auth login`) may send more requests" if status == 429 else ""
        return UnreachableError(f"{endpoint} does not serve {name} of {repo}, which is not in the cache: {said}. {fix}")
    return UnreachableError(
        f"{repo!r} is not a local directory, its {name} is not in the cache, and {endpoint} cannot be reached "
        f"({said}). Check the network, HF_ENDPOINT and proxies, give a directory, or run `modelcenter download` with "
        f"a network connection.{_nearest(repo)}"
    )


def not_cached_error(repo: str, what: str, options: HubOptions) -> ValueError:
    """The error if something of a repository is not in the cache and may not be downloaded."""
    from huggingface_hub import constants

    at = f" at revision {options.revision!r}" if options.revision else ""
    return ValueError(
        f"{repo!r} is not a local directory, and its {what}{at} is not in the cache "
        f"({options.cache_dir or constants.HF_HUB_CACHE}) while offline (local_files_only or HF_HUB_OFFLINE is set)"
        f". Download it once online, or give a directory.{_nearest(repo)}"
    )


def download_config(repo: str, options: HubOptions) -> Path:
    """Download the config.json of a repository.

    Raises:
        ValueError: as download_file; the repository has none, or it is not in the cache while offline.
    """
    path = download_file(repo, CONFIG_FILE, options)
    if path is not None:
        return path
    if is_offline(options):
        raise not_cached_error(repo, CONFIG_FILE, options)
    adapter = download_file(repo, ADAPTER_CONFIG_FILE, options)
    if adapter is not None:
        raise ValueError(f"{hub_address(repo)} is {describe_adapter(adapter)}")
    raise ValueError(f"{hub_address(repo)} has no config.json, so it is not a transformers model")


def download_weights(repo: str, options: HubOptions) -> Path:
    """Download the weight file of a repository, or the index of its shards and all of them. One format only.

    Raises:
        ValueError: as download_file; or the repository holds no readable weights.
    """
    for name in WEIGHT_FILES:
        path = download_file(repo, name, options)
        if path is not None:
            return path
        index = download_file(repo, f"{name}.index.json", options)
        if index is not None:
            _download_all(repo, sorted(set(index_files(index).values())), options)
            return index
    missing = "in the cache (offline)" if is_offline(options) else "in the repository"
    raise ValueError(
        f"{repo}: no weights {missing}; expected {' or '.join(WEIGHT_FILES)}, or an index of shards. Weights in "
        "TensorFlow, Flax or GGUF format are not read"
    )


def _download_all(repo: str, names: Sequence[str], options: HubOptions) -> None:
    for name in names:
        if _download(repo, name, options) is None:
            if is_offline(options):
                raise ValueError(
                    f"{repo}: {name}, which the index lists, is not in the cache while offline (local_files_only or "
                    "HF_HUB_OFFLINE is set); with a network, `modelcenter download` gets the missing files"
                )
            raise ValueError(f"{repo}: the index lists {name}, which is not in the repository")

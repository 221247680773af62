"""Data sets of the Hugging Face Hub, which the `datasets` library downloads and reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelcenter._paths import nearest_beside


def hub_library(name: str) -> Any:
    """The `datasets` library, for a Hub data set. Raises ValueError if it is not installed."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name}: no such file or directory; reading it from the Hub needs `pip install datasets`."
            + nearest_beside(Path(name))
        ) from None
    return datasets


# {data set: why the Hub cannot be reached; None: it answered}, so that all splits of a run share one request.
_answers: dict[str, str | None] = {}


@contextmanager
def offline_if_unreachable(library: Any, name: str) -> Iterator[None]:
    """Ask the Hub once for a data set, and let the library read its cache inside if the Hub cannot be reached.

    By itself the library retries each of its requests for half a minute, and so it would for a mistyped file name.
    The answer holds in this process until something fails inside: the network may have gone or come back since.

    Raises:
        ConnectionError: the data set is not in the cache, and the Hub cannot be reached or may not be asked.
    """
    offline = library.config.HF_HUB_OFFLINE
    if not offline and name not in _answers:
        _answers[name] = _why_unreachable(name)
    why = "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" if offline else _answers[name]
    library.config.HF_HUB_OFFLINE = why is not None
    try:
        yield
    except Exception as error:
        _answers.pop(name, None)
        if why is None or not isinstance(error, ConnectionError):
            raise
        raise ConnectionError(f"it is not in the cache, and {why}") from error
    finally:
        library.config.HF_HUB_OFFLINE = offline


def hub_error(name: str, error: Exception) -> ValueError:
    """The error for a Hub data set that cannot be loaded."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    message = f"{name}: neither a local file or directory nor an accessible data set of the Hub: {reason.rstrip('.')}."
    return ValueError(message + nearest_beside(Path(name)))


def _why_unreachable(name: str) -> str | None:
    """For a message: why the Hub cannot be reached; None if it answers, whatever it says of the data set."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "README.md", repo_type="dataset"))
    except (errors.HfHubHTTPError, errors.HFValidationError):  # the library will report what is wrong
        return None
    except (errors.HTTPError, OSError) as error:
        return f"the Hub cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
    return None

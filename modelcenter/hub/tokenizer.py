"""Tokenizers are transformers' own; only names are resolved here."""

from pathlib import Path
from typing import Any

from modelcenter.hub.resolve import local_directory, repo_of


def load_tokenizer(name_or_path: Any, **kwargs: Any) -> Any:
    """transformers' AutoTokenizer for a directory, a name of `list_models`, or a Hub id.

    Args:
        kwargs: passed on (revision, token, cache_dir, local_files_only, use_fast, ...).

    Raises:
        ValueError: no such directory or model, or it holds no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = Path(str(name_or_path)).expanduser()
    directory: Path | None = folder
    if not (folder / "tokenizer_config.json").is_file():  # else a tokenizer, perhaps without a model beside it
        directory = local_directory(str(name_or_path))
    source, pinned = (str(directory), None) if directory is not None else repo_of(str(name_or_path))
    if pinned is not None:
        kwargs.setdefault("revision", pinned)
    try:
        return AutoTokenizer.from_pretrained(source, **kwargs)
    except OSError as error:
        raise ValueError(f"no tokenizer could be loaded from {source}: {error}") from error

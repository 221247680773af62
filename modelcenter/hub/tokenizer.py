"""Tokenizers are transformers' own; only names are resolved here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelcenter.hub.resolve import local_directory, repo_of
from modelcenter.hub.writer import TOKENIZER_FILES


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
    if directory is not None and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        # transformers would make one without words for some families
        raise ValueError(
            f"{directory} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); put one there with "
            "tokenizer.save_pretrained"
        )
    kwargs.setdefault("trust_remote_code", False)  # transformers would ask on the terminal about the code of a model
    try:
        return AutoTokenizer.from_pretrained(source, **kwargs)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"no tokenizer could be loaded from {source}: {why} A vocabulary alone does not say whose it is: "
            "tokenizer_config.json names the class, and some have none in transformers"
        ) from error


def add_tokens(tokenizer: Any, model: Any, tokens: Sequence[str], *, pad_to_multiple_of: int | None = None) -> int:
    """Add words to a tokenizer, and rows for them to a model that is not sharded yet; returns how many are new.

    A model that has rows enough already (many tables are padded) keeps them as they are.

    Args:
        tokenizer: transformers' (load_tokenizer); it is changed. Save it with the model.
        model: one of ours; see Model.resize_token_embeddings.

    Raises:
        ValueError: an empty or repeated token, or a model that cannot be resized.
    """
    wrong = [token for token in tokens if not isinstance(token, str) or not token.strip()]
    if wrong or len(set(tokens)) != len(tokens):
        what = repr(wrong[0]) if wrong else repr(next(token for token in tokens if list(tokens).count(token) > 1))
        raise ValueError(
            f"add_tokens: got {what}{'' if wrong else ' twice'}, expected different words that are not empty"
        )
    before = len(tokenizer)
    tokenizer.add_tokens(list(tokens))
    fit_vocabulary(model, tokenizer, pad_to_multiple_of=pad_to_multiple_of)
    return len(tokenizer) - before


def fit_vocabulary(model: Any, tokenizer: Any, *, pad_to_multiple_of: int | None = None) -> bool:
    """Give a model rows for every token of its tokenizer, if it has fewer; returns whether it had."""
    if len(tokenizer) <= model.config.vocab_size:
        return False
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of)
    return True

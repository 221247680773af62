"""The files in which sentence-transformers describes a cross-encoder, a model that reads two texts and scores the pair.

Its weights, config.json and tokenizer are those of a classifier with one label. The function from output to score is in
an entry of config.json in versions 4 and 5 (before, in a field of its own), and later in the files that embedding
models also have. All are read; the entry of config.json is written, because all versions from 4 on read it.

From 5.4 on it may also be a language model, whose score is the logit of one token after the pair, optionally minus that
of another (the step LogitScore). Imports no torch.
"""

import re
from collections.abc import Mapping
from typing import Any

from modelcenter.hub.files.embedding_files import (
    CROSS_ENCODER,
    MODULES_FILE,
    SETTINGS_FILE,
    FindFile,
    step_kinds,
    stored_kind,
)
from modelcenter.hub.files.json_files import read_json, read_json_objects
from modelcenter.hub.files.pair_template_files import default_prompt, stored_template, writes_pairs

_PATHS = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "identity": "torch.nn.modules.linear.Identity"}
ACTIVATIONS = tuple(_PATHS)
ENTRY = "sentence_transformers"  # a field of config.json
_OLD_FIELD = "sbert_ce_default_activation_function"
_VERSION = "4.0.0"  # the first version that reads the entry
_WORD_STEPS = ["Transformer", "LogitScore"]


def is_cross_encoder(config: Mapping[str, Any], find: FindFile) -> bool:
    """Whether the files describe a cross-encoder with one score.

    Args:
        config: content of config.json. find: name of a file -> its path, or None if it does not exist.
    """
    if stored_score_tokens(find):
        return True
    return _has_one_label(config) and (activation_path(config) is not None or stored_kind(find) == CROSS_ENCODER)


def with_stored_activation(config: Mapping[str, Any], find: FindFile) -> dict[str, Any]:
    """The content of config.json, its entry updated from the other files, if there are any.

    Raises:
        ValueError: they describe more than a classifier.
    """
    modules, settings = find(MODULES_FILE), find(SETTINGS_FILE)
    if modules is None or settings is None or stored_kind(find) != CROSS_ENCODER:
        return {**config}
    kinds = step_kinds(modules)
    if not _has_one_label(config) and kinds != _WORD_STEPS:
        return {**config}
    if kinds not in (["Transformer"], _WORD_STEPS):
        raise ValueError(
            f"{modules}: the steps are {', '.join(kinds)}; supported for a cross-encoder are Transformer and, "
            "optionally, LogitScore"
        )
    if (prompt := default_prompt(find)) is not None and not writes_pairs(stored_template(find)):
        raise ValueError(
            f"{settings}: queries begin with the prompt {prompt!r:.60}, which is not supported; write it into the "
            "queries of the data, and make default_prompt_name null"
        )
    values = read_json(settings)
    path = values.get("activation_fn")
    return {**config} if path is None else {**config, ENTRY: {"activation_fn": path, "version": _VERSION}}


def stored_score_tokens(find: FindFile) -> tuple[int, ...]:
    """The tokens whose logits give the score of a language model: the one for yes, and optionally the one for no. Empty
    if the files do not describe such a model.

    Args:
        find: as in is_cross_encoder.

    Raises:
        ValueError: they describe one, but without token ids.
    """
    modules = find(MODULES_FILE)
    if modules is None or stored_kind(find) != CROSS_ENCODER or step_kinds(modules) != _WORD_STEPS:
        return ()
    folder = str(read_json_objects(modules)[1].get("path") or "1_LogitScore")
    if not re.fullmatch(r"\w+", folder) or (path := find(f"{folder}/config.json")) is None:
        raise ValueError(f"{modules} lists the step {folder}, but {folder}/config.json is missing")
    values = read_json(path)
    numbers = [values.get("true_token_id"), values.get("false_token_id")]
    tokens = [number for number in numbers if number is not None]
    if numbers[0] is None or not all(type(number) is int and number >= 0 for number in tokens):
        raise ValueError(f"{path}: true_token_id and false_token_id are {numbers}, expected token ids")
    return tuple(tokens)


def activation_of(config: Mapping[str, Any]) -> str | None:
    """The function from a model's output to its score, one of ACTIVATIONS; None: no field names one.

    Args:
        config: content of config.json, or the part of it that a ModelConfig keeps in `extra`.

    Raises:
        ValueError: the function is not supported.
    """
    if (path := activation_path(config)) is None:
        return None
    package, _, name = path.rpartition(".")
    if name.lower() not in ACTIVATIONS or package.partition(".")[0] != "torch":
        raise ValueError(
            f"config.json: activation_fn is {path!r}, supported are {' and '.join(_PATHS.values())}; give --activation "
            f"({' or '.join(ACTIVATIONS)}) to train with another"
        )
    return name.lower()


def with_activation(extra: Mapping[str, Any], activation: str) -> dict[str, Any]:
    """The fields of config.json that a model keeps, with this one of ACTIVATIONS."""
    kept = {name: value for name, value in extra.items() if name != _OLD_FIELD}
    return {**kept, ENTRY: {"activation_fn": _PATHS[activation], "version": _VERSION}}


def activation_path(config: Mapping[str, Any]) -> str | None:
    """The path of the function that a config.json names; None if it names none."""
    entry = config.get(ENTRY)
    path = entry.get("activation_fn") if isinstance(entry, Mapping) else None
    path = config.get(_OLD_FIELD) if path is None else path
    return None if path is None else str(path)


def _has_one_label(config: Mapping[str, Any]) -> bool:
    names = config.get("id2label")
    return len(names) == 1 if isinstance(names, Mapping) and names else config.get("num_labels") == 1

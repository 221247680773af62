"""What files of sentence-transformers say of a cross-encoder, a model that reads two texts together and scores them.

Its weights, config.json and tokenizer are those of a classifier with one label. What makes a score of the output is
said by an entry of config.json in versions 4 and 5 (before, by a field of its own), and later by the files that models
of embeddings have, too. All are read; the entry of config.json is written, which all versions from 4 on read. Imports
no torch.
"""

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
from modelcenter.hub.files.json_files import read_json

_PATHS = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "identity": "torch.nn.modules.linear.Identity"}
ACTIVATIONS = tuple(_PATHS)
ENTRY = "sentence_transformers"  # of config.json
_OLD_FIELD = "sbert_ce_default_activation_function"
_VERSION = "4.0.0"  # the first that reads the entry


def is_cross_encoder(config: Mapping[str, Any], find: FindFile) -> bool:
    """Whether files say that a classifier was trained as a cross-encoder with one score.

    Args:
        config: contents of config.json. find: name of a file -> where it lies, None where there is none.
    """
    return _has_one_label(config) and (activation_path(config) is not None or stored_kind(find) == CROSS_ENCODER)


def with_stored_activation(config: Mapping[str, Any], find: FindFile) -> dict[str, Any]:
    """The contents of config.json, in which the entry says what the other files do, where there are some.

    Raises:
        ValueError: they describe a model that is more than a classifier.
    """
    if not _has_one_label(config) or find(MODULES_FILE) is None or stored_kind(find) != CROSS_ENCODER:
        return {**config}
    modules, settings = find(MODULES_FILE), find(SETTINGS_FILE)
    assert modules is not None and settings is not None
    if (kinds := step_kinds(modules)) != ["Transformer"]:
        raise ValueError(f"{modules}: the steps are {', '.join(kinds)}; supported of a cross-encoder is Transformer")
    values = read_json(settings)
    prompts, name = values.get("prompts") or {}, values.get("default_prompt_name")
    if name is not None and isinstance(prompts, dict) and prompts.get(name):
        raise ValueError(
            f"{settings}: queries begin with the prompt {prompts[name]!r:.60}, and here with none; write it into the "
            "queries of the data, and make default_prompt_name null"
        )
    path = values.get("activation_fn")
    return {**config} if path is None else {**config, ENTRY: {"activation_fn": path, "version": _VERSION}}


def activation_of(config: Mapping[str, Any]) -> str | None:
    """What makes a score of the output of a model, one of ACTIVATIONS; None: nothing says it.

    Args:
        config: contents of config.json, or what of them a ModelConfig keeps in `extra`.

    Raises:
        ValueError: another function.
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
    """The fields of config.json that a model keeps, with one of ACTIVATIONS."""
    kept = {name: value for name, value in extra.items() if name != _OLD_FIELD}
    return {**kept, ENTRY: {"activation_fn": _PATHS[activation], "version": _VERSION}}


def activation_path(config: Mapping[str, Any]) -> str | None:
    """The path of the function that a config.json names; None: it names none."""
    entry = config.get(ENTRY)
    path = entry.get("activation_fn") if isinstance(entry, Mapping) else None
    path = config.get(_OLD_FIELD) if path is None else path
    return None if path is None else str(path)


def _has_one_label(config: Mapping[str, Any]) -> bool:
    names = config.get("id2label")
    return len(names) == 1 if isinstance(names, Mapping) and names else config.get("num_labels") == 1

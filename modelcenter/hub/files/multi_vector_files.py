"""The files that say how the vectors of a text's tokens are made of a model's hidden states. Imports no torch.

Read are those of sentence-transformers' MultiVectorEncoder, of PyLate, and of Stanford's ColBERT (its `artifact.
metadata`, and the projection among the model's own weights); written are the first. What the older ones leave out is
filled in as MultiVectorEncoder does.
"""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelcenter.hub.files.embedding_files import (
    MODULES_FILE,
    MULTI_VECTOR,
    SETTINGS_FILE,
    STANFORD_FILE,
    TOKEN_VECTORS,
    TRANSFORMER_FILE,
    DenseStep,
    FindFile,
    dense_fields,
    dense_folder,
    read_dense_steps,
    step_folders,
    step_kinds,
    stored_kind,
)
from modelcenter.hub.files.json_files import read_json, write_json
from modelcenter.hub.files.names import CONFIG_FILE
from modelcenter.multi_vector_settings import FIRST_PROJECTION, ROLES, SCORES, MultiVectorSettings

STANFORD_CLASS = "HF_ColBERT"  # in the `architectures` of Stanford's models
PUNCTUATION = tuple(string.punctuation)
_USUAL_EXPANSION, _USUAL_WIDTH = 32, 128  # where an older file does not say them
_MASK, _NORMALIZE = "MultiVectorMask", "Normalize"
_STRATEGIES = {"fixed": True, "min": False}  # theirs -> expansion_truncates
_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
# Of PyLate's settings, any of which says that a query is expanded unless another one denies it.
_OLD_FIELDS = (
    "query_length", "document_length", "query_expansion", "do_query_expansion", "attend_to_expansion_tokens",
    "attend_to_mask_tokens", *_PREFIXES.values(), "skiplist_words",
)  # fmt: skip
_CLASSES = {
    "Transformer": "base.modules.transformer",
    "Dense": "base.modules.dense",
    _MASK: "multi_vector_encoder.modules.multi_vector_mask",
    _NORMALIZE: "base.modules.normalize",
}


def makes_token_vectors(find: FindFile) -> bool:
    """Whether the files say that a checkpoint makes a vector of each token.

    Args:
        find: name of a file -> where it lies, None where there is none.
    """
    return _modules(find) is not None or _is_stanford(find)


def read_multi_vector_files(find: FindFile) -> dict[str, Any]:
    """The fields of MultiVectorSettings that the files of a model say.

    Raises:
        ValueError: they describe steps or values that are not supported here.
    """
    if _is_stanford(find):
        return _read_stanford(find)
    if (modules := _modules(find)) is None:
        return {}
    kinds, folders = _checked_steps(modules)
    settings = find(SETTINGS_FILE)
    top = {} if settings is None else read_json(settings)
    found = _of_settings(settings, top)
    steps = projection_steps(find)
    found["dense"] = [step.settings for step in steps]
    if _MASK not in kinds and _NORMALIZE not in kinds and _is_old(find, top):  # PyLate's own classes do both
        found |= {"normalize": True, "skipped": _words(settings, top.get("skiplist_words"), PUNCTUATION)}
    else:
        found["normalize"] = _NORMALIZE in kinds
        found["skipped"] = ()
    if (path := find(TRANSFORMER_FILE)) is not None:
        found |= _of_transformer(path)
        if (longest := read_json(path).get("max_seq_length")) is not None:  # of any text, where nothing else is said
            found.setdefault("document_length", longest)
            if found.get("expansion_length") is None:
                found.setdefault("query_length", longest)
    for kind, folder in zip(kinds, folders, strict=True):
        path = find(f"{folder}/config.json")
        if path is not None and kind == _MASK:
            found |= _of_mask(path)
        elif path is not None and kind == _NORMALIZE:
            _check_reads_tokens(path, read_json(path))
    if found.get("expansion_length") is not None and _MASK not in kinds and not _is_old(find, top):
        raise ValueError(
            f"{modules} lists no {_MASK}, without which the tokens that queries are expanded by do not count; add it, "
            f"or remove query_expansion from {TRANSFORMER_FILE}"
        )
    return found


def projection_steps(find: FindFile) -> list[DenseStep]:
    """The layers that the files describe in folders of their own, in their order; those of Stanford's models have none.
    Raises ValueError: as read_multi_vector_files, or two that do not fit together."""
    if (modules := _modules(find)) is None:
        return []
    kinds, folders = _checked_steps(modules)
    dense = [folder for kind, folder in zip(kinds, folders, strict=True) if kind == "Dense"]
    return read_dense_steps(find, dense, modules, FIRST_PROJECTION, TOKEN_VECTORS)


def check_projection_inputs(steps: list[DenseStep], width: int) -> None:
    """Raise ValueError where the first layer reads hidden states of another width than a model has."""
    if steps and steps[0].inputs != width:
        raise ValueError(
            f"{steps[0].config}: in_features is {steps[0].inputs}, but the hidden states of this model have {width} "
            "elements"
        )


def marking_prefixes(find: FindFile) -> list[str]:
    """The prompts of an older file that its model was trained to see as one token each, which its tokenizer may not
    make of their text. See mark_prompts of hub.tokenizer."""
    if _is_stanford(find):
        found = _read_stanford(find)
        return [found[f"{role}_prompt"] for role in ROLES]
    settings = None if _modules(find) is None else find(SETTINGS_FILE)
    values = {} if settings is None else read_json(settings)
    return [values[name] for name in _PREFIXES.values() if isinstance(values.get(name), str)]


def _modules(find: FindFile) -> Path | None:
    """modules.json of a model that makes a vector of each token; None: there is none."""
    modules = find(MODULES_FILE)
    return modules if modules is not None and stored_kind(find) in MULTI_VECTOR else None


def _is_stanford(find: FindFile) -> bool:
    config = find(CONFIG_FILE)
    named = None if config is None else read_json(config).get("architectures")
    return isinstance(named, list) and STANFORD_CLASS in named and find(MODULES_FILE) is None


def _is_old(find: FindFile, top: Mapping[str, Any]) -> bool:
    """Whether PyLate wrote the files."""
    return stored_kind(find) != MULTI_VECTOR[0] or any(name in top for name in _PREFIXES.values())


def _checked_steps(modules: Path) -> tuple[list[str], list[str]]:
    """(kinds, folders) of the steps. Raises ValueError: one that is not supported, or not in that place."""
    kinds, folders = step_kinds(modules), step_folders(modules)
    dense = kinds.count("Dense")
    rest = kinds[1 + dense :]
    if kinds[:1] == ["Transformer"] and kinds[1 : 1 + dense] == ["Dense"] * dense:
        if len(set(rest)) == len(rest) and {*rest} <= {_MASK, _NORMALIZE}:
            return kinds, folders
    known = ("Transformer", "Dense", _MASK, _NORMALIZE)
    wrong = next((i for i, kind in enumerate(kinds) if kind not in known), None)
    at = "" if wrong is None else f"; {kinds[wrong]} in {folders[wrong]} is none of them"
    raise ValueError(
        f"{modules}: the steps are {', '.join(kinds)}; supported are Transformer, any number of Dense, and after them "
        f"{_MASK} and {_NORMALIZE}, each once{at}"
    )


def _of_settings(path: Path | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """What config_sentence_transformers.json says: the prompts, the similarity and what PyLate wrote there."""
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ValueError(f"{path}: prompts is {prompts!r:.60}, expected an object of texts by their names")
    found: dict[str, Any] = {}
    for role, name in _PREFIXES.items():
        prefix = values.get(name) or ""
        found[f"{role}_prompt"] = prefix + (prompts.get(role) or "").removeprefix(prefix)
    named = values.get("similarity_fn_name")
    found["similarity"] = named if named in SCORES else SCORES[0]  # older files name cosine, or MaxSim
    if values.get("document_length") is not None:
        found["document_length"] = values["document_length"]
    if "query_expansion" in values:
        return found | _of_expansion(path, values["query_expansion"]) | _of_query_length(values)
    if not any(name in values for name in _OLD_FIELDS):
        return found
    if values.get("do_query_expansion") is False:
        return found | _of_query_length(values)
    attended = values.get("attend_to_expansion_tokens", values.get("attend_to_mask_tokens"))
    length = values.get("query_length") or _USUAL_EXPANSION
    return found | {"expansion_length": length, "expansion_attended": bool(attended)}


def _of_query_length(values: Mapping[str, Any]) -> dict[str, Any]:
    length = values.get("query_length")
    return {} if length is None else {"query_length": length}


def _of_transformer(path: Path) -> dict[str, Any]:
    """What sentence_bert_config.json says. Raises ValueError: it reads anything but text."""
    values = read_json(path)
    if (task := values.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise ValueError(f"{path}: transformer_task is {task!r}, supported is 'feature-extraction', of texts")
    if (name := values.get("module_output_name", TOKEN_VECTORS)) != TOKEN_VECTORS:
        raise ValueError(f"{path}: module_output_name is {name!r}, expected {TOKEN_VECTORS!r}")
    found = {name: values[name] for name in ("query_length", "document_length") if values.get(name) is not None}
    return found | (_of_expansion(path, values["query_expansion"]) if "query_expansion" in values else {})


def _of_expansion(path: Path | None, given: Any) -> dict[str, Any]:
    """What `query_expansion` says. Raises ValueError: it is of another kind."""
    if given is None:
        return {"expansion_length": None}
    fields = ("strategy", "attend", "token", "length")
    if not isinstance(given, dict) or not {*given} <= {*fields} or given.get("strategy") not in _STRATEGIES:
        raise ValueError(
            f"{path}: query_expansion is {given!r:.80}, expected null, or an object with strategy "
            f"({' or '.join(_STRATEGIES)}), length, attend and token"
        )
    if not isinstance(given.get("length"), int):
        raise ValueError(f"{path}: query_expansion has the length {given.get('length')!r}, expected a number of tokens")
    return {
        "expansion_length": given["length"],
        "expansion_truncates": _STRATEGIES[given["strategy"]],
        "expansion_attended": given.get("attend", False),
        "expansion_token": given.get("token"),
    }


def _of_mask(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if values.get("keep_only_token_ids"):
        raise ValueError(f"{path}: keep_only_token_ids chooses tokens of images, which are not supported here")
    roles = values.get("skiplist_tasks")
    roles = [roles] if isinstance(roles, str) else ["document"] if roles is None else roles
    return {"skipped": _words(path, values.get("skiplist_words"), ()), "skipped_in": roles}


def _words(path: Path | None, given: Any, usual: tuple[str, ...]) -> tuple[str, ...]:
    """A list of words. Raises ValueError: it is none."""
    if given is None:
        return usual
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise ValueError(f"{path}: skiplist_words is {given!r:.60}, expected a list of texts")
    return tuple(given)


def _check_reads_tokens(path: Path, values: Mapping[str, Any]) -> None:
    for name in ("module_input_name", "module_output_name"):
        if (value := values.get(name, TOKEN_VECTORS)) != TOKEN_VECTORS:
            raise ValueError(f"{path}: {name} is {value!r}, supported is {TOKEN_VECTORS!r}, those of the tokens")


def _read_stanford(find: FindFile) -> dict[str, Any]:
    """What Stanford's artifact.metadata says; where it is missing or silent, the usual values."""
    path = find(STANFORD_FILE)
    values = {} if path is None else read_json(path)
    found: dict[str, Any] = {
        "query_prompt": (values.get("query_token_id") or "[unused0]") + " ",
        "document_prompt": (values.get("doc_token_id") or "[unused1]") + " ",
        "expansion_length": values.get("query_maxlen") or _USUAL_EXPANSION,
        "expansion_attended": bool(values.get("attend_to_mask_tokens")),
        "skipped": PUNCTUATION if values.get("mask_punctuation", True) else (),
    }
    if values.get("doc_maxlen") is not None:
        found["document_length"] = values["doc_maxlen"]
    width = values.get("dim") or _USUAL_WIDTH
    return found | {"dense": [{"width": width, "activation": "identity", "bias": False}]}


def write_multi_vector_files(directory: Path, settings: MultiVectorSettings, width: int) -> None:
    """Write the files for a model, weights apart, as sentence-transformers' MultiVectorEncoder does.

    Args:
        width: of its hidden states.
    """
    kinds = ["Transformer", *["Dense"] * len(settings.dense), _MASK, *([_NORMALIZE] if settings.normalize else [])]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    steps = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{_CLASSES[kind]}.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(directory / MODULES_FILE, steps)
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
    names = {"module_input_name": TOKEN_VECTORS, "module_output_name": TOKEN_VECTORS}
    for number, layer in enumerate(settings.dense, FIRST_PROJECTION):
        write_json(directory / dense_folder(number) / "config.json", {**dense_fields(layer, width), **names})
        width = layer.width
    skipped = {"skiplist_words": list(settings.skipped), "skiplist_tasks": list(settings.skipped_in)}
    folder = paths[kinds.index(_MASK)]
    write_json(directory / folder / "config.json", {**skipped, "keep_only_token_ids": None})
    if settings.normalize:
        write_json(directory / paths[-1] / "config.json", names)
    write_json(directory / TRANSFORMER_FILE, _transformer_fields(settings))
    prompts = {role: settings.prompt(role) for role in ROLES}
    top = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": settings.similarity}
    write_json(directory / SETTINGS_FILE, {"model_type": MULTI_VECTOR[0], **top})


def _transformer_fields(settings: MultiVectorSettings) -> dict[str, Any]:
    expansion = None
    if settings.expansion_length is not None:
        strategy = next(name for name, cuts in _STRATEGIES.items() if cuts == settings.expansion_truncates)
        expansion = {
            "strategy": strategy,
            "attend": settings.expansion_attended,
            "token": settings.expansion_token,
            "length": settings.expansion_length,
        }
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": TOKEN_VECTORS,
        "query_length": settings.query_length,
        "document_length": settings.document_length,
        "query_expansion": expansion,
    }

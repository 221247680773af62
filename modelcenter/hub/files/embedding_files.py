"""The files of sentence-transformers that say how embeddings are made of a model's hidden states. Imports no torch.

`modules.json` lists the steps: a transformer, a pooling, perhaps a normalisation, each with a folder of its own. They
are read in the forms of all versions from 2 on, and written in the older one, which all of them read.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelcenter.embedding_settings import SIMILARITIES, EmbeddingSettings
from modelcenter.hub.files.json_files import read_json, read_json_objects, write_json

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
_STEP_FILE = re.compile(r"\d+_\w+/config\.json")  # of a step that has a folder

_POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # theirs -> ours
# The same as switches, of which one is on.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query", "s2p_query"), ("document", "passage", "corpus")

POOLING_FOLDER, NORMALIZE_FOLDER = "1_Pooling", "2_Normalize"
USUAL_FILES = (MODULES_FILE, SETTINGS_FILE, TRANSFORMER_FILE, f"{POOLING_FOLDER}/config.json")

FindFile = Callable[[str], Path | None]


def is_embedding_file(name: str) -> bool:
    """Whether a file of a model's directory is one of these. name: within the directory."""
    return name in (MODULES_FILE, SETTINGS_FILE, TRANSFORMER_FILE) or _STEP_FILE.fullmatch(name) is not None


def makes_embeddings(arch: Any, find: FindFile) -> bool:
    """Whether the files say that a checkpoint makes embeddings, which its architecture (an ArchMap) can. Of such
    checkpoints config.json often names a head that their files do not hold.

    Args:
        find: as of read_embedding_files.
    """
    return "embedding" in arch.tasks and find(MODULES_FILE) is not None


def beside(directory: Path) -> FindFile:
    """Finds the files of a model's directory."""
    return lambda name: found if (found := directory / name).is_file() else None


def read_embedding_files(find: FindFile) -> dict[str, Any]:
    """The fields of EmbeddingSettings that the files of a model say.

    Args:
        find: name of a file -> where it lies, None where there is none.

    Raises:
        ValueError: they describe steps that are not supported here.
    """
    modules = find(MODULES_FILE)
    if modules is None:
        return {}
    steps = read_json_objects(modules)
    kinds = [str(step.get("type", "")).rpartition(".")[2] for step in steps]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ValueError(
            f"{modules}: the steps are {', '.join(kinds)}; supported are Transformer, Pooling and after them Normalize"
        )
    found: dict[str, Any] = {"normalize": "Normalize" in kinds}
    if (pooling := find(f"{steps[1].get('path') or POOLING_FOLDER}/config.json")) is not None:
        found["pooling"] = _pooling_of(pooling)
    if (transformer := find(TRANSFORMER_FILE)) is not None:
        found["max_length"] = read_json(transformer).get("max_seq_length")
    if (settings := find(SETTINGS_FILE)) is not None:
        values = read_json(settings)
        prompts = values.get("prompts") or {}
        if not isinstance(prompts, dict):
            raise ValueError(f"{settings}: prompts is {prompts!r:.60}, expected an object of texts by their names")
        for role, names in (("query_prompt", _QUERY_PROMPTS), ("document_prompt", _DOCUMENT_PROMPTS)):
            found[role] = next((prompts[name] for name in names if prompts.get(name)), "")
        if (similarity := values.get("similarity_fn_name")) is not None:
            if similarity not in SIMILARITIES:
                expected = " or ".join(SIMILARITIES)
                raise ValueError(f"{settings}: similarity_fn_name is {similarity!r}, expected {expected}")
            found["similarity"] = similarity
    return {name: value for name, value in found.items() if value is not None}


def _pooling_of(path: Path) -> str:
    """The pooling that its config.json names, in our words. Raises ValueError: another one, or several."""
    values = read_json(path)
    modes = values.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _SWITCHES.items() if values.get(name)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or str(modes[0]) not in _POOLINGS:
        raise ValueError(
            f"{path}: the pooling is {' and '.join(map(str, modes))}; supported is one of {', '.join(_POOLINGS)}"
        )
    if not values.get("include_prompt", True):
        raise ValueError(f"{path}: include_prompt is false, but prompts are always part of the pooled text here")
    return _POOLINGS[modes[0]]


def write_embedding_files(directory: Path, config: EmbeddingSettings, pooling: str, width: int) -> None:
    """Write the files for a model. pooling: the one it has. width: of its embeddings."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if config.normalizes else [])]
    paths = ["", POOLING_FOLDER, NORMALIZE_FOLDER]
    steps = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(directory / MODULES_FILE, steps)
    theirs = next(name for name, ours in _POOLINGS.items() if ours == pooling)
    switches = {name: mode == theirs for name, mode in _SWITCHES.items()}
    for path in paths[1 : len(kinds)]:
        (directory / path).mkdir(exist_ok=True)
    pooling_fields = {"word_embedding_dimension": width, **switches, "include_prompt": True}
    write_json(directory / POOLING_FOLDER / "config.json", pooling_fields)
    write_json(directory / TRANSFORMER_FILE, {"max_seq_length": config.max_length, "do_lower_case": False})
    prompts = {"query": config.query_prompt, "document": config.document_prompt}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": config.similarity}
    write_json(directory / SETTINGS_FILE, {"model_type": "SentenceTransformer", **settings})

"""The files of sentence-transformers that say how a SparseEncoder's weights of tokens are made. Imports no torch.

`modules.json` lists a transformer with a head over the vocabulary and a SpladePooling. They are read in the forms of
all versions from 5 on, and written in the older one, which all of them read.
"""

from pathlib import Path
from typing import Any

from modelcenter.hub.files.embedding_files import (
    MODULES_FILE,
    SPARSE_ENCODER,
    TRANSFORMER_FILE,
    FindFile,
    is_sparse_encoder,
    read_text_settings,
    step_kinds,
    write_text_settings,
)
from modelcenter.hub.files.json_files import read_json, read_json_objects, write_json
from modelcenter.sparse_settings import SPARSE_ACTIVATIONS, SPARSE_POOLINGS, SparseEmbeddingSettings

_POOLING_FOLDER = "1_SpladePooling"
_TASK = "fill-mask"  # of a Transformer whose output are the logits of a masked language model
_FIELDS = {
    "pooling_strategy": ("pooling", SPARSE_POOLINGS),
    "activation_function": ("activation", SPARSE_ACTIVATIONS),
}


def read_sparse_encoder_files(find: FindFile) -> dict[str, Any]:
    """The fields of SparseEmbeddingSettings that the files of a model say; none for another kind of model.

    Args:
        find: as of embedding_files.read_embedding_files.

    Raises:
        ValueError: they describe steps that are not supported here.
    """
    modules = find(MODULES_FILE)
    if modules is None or not is_sparse_encoder(find):
        return {}
    found = {**read_text_settings(find), **_pooling_of(find, _pooling_folder(modules, find))}
    return {name: value for name, value in found.items() if value is not None}


def _pooling_folder(modules: Path, find: FindFile) -> str:
    """The folder of the pooling. Raises ValueError: a step is not supported."""
    kinds, steps = step_kinds(modules), read_json_objects(modules)
    transformer = find(TRANSFORMER_FILE)
    task = None if transformer is None else read_json(transformer).get("transformer_task")
    if kinds[:1] == ["Transformer"] and task != _TASK:
        raise ValueError(
            f"{transformer or modules}: transformer_task is {task!r}, expected {_TASK!r}: weights of tokens are made "
            "of the logits of a masked language model"
        )
    if kinds not in (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"]):
        wrong = next((kind for kind in kinds if kind not in ("MLMTransformer", "Transformer", "SpladePooling")), None)
        said = "" if wrong is None else f"; {wrong} is not supported"
        raise ValueError(
            f"{modules}: the steps of this SparseEncoder are {', '.join(kinds)}; supported are MLMTransformer (or a "
            f"Transformer for {_TASK}) and SpladePooling{said}"
        )
    return str(steps[1].get("path") or _POOLING_FOLDER)


def _pooling_of(find: FindFile, folder: str) -> dict[str, Any]:
    """What the config.json of the pooling says, in our words. Raises ValueError: it is not understood."""
    path = find(f"{folder}/config.json")
    values = {} if path is None else read_json(path)
    found = {}
    for theirs, (ours, known) in _FIELDS.items():
        if (value := values.get(theirs)) is not None:
            if value not in known:
                raise ValueError(f"{path}: {theirs} is {value!r}, expected {' or '.join(known)}")
            found[ours] = value
    return found


def write_sparse_encoder_files(directory: Path, config: SparseEmbeddingSettings, vocab_size: int) -> None:
    """Write the files for a model, weights apart."""
    kinds = {"": "MLMTransformer", _POOLING_FOLDER: "SpladePooling"}
    steps = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    write_json(directory / MODULES_FILE, steps)
    (directory / _POOLING_FOLDER).mkdir(exist_ok=True)
    fields = {theirs: getattr(config, ours) for theirs, (ours, _) in _FIELDS.items()}
    write_json(directory / _POOLING_FOLDER / "config.json", {**fields, "word_embedding_dimension": vocab_size})
    write_text_settings(directory, config, SPARSE_ENCODER)

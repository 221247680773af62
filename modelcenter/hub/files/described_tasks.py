"""The tasks that no class of transformers is named for: what files other than config.json say of them. Imports no
torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelcenter.embedding_settings import EmbeddingSettings
from modelcenter.hub.files import embedding_files, multi_vector_files, sparse_encoder_files
from modelcenter.hub.files.embedding_files import DenseStep, FindFile, write_embedding_files
from modelcenter.hub.files.multi_vector_files import write_multi_vector_files
from modelcenter.hub.files.sparse_encoder_files import write_sparse_encoder_files
from modelcenter.multi_vector_settings import MultiVectorSettings
from modelcenter.sparse_settings import SparseEmbeddingSettings

# {task: the field of the model's config that holds what its files say}
FIELDS = {"embedding": "embedding", "multi-vector": "multi_vector", "sparse-embedding": "sparse_embedding"}
_SETTINGS: Mapping[str, Any] = {
    "embedding": EmbeddingSettings,
    "multi-vector": MultiVectorSettings,
    "sparse-embedding": SparseEmbeddingSettings,
}
_READ: Mapping[str, Callable[[FindFile], dict[str, Any]]] = {
    "embedding": embedding_files.read_embedding_files,
    "multi-vector": multi_vector_files.read_multi_vector_files,
    "sparse-embedding": sparse_encoder_files.read_sparse_encoder_files,
}


def described_task(find: FindFile, arch: Any = None) -> str | None:
    """The task that the files describe; None: none, or one that the architecture (an ArchMap) lacks. Of such
    checkpoints config.json often names a head that their files do not hold.

    Args:
        find: name of a file -> where it lies, None where there is none. arch: None: any.
    """
    if embedding_files.makes_embeddings(find):
        task = "embedding"
    elif multi_vector_files.makes_token_vectors(find):
        task = "multi-vector"
    elif embedding_files.is_sparse_encoder(find):
        task = "sparse-embedding"
    else:
        return None
    return task if arch is None or task in arch.tasks else None


def stored_fields(task: str, find: FindFile) -> dict[str, Any]:
    """What the files say of a task's settings, under our names. Raises ValueError: steps that are not supported."""
    return _READ[task](find)


def settings_over(task: str, find: FindFile, given: Any) -> Any:
    """The settings that the files say, overridden by those of a caller. Raises ValueError: see `over` of the class."""
    return _SETTINGS[task].over(stored_fields(task, find), given)


def dense_steps(task: str | None, find: FindFile) -> list[DenseStep]:
    """The dense layers that the files describe in folders of their own. Raises ValueError: see those of the task."""
    if task == "multi-vector":
        return multi_vector_files.projection_steps(find)
    return embedding_files.dense_steps(find) if task == "embedding" else []


def check_dense_inputs(task: str | None, find: FindFile, model: Any) -> None:
    """Raise ValueError where the first dense layer reads vectors of another width than it is given."""
    if task == "embedding":
        embedding_files.check_dense_inputs(dense_steps(task, find), model)
    elif task == "multi-vector":
        multi_vector_files.check_projection_inputs(dense_steps(task, find), model.state_width)


def write_described(model: Any, directory: Path) -> None:
    """Write the files of a model's task, weights apart; nothing for a task that config.json describes."""
    if model.task == "embedding":
        write_embedding_files(directory, model.config.embedding, model.pooling, model.state_width)
    elif model.task == "multi-vector":
        write_multi_vector_files(directory, model.config.multi_vector, model.state_width)
    elif model.task == "sparse-embedding":
        write_sparse_encoder_files(directory, model.config.sparse_embedding, model.config.vocab_size)

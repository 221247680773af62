"""The weights of the dense layers of embeddings, which have folders of their own in the model's directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelcenter.convert.pieces import Shape
from modelcenter.hub.files.embedding_files import DENSE_WEIGHTS, DenseStep, FindFile, dense_folder
from modelcenter.hub.files.multi_vector_files import STANFORD_CLASS
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.files.weight_files import add_folder
from modelcenter.multi_vector_settings import FIRST_PROJECTION

_INLINE = "linear.weight"  # the projection of Stanford's ColBERT, among the weights of the model


def add_dense_weights(source: FileSource, steps: Sequence[DenseStep], find: FindFile) -> None:
    """Add the tensors of dense layers to those of a checkpoint, under names such as "2_Dense/linear.weight".

    Args:
        find: name of a file -> its path, or None if it does not exist.

    Raises:
        ValueError: a file is missing, truncated or malformed, or its tensors differ from those in its config.json.
    """
    for step in steps:
        weights = next((path for name in DENSE_WEIGHTS if (path := find(f"{step.folder}/{name}")) is not None), None)
        if weights is None:
            raise ValueError(
                f"{step.config.parent}: no {' or '.join(DENSE_WEIGHTS)} with the weights of the dense layer that "
                "modules.json lists"
            )
        _check_shapes(weights, step, add_folder(source, dense_folder(step.number), weights))


def _check_shapes(weights: Path, step: DenseStep, held: dict[str, Shape]) -> None:
    """Raise ValueError unless a file holds the tensors that the config.json in its folder describes."""
    of, width = step.settings, step.settings.width
    expected: dict[str, Shape] = {"linear.weight": (width, step.inputs)}
    if of.bias:
        expected["linear.bias"] = (width,)
    if of.residual and width != step.inputs:
        expected["residual.weight"] = (width, step.inputs)
    if held != expected:
        found, wanted = (", ".join(f"{name} {shape}" for name, shape in sorted(t.items())) for t in (held, expected))
        raise ValueError(f"{weights} holds {found or 'nothing'}; by {step.config}, expected {wanted}")


def name_inline_projection(source: FileSource, config: Mapping[str, Any]) -> None:
    """Give the projection of Stanford's ColBERT the name of a dense layer in a folder of its own.

    Args:
        config: config.json of the model.
    """
    if STANFORD_CLASS in (config.get("architectures") or ()) and _INLINE in source.tensors:
        ours = f"{dense_folder(FIRST_PROJECTION)}/{_INLINE}"
        source.rename({name: ours if name == _INLINE else name for name in [*source.tensors, *source.absent]})

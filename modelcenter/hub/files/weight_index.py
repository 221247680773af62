"""Finding the weight files of a directory: a single file, or the shards that an index lists. Imports no torch."""

import json
from pathlib import Path

from modelcenter.hub.files.json_files import unique_keys
from modelcenter.hub.files.links import refuse_broken_link
from modelcenter.hub.files.names import WEIGHT_FILES

# Megatron's tensor parallelism writes one file for each rank.
MEGATRON_FIRST_PART, MEGATRON_PARTS = "mp_rank_00_model_states.pt", "mp_rank_*_model_states.pt"


def index_files(path: Path) -> dict[str, str]:
    """The weight map of an index: tensor -> name of its file in the same directory.

    Raises:
        ValueError: it is not an index, or an entry is not a plain file name (it could leave the directory).
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)["weight_map"]
        pairs = list(entries.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of weight files: {error!r}") from None
    for name, file in pairs:
        if not isinstance(file, str) or not file or file in (".", "..") or any(c in file for c in "/\\\0:"):
            raise ValueError(f"{path}: the entry of tensor {name!r} is {file!r}, expected a file name without a folder")
    return entries


def find_weights(directory: Path) -> Path:
    """The weight file, or the index of weight files, of a Hugging Face directory.

    Raises:
        ValueError: the directory holds no readable weights (the error lists its files), or a broken link to them.
    """
    for name in WEIGHT_FILES:
        for candidate in (directory / name, directory / f"{name}.index.json"):
            refuse_broken_link(candidate)
            if candidate.is_file():
                return candidate
    if (directory / MEGATRON_FIRST_PART).is_file():
        return directory / MEGATRON_FIRST_PART
    held = ", ".join(sorted(p.name for p in directory.iterdir())[:20]) or "nothing"
    raise ValueError(
        f"no weights in {directory}: expected {' or '.join(WEIGHT_FILES)}, or an index of shards "
        f"(<name>.index.json). It holds: {held}"
    )

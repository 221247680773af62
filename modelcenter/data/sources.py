"""Where rows come from: files, directories and patterns of files, or a data set of the Hugging Face Hub, each with its
splits."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelcenter.data.readers import READERS, read_files
from modelcenter.data.readers.compression import suffix_of
from modelcenter.data.table import Origin, Table

SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation", "eval": "validation",
    "development": "validation", "evaluation": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
_OF_SPLIT = re.compile(rf"({'|'.join(SPLITS)})(set|data|split)?")  # devset.csv, as E2E has it


@dataclass(frozen=True)
class Source:
    """A data set that is found but not yet read: its splits, and how to read one."""

    name: str
    splits: tuple[str, ...]
    _read: Callable[[str], Table]
    unsplit: str | None = None  # a file or pattern that was named beside folders with splits

    def read(self, split: str) -> Table:
        """Read one split. Raises ValueError if there is no such split, or for what `read_file` raises."""
        canonical = split if split in self.splits else SPLITS.get(split.lower(), split)
        base = canonical.split("[", 1)[0]  # the Hub's slices, such as train[:1000], are the Hub library's to read
        if base not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        return self._read(canonical)


def find(data: str | Sequence[str], config: str | None = None) -> Source:
    """Resolve a data argument to its source.

    data: one or more files, directories or patterns, or the name of a Hub data set; config: the Hub data set's
    configuration.
    A directory with files (or folders) called train, dev (or validation) and test, or trainset and so on, alone or as
    a word of their names, has these splits. Files named one by one, and what else there is, are the split "train".
    Splits of several directories are joined.
    Raises ValueError if nothing is there.
    """
    specs = [data] if isinstance(data, str) else list(data)
    if len(specs) == 1 and config is None and _is_saved(Path(specs[0]).expanduser()):
        return _saved(specs[0])
    splits = _splits(specs, config)
    if splits is None:
        return _hub(specs[0], config)
    alone = next((spec for spec in specs if not Path(spec).expanduser().is_dir()), None) if len(splits) > 1 else None
    return Source(" ".join(specs), tuple(splits), lambda split: read_files(splits[split]), alone)


def find_paths(data: str | Sequence[str], config: str | None, split: str) -> list[Path] | None:
    """The files of a split of a data argument (see `find`), for those who stream them; None for a Hub data set.

    Raises ValueError if nothing is there, or there is no such split.
    """
    specs = [data] if isinstance(data, str) else list(data)
    splits = _splits(specs, config)
    if splits is None:
        return None
    canonical = split if split in splits else SPLITS.get(split.lower(), split)
    if canonical not in splits:
        raise ValueError(f"{' '.join(specs)} has no split {split!r}; its splits: {', '.join(splits)}")
    return splits[canonical]


def _splits(specs: list[str], config: str | None) -> dict[str, list[Path]] | None:
    """{split: files}; None if it is the name of a Hub data set."""
    if len(specs) == 1 and is_hub_name(specs[0]):
        return None
    if config is not None:
        raise ValueError(f"data_config {config!r} is for Hub data sets, but {' '.join(specs)} is local")
    splits: dict[str, list[Path]] = {}
    for spec in specs:
        for split, paths in _local(spec).items():
            splits.setdefault(split, []).extend(paths)
    return splits


def hold_out(table: Table, fraction: float, seed: int, groups: np.ndarray | None = None) -> tuple[Table, Table]:
    """Split rows into (train, evaluation), a pure function of the seed; both keep the order of the rows.

    groups: int64 (rows,), numbers from 0 of the groups that stay together; the fraction is then one of groups.
    Raises ValueError if one of the sides were empty.
    """
    size, what = (len(table), "rows") if groups is None else (int(groups.max()) + 1, "groups")
    drawn = np.random.default_rng([seed, 0x5EED]).permutation(size)
    count = round(fraction * size)
    if not 0 < count < size:
        raise ValueError(
            f"eval_fraction: got {fraction}, which is {count} of {size} {what}, expected some {what} on each side"
        )
    rest, held = (
        np.sort(part) if groups is None else np.flatnonzero(np.isin(groups, part))
        for part in (drawn[count:], drawn[:count])
    )
    return table.take(rest), table.take(held)


def is_hub_name(spec: str) -> bool:
    """Whether an entry of a data argument is a data set of the Hub, by its name: nothing local has or looks like it."""
    path = Path(spec).expanduser()
    local = path.exists() or glob.has_magic(spec) or spec[:1] in "./~" or suffix_of(path) in READERS or "\\" in spec
    return not local and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", spec) is not None


def _local(spec: str) -> dict[str, list[Path]]:
    path = Path(spec).expanduser()
    if path.is_file():
        return {"train": [path]}
    if _is_saved(path):
        raise ValueError(
            f"{spec}: a folder of `save_to_disk`, which is read whole and by itself: give no other path beside it; to "
            "stream it, write it with `to_parquet`"
        )
    if path.is_dir():
        return _directory(path)
    if glob.has_magic(spec):
        paths = _rows([Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()])
        if not paths:
            raise ValueError(f"{spec}: no file matches this pattern")
        return {"train": paths}
    hint = _near(path) if path.parent.is_dir() else f" ({path.parent} does not exist)"
    raise ValueError(f"{spec}: no such file or directory{hint}")


def _near(path: Path) -> str:
    """A question whether another file or folder was meant, where there is one of nearly this name."""
    there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def labels_of(path: str | Path) -> Path | None:
    """The file of labels that belongs to a file of rows, dev_answer.json to dev.json; None: there is none."""
    path = Path(path)
    beside = path.with_name(f"{path.stem}_answer{path.suffix}")
    return beside if path.suffix == ".json" and beside.is_file() else None


def _rows(files: list[Path]) -> list[Path]:
    """The files but for those of labels that belong to others of them."""
    labels = {labels_of(file) for file in files}
    return [file for file in files if file not in labels]


def _directory(path: Path) -> dict[str, list[Path]]:
    """{split: files}. Files and sub-folders whose names say no split are left out where others do; so are hidden ones,
    among them the copies that Jupyter keeps."""
    there = sorted(p for p in path.rglob("*") if p.is_file() and suffix_of(p) in READERS)
    files = [p for p in there if not any(part.startswith((".", "__MACOSX")) for part in p.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{path}: the directory holds no {', '.join(READERS)} files")
    files = _rows(files)
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(path).with_suffix("")).lower())
        found = next(filter(None, map(_OF_SPLIT.fullmatch, words)), None)
        if found is not None:
            splits.setdefault(SPLITS[found[1]], []).append(file)
    return splits or {"train": files}


def hub_error(name: str, error: Exception) -> ValueError:
    """What to raise where the Hub does not give a data set."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    said = f"{name}: neither a file or directory here nor a data set that the Hub gives: {reason}"
    return ValueError(said + _near(Path(name)))


def _hub(name: str, config: str | None) -> Source:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name}: no such file or directory; reading it from the Hub needs `pip install datasets`"
        ) from None
    try:
        splits = tuple(datasets.get_dataset_split_names(name, config))
    except Exception as error:  # the library raises some twenty kinds of error here, of several packages
        raise hub_error(name, error) from error

    def read(split: str) -> Table:
        try:
            rows: Any = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # as many kinds as above
            reason = str(error.__cause__ or error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(f"{name}: the split {split!r} of this data set cannot be read: {reason}") from error
        return _table_of(rows, f"{name}{'/' + config if config else ''}:{split}")

    return Source(name, splits, read)


def _is_saved(path: Path) -> bool:
    """Whether a folder is one that the `datasets` library's `save_to_disk` wrote, of one split or of several."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved(name: str) -> Source:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name}: a folder of `save_to_disk`; reading it needs `pip install datasets`") from None
    try:
        found: Any = datasets.load_from_disk(str(Path(name).expanduser()))
    except Exception as error:  # as many kinds as above
        raise ValueError(f"{name}: a folder of `save_to_disk` that cannot be read: {error}") from error
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}

    def read(split: str) -> Table:
        if split not in splits:
            raise ValueError(f"{name}: {split!r} is a part of a split, which the Hub's data sets alone have")
        return _table_of(splits[split], name if splits is not found else f"{name}:{split}")

    return Source(name, tuple(splits), read)


def _table_of(rows: Any, name: str) -> Table:
    """The table of a data set of the `datasets` library."""
    import datasets

    if not len(rows):
        raise ValueError(f"{name}: the data set holds no rows")
    # A column of lists of classes is a feature around a feature.
    inner = {column: getattr(feature, "feature", feature) for column, feature in rows.features.items()}
    classes = {column: list(f.names) for column, f in inner.items() if isinstance(f, datasets.ClassLabel)}
    return Table(rows.to_dict(), [Origin(name, len(rows), rows._fingerprint)], classes)

"""Sources of rows: files, directories and patterns of files, or a Hugging Face Hub data set, each with its splits."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np

from modelcenter._paths import nearest_beside
from modelcenter.data.hub_datasets import hub_error, hub_library, offline_if_unreachable
from modelcenter.data.readers import READERS, read_files
from modelcenter.data.readers.compression import COMPRESSED, suffix_of
from modelcenter.data.readers.parquet import without_nan
from modelcenter.data.table import Origin, Table

SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation", "eval": "validation",
    "development": "validation", "evaluation": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
_SPLIT_WORD = re.compile(rf"({'|'.join(SPLITS)})(set|data|split)?")  # devset.csv, as in E2E
# Suffixes of other files. A name that ends in one is that of a missing file, about which the Hub is not asked.
_OTHER_FILES = (
    ".arrow", ".avro", ".db", ".feather", ".h5", ".npy", ".npz", ".ods", ".orc", ".pickle", ".pkl", ".sqlite",
    ".tar", ".tgz", ".xls", ".xlsx", ".xml", ".yaml", ".yml", ".zip",
)  # fmt: skip
_ROWS = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")  # allowed after the name of a split


@dataclass(frozen=True)
class Source:
    """A data set that exists but has not been read: its splits, and a way to read one."""

    name: str
    splits: tuple[str, ...]
    _read: Callable[[str], Table]
    unsplit: str | None = None  # a file or pattern given together with folders that have splits

    def has(self, split: str) -> bool:
        """Whether the split exists, under this name or another usual one."""
        return self.whole(split) in self.splits

    def whole(self, split: str) -> str:
        """This source's name of a split, which may be given with rows, as in train[:1000]."""
        return _canonical(split, self.splits)[0]

    def read(self, split: str) -> Table:
        """Read one split, or some of its rows in the notation of the Hub's library: train[:1000], dev[10%:20%].

        Raises ValueError if there is no such split, for other brackets, if no row is left, and as `read_file`.
        """
        if not self.has(split):
            raise ValueError(f"{self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        return self._read("".join(_canonical(split, self.splits)))


def _canonical(split: str, splits: Collection[str]) -> tuple[str, str]:
    """(this source's name of a split given by any usual name, the brackets after it): "dev[:9]": validation, [:9]."""
    name, bracket, rows = split.partition("[")
    return name if name in splits else SPLITS.get(name.lower(), name), bracket + rows


def find(data: str | Sequence[str], config: str | None = None) -> Source:
    """Resolve a data argument to its source.

    data: one or more files, directories or patterns, or the name of a Hub data set; config: the Hub data set's
    configuration.
    A directory has splits if its files or sub-folders are called train, dev (or validation) and test, or trainset and
    so on, alone or as a word of their names. Everything else, such as single files, is the split "train".
    Equal splits of several directories are joined.
    Raises ValueError if nothing is found.
    """
    specs = [data] if isinstance(data, str) else list(data)
    if len(specs) == 1 and config is None and _is_saved_dataset(Path(expanduser(specs[0]))):
        return _saved_source(specs[0])
    splits = _splits(specs, config)
    if splits is None:
        return _hub_source(specs[0], config)
    unsplit = next((spec for spec in specs if not Path(expanduser(spec)).is_dir()), None) if len(splits) > 1 else None
    name = " ".join(specs)
    return Source(name, tuple(splits), _reading_parts(name, lambda split: read_files(splits[split])), unsplit)


def find_paths(data: str | Sequence[str], config: str | None, split: str) -> list[Path] | None:
    """The files of a split of a data argument (see `find`), for streaming; None for a Hub data set.

    Raises ValueError if nothing is found, or there is no such split.
    """
    specs = [data] if isinstance(data, str) else list(data)
    splits = _splits(specs, config)
    if splits is None:
        return None
    canonical, rows = _canonical(split, splits)
    if canonical not in splits:
        raise ValueError(f"{' '.join(specs)} has no split {split!r}; its splits: {', '.join(splits)}")
    if rows:
        raise ValueError(
            f"{' '.join(specs)}: got {split!r}, but streams, and documents that are paragraphs or files, need a whole "
            f"split; give {canonical}, or a file with fewer rows"
        )
    return splits[canonical]


def _reading_parts(name: str, read_whole: Callable[[str], Table]) -> Callable[[str], Table]:
    """Add reading of some rows of a split to a reader of whole splits. The Hub's library does so for its data sets."""

    def read(split: str) -> Table:
        whole, bracket, rest = split.partition("[")
        if not bracket:
            return read_whole(whole)
        rows = _ROWS.fullmatch(bracket + rest)
        bounds = rows.groups() if rows is not None else ()
        if rows is None or len({bound[-1] == "%" for bound in bounds if bound}) > 1:  # to the library 10:50% is 10%:50%
            raise ValueError(
                f"{name}: got the rows {split!r}, expected, for example, {whole}[:1000] or {whole}[10%:20%]"
            )
        table = read_whole(whole)
        chosen = np.arange(len(table))[slice(*(_row_number(bound, len(table)) for bound in bounds))]
        if not len(chosen):
            raise ValueError(f"{name}: {split!r} selects no rows; {whole} has {len(table)}")
        return replace(table.subset(chosen), origins=[replace(origin, part=split) for origin in table.origins])

    return read


def _row_number(bound: str | None, size: int) -> int | None:
    """A number of rows from a number or a percentage, rounded as in the Hub's library."""
    if bound is None:
        return None
    return round(int(bound[:-1]) * size / 100.0) if bound[-1] == "%" else int(bound)


def _splits(specs: list[str], config: str | None) -> dict[str, list[Path]] | None:
    """{split: files}; None if the argument is the name of a Hub data set."""
    if len(specs) == 1 and is_hub_name(specs[0]):
        return None
    if config is not None:
        raise ValueError(f"data_config {config!r} is for Hub data sets, but {' '.join(specs)} is local")
    splits: dict[str, list[Path]] = {}
    for spec in specs:
        for split, paths in _local_splits(spec).items():
            splits.setdefault(split, []).extend(paths)
    return splits


def hold_out(table: Table, fraction: float, seed: int, groups: np.ndarray | None = None) -> tuple[Table, Table]:
    """Split rows into (train, evaluation), a pure function of the seed; both keep the order of the rows.

    groups: int64 (rows,), the group of each row, numbered from 0; groups stay together, and `fraction` is of groups.
    Raises ValueError if one of the sides would be empty.
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
    """Whether an entry of a data argument names a Hub data set: it is not a local file and does not look like one."""
    path = Path(expanduser(spec))
    file = suffix_of(path) in (*READERS, *_OTHER_FILES) or path.suffix.lower() in COMPRESSED
    local = path.exists() or glob.has_magic(spec) or spec[:1] in "./~" or file or "\\" in spec
    return not local and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", spec) is not None


def _local_splits(spec: str) -> dict[str, list[Path]]:
    path = Path(expanduser(spec))
    if path.is_file():
        return {"train": [path]}
    if _is_saved_dataset(path):
        raise ValueError(
            f"{spec}: a folder of `save_to_disk` cannot be combined with other paths, or streamed; give only this one, "
            "or write it with `to_parquet`"
        )
    if path.is_dir():
        return _directory_splits(path)
    if glob.has_magic(spec):
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
        paths = _without_label_files([match for match in matches if match.is_file()])
        if not paths:
            raise ValueError(f"{spec}: no file matches this pattern")
        return {"train": paths}
    if path.exists():
        raise ValueError(
            f"{spec}: got a pipe or a device, expected a file or a directory; write its rows to a file, which can be "
            "read more than once"
        )
    hint = f".{nearest_beside(path)}" if path.parent.is_dir() else f" ({path.parent} does not exist)"
    raise ValueError(f"{spec}: no such file or directory{hint}")


def label_file_of(path: str | Path) -> Path | None:
    """The file with the labels of a file of rows, such as dev_answer.json for dev.json; None if there is none."""
    path = Path(path)
    labels = path.with_name(f"{path.stem}_answer{path.suffix}")
    return labels if path.suffix == ".json" and labels.is_file() else None


def _without_label_files(files: list[Path]) -> list[Path]:
    """The files without those that hold the labels of others."""
    labels = {label_file_of(file) for file in files}
    return [file for file in files if file not in labels]


def _directory_splits(path: Path) -> dict[str, list[Path]]:
    """{split: files}. If some files or sub-folders are named after splits, the others are left out.

    Hidden ones, such as Jupyter's copies, are always left out.
    """
    known = sorted(p for p in path.rglob("*") if p.is_file() and suffix_of(p) in READERS)
    files = [p for p in known if not any(part.startswith((".", "__MACOSX")) for part in p.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{path}: the directory has no {', '.join(READERS)} files")
    files = _without_label_files(files)
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(path).with_suffix("")).lower())
        match = next(filter(None, map(_SPLIT_WORD.fullmatch, words)), None)
        if match is not None:
            splits.setdefault(SPLITS[match[1]], []).append(file)
    return splits or {"train": files}


def _hub_source(name: str, config: str | None) -> Source:
    datasets = hub_library(name)
    try:
        with offline_if_unreachable(datasets, name):
            splits = tuple(datasets.get_dataset_split_names(name, config))
    except Exception as error:  # the library raises about twenty types of errors here, of several packages
        raise hub_error(name, error) from error

    def read(split: str) -> Table:
        try:
            with offline_if_unreachable(datasets, name):
                rows: Any = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # as many kinds as above
            reason = str(error.__cause__ or error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(f"{name}: the split {split!r} of this data set cannot be read: {reason}") from error
        return _table_of(rows, f"{name}{'/' + config if config else ''}:{split}")

    return Source(name, splits, read)


def _is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of the `datasets` library, with one split or several."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved_source(name: str) -> Source:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name}: reading a folder of `save_to_disk` needs `pip install datasets`") from None
    try:
        loaded: Any = datasets.load_from_disk(str(Path(expanduser(name))))
    except Exception as error:  # as many kinds as above
        raise ValueError(f"{name}: cannot read this folder of `save_to_disk`: {error}") from error
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}

    def read(split: str) -> Table:
        return _table_of(splits[split], name if splits is not loaded else f"{name}:{split}")

    return Source(name, tuple(splits), _reading_parts(name, read))


def _table_of(rows: Any, name: str) -> Table:
    """The table of a data set of the `datasets` library."""
    import datasets

    if not len(rows):
        raise ValueError(f"{name}: the data set has no rows")
    # A column of lists of classes is a feature around a feature.
    inner = {column: getattr(feature, "feature", feature) for column, feature in rows.features.items()}
    classes = {column: list(f.names) for column, f in inner.items() if isinstance(f, datasets.ClassLabel)}
    columns = without_nan(rows.to_dict(), rows.features)
    return Table(columns, [Origin(name, len(rows), rows._fingerprint)], classes)

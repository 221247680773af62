"""The rows for training, evaluation and inference: data sets, their splits, mixtures."""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from modelcenter.command_line.launcher import launched_rank
from modelcenter.data import sources
from modelcenter.data.batching.mixture import mixed, parse_weights
from modelcenter.data.schemas.forms import apply_form
from modelcenter.data.table import Table, concatenate
from modelcenter.training.config import TrainConfig
from modelcenter.training.tasks.column_roles import group_column, groups_of


def read_splits(
    cfg: TrainConfig, grouped_by: Callable[[Table], str | None] | None = None
) -> tuple[Table, Table | None]:
    """The rows to train on and, if the flags or the data set give some, the rows to evaluate on.

    Args:
        grouped_by: finds the column of groups of rows that are held out together; None: that of the flags.
    """
    cfg.require("train_data")

    def read(source: sources.Source, split: str) -> Table:
        return apply_form(source.read(split), cfg.form, cfg.task)

    found, weights = train_sources(cfg)
    split = sources.SPLITS["dev"]
    with_split = [source for source in found if split in source.splits and source.whole(cfg.train_split) != split]
    named = (cfg.eval_data, cfg.eval_split, cfg.eval_fraction) != (None, None, None)
    cfg.refuse_evaluation_flags(named or bool(with_split))  # before rows are read, or downloaded
    tables = [read(source, cfg.train_split) for source in found]
    train = tables[0] if weights is None else mixed(tables, weights)
    if cfg.eval_fraction is not None:
        usual = group_column(train, getattr(cfg, "group_column", None), cfg.form)
        groups = groups_of(train, usual if grouped_by is None else grouped_by(train))
        return sources.hold_out(train, cfg.eval_fraction, cfg.seed, groups)
    if cfg.eval_data is not None:
        other = sources.find(cfg.eval_data, cfg.data_config if cfg.eval_data == cfg.train_data else None)
        held = read(other, cfg.eval_split or evaluation_split(other))
        return train, dataclasses.replace(held, like=train.name)
    if cfg.eval_split is not None:
        return train, concatenate([read(source, cfg.eval_split) for source in found])
    others = [read(source, split) for source in with_split]
    return train, concatenate(others) if others else None


def tells_of_rows() -> bool:
    """Whether this process reports problems of the rows: rank 0 does, also before the process group is initialised,
    because rows are read earlier."""
    return launched_rank() == 0


def column_of_parts(name: str, *tables: Table | None) -> tuple[list[Any], Callable[[int], str]]:
    """The values of a column in all tables that are not None, and a function that gives the location of each for
    messages."""
    parts = [table for table in tables if table is not None]
    ends = list(itertools.accumulate(map(len, parts)))

    def where(row: int) -> str:
        part = bisect_right(ends, row)
        return parts[part].where(row - ends[part] + len(parts[part]))

    return [value for part in parts for value in part.columns[name]], where


def train_sources(cfg: TrainConfig) -> tuple[list[sources.Source], list[float] | None]:
    """The sources in train_data: one, or the parts of a mixture and their weights.

    Raises:
        ValueError: there is no data; only some parts have weights, or the task does not support mixtures.
    """
    data = cfg.train_data or []
    weighted = parse_weights(data)
    if weighted is None:
        return [sources.find(data, cfg.data_config)], None
    if not cfg.mixes:
        raise ValueError(f"train_data: {data[0]}: {cfg.task} does not support weights; write {weighted[0][0]}")
    return [sources.find(path, cfg.data_config) for path, _ in weighted], [weight for _, weight in weighted]


def evaluation_split(source: sources.Source) -> str:
    """The default split of a data set for evaluation: validation, else test, else its only one."""
    check_one_split(source, "eval_split")
    for split in ("validation", "test"):
        if split in source.splits:
            return split
    if len(source.splits) > 1:
        raise ValueError(
            f"eval_split: {source.name} has the splits {', '.join(source.splits)}; give the one to evaluate on"
        )
    return source.splits[0]


def check_one_split(source: sources.Source, flag: str) -> None:
    """Raise ValueError if choosing one split would leave out a file that was given together with a folder."""
    if source.unsplit is not None:
        raise ValueError(
            f"{flag}: {source.unsplit} belongs to no split, but was given together with the splits "
            f"{', '.join(source.splits)}; list the files to read, or give {flag}"
        )


def inference_split(source: sources.Source, given: str | None, labelled: bool) -> str:
    """The split for inference: the given one, else the default."""
    if given is None:
        check_one_split(source, "split")
    order = ("validation", "test") if labelled else ("test", "validation")
    return given or next((split for split in order if split in source.splits), source.splits[0])

"""Checks that all ranks of a run have the same flags and data: nodes may have different files under one name."""

import platform
from typing import Any

from engine.collectives import gather_objects
from modelcenter.training.checkpoints.fingerprints import identity
from modelcenter.training.config import TrainConfig
from modelcenter.training.config.common import PLACES


def check_flags(cfg: TrainConfig) -> None:
    """Raise ValueError, on all ranks, naming a flag whose values differ between ranks. Collective."""
    values = {name: value for name, value in cfg.to_dict().items() if name not in PLACES}
    _check(values, "start all ranks with the same value")


def check_data(train_set: Any, eval_set: Any) -> None:
    """Raise ValueError, on all ranks, naming the data whose rows or tokens differ between ranks. Collective."""
    sets = {"train_data": train_set, "eval_data": eval_set}
    remedy = "let all ranks read the same files, with the same tokenizer"
    _check({name: _amount(examples) for name, examples in sets.items()}, remedy)


def _amount(examples: Any) -> Any:
    if examples is None:
        return None
    lengths = getattr(examples, "lengths", None)
    return {"tokens": None if lengths is None else int(lengths.sum()), "rows": identity(examples.fingerprint())}


def _check(values: dict[str, Any], remedy: str) -> None:
    gathered = gather_objects((platform.node(), values))
    node_0, values_0 = gathered[0]
    for rank, (node, values_here) in enumerate(gathered):
        for name, value in values_0.items():
            here = values_here[name]
            if here != value:
                raise ValueError(
                    f"{name}: rank {rank} on {node} has {_shown(here)}, rank 0 on {node_0} has {_shown(value)}; "
                    + remedy
                )


def _shown(value: Any) -> str:
    """A flag's value; for data, amounts that a reader can compare."""
    if isinstance(value, dict) and "tokens" in value and "rows" in value:
        rows = value["rows"].get("rows") if isinstance(value["rows"], dict) else None
        amounts = [f"{rows:,} rows"] if isinstance(rows, int) else []
        amounts += [f"{value['tokens']:,} tokens"] if value["tokens"] is not None else []
        return f"{' of '.join(amounts) or 'data'} of its own"
    return repr(value)

"""What all ranks of a run must have alike: flags and data. Nodes may see other files under the same names."""

import platform
from typing import Any

import torch.distributed as dist

import engine
from modelcenter.training.checkpoints.resume import identity
from modelcenter.training.config import TrainConfig
from modelcenter.training.config.common import PLACES


def check_flags(cfg: TrainConfig) -> None:
    """Collective. Raises ValueError, on all ranks, naming a flag that ranks were given with different values."""
    values = {name: value for name, value in cfg.to_dict().items() if name not in PLACES}
    _check(values, "start all ranks with the same")


def check_data(train_set: Any, eval_set: Any) -> None:
    """Collective. Raises ValueError, on all ranks, naming the data that ranks have other rows or tokens of."""
    sets = {"train_data": train_set, "eval_data": eval_set}
    remedy = "let all ranks read the same files, with the same tokenizer"
    _check({name: _about(examples) for name, examples in sets.items()}, remedy)


def _about(examples: Any) -> Any:
    if examples is None:
        return None
    lengths = getattr(examples, "lengths", None)
    return {"tokens": None if lengths is None else int(lengths.sum()), "rows": identity(examples.fingerprint())}


def _check(values: dict[str, Any], remedy: str) -> None:
    if engine.world_size() == 1:
        return
    found: list[Any] = [None] * engine.world_size()
    dist.all_gather_object(found, (platform.node(), values))
    node, first = found[0]
    for rank, (other, its) in enumerate(found):
        for name, value in first.items():
            if its[name] != value:
                raise ValueError(
                    f"{name}: rank {rank} on {other} has {_shown(its[name])}, rank 0 on {node} has {_shown(value)}; "
                    + remedy
                )


def _shown(value: Any) -> str:
    """A flag as it is; of data what people can compare."""
    if isinstance(value, dict) and "tokens" in value and "rows" in value:
        rows = value["rows"].get("rows") if isinstance(value["rows"], dict) else None
        said = [f"{rows:,} rows"] if isinstance(rows, int) else []
        said += [f"{value['tokens']:,} tokens"] if value["tokens"] is not None else []
        return f"{' of '.join(said) or 'data'} of its own"
    return repr(value)

"""Going on where a run was stopped: which checkpoint, and whether it is of the same run."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import engine
from engine.checkpoint import latest_checkpoint, together
from modelcenter.training.config import TrainConfig
from modelcenter.training.config.common import PLACES

RUN_FILE = "run.json"  # in each checkpoint: the flags and the data of its run
CHECKPOINTS = "checkpoints"  # in output_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """A checkpoint to go on from. flags, data: of its run. forced: --resume named it, so flags may differ."""

    checkpoint: Path
    step: int
    flags: dict[str, Any]
    data: Any
    forced: bool

    def check(self, cfg: TrainConfig, data: Any) -> None:
        """Raise ValueError for the first flag that says another run than the checkpoint is of, or for other data.
        Collective: rank 0 has written down the places that its node has things at, and looks at those alone."""
        with together(f"comparing the run with {self.checkpoint}"):
            self._check(cfg, data)

    def _check(self, cfg: TrainConfig, data: Any) -> None:
        now = json.loads(json.dumps(cfg.arithmetic(), default=str))
        seen = [name for name in self.flags if name in now and (engine.rank() == 0 or name not in PLACES)]
        others = {name: self.flags[name] for name in seen if now[name] != self.flags[name]}
        remedy = f"--resume never starts anew, --resume {self.checkpoint} goes on all the same"
        if others and not self.forced:
            name, value = next(iter(others.items()))
            raise ValueError(
                f"{name}: got {now[name]!r}, but {self.checkpoint} is of a run with {value!r}. Give the same; or "
                + remedy
            )
        if identity(data) != identity(self.data) and not self.forced:
            raise ValueError(
                f"train_data: the rows are not those that {self.checkpoint} was trained on "
                f"({_about(data)} now, {_about(self.data)} then{_changed(self.data, data)}). Give the same; or {remedy}"
            )
        if engine.rank() == 0:
            for name, value in others.items():
                log.warning("resume: %s is %r now, the checkpoint's run had %r", name, now[name], value)


def find_continuation(cfg: TrainConfig) -> Continuation | None:
    """The checkpoint that --resume means, if there is one. Collective.

    Raises:
        ValueError: --resume names a place without a whole checkpoint of a run.
    """
    if cfg.resume == "never" or cfg.overwrite_output_dir or cfg.dry_run or cfg.output_dir is None:
        return None
    forced = cfg.resume != "auto"
    root = Path(cfg.resume).expanduser() if forced else Path(cfg.output_dir) / CHECKPOINTS
    if forced and (root / CHECKPOINTS).is_dir():
        root = root / CHECKPOINTS
    path = latest_checkpoint(root)
    if path is None:
        if forced:
            raise ValueError(f"resume: {root} holds no whole checkpoint; give a run's folder or one of its checkpoints")
        return None
    found: list[Any] = [None]
    with together(f"reading {path / RUN_FILE}"):
        if engine.rank() == 0:
            try:
                found[0] = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"resume: {path} is no checkpoint of a run: its {RUN_FILE}: {error}") from None
    if engine.world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    about = found[0]
    if about["task"] != cfg.task:
        raise ValueError(f"resume: {path} is of a run of {about['task']}, this one is {cfg.task}")
    return Continuation(path, about["step"], about["flags"], about["data"], forced)


def keep_global_batch(cfg: TrainConfig, continuation: Continuation, ranks: int) -> None:
    """Keep the run's global batch on whatever number of ranks: the microbatch and the accumulation give way.

    Raises:
        ValueError: so many ranks cannot share it.
    """
    if cfg.batch_tokens is not None:
        _keep_tokens(cfg, continuation, ranks)
        return
    kept = continuation.flags.get("global_batch_size")
    if kept is None or cfg.global_batch_size not in (None, kept):
        return
    each, rest = divmod(kept, ranks)
    if rest or not each:
        raise ValueError(
            f"global_batch_size: the run in {continuation.checkpoint} has {kept}, which {ranks} ranks cannot share "
            "equally; use a number of ranks that divides it"
        )
    if cfg.batch_size == cfg.AUTO:
        cfg.global_batch_size, cfg.gradient_accumulation_steps = kept, None
        return
    most = cfg.batch_size
    cfg.batch_size = next(n for n in range(min(most, each), 0, -1) if each % n == 0)
    cfg.global_batch_size, cfg.gradient_accumulation_steps = kept, each // cfg.batch_size


def _keep_tokens(cfg: TrainConfig, continuation: Continuation, ranks: int) -> None:
    """Batches by tokens are made of parts of batch_tokens, which the ranks share."""
    assert cfg.batch_tokens is not None
    kept = continuation.flags.get("global_batch_tokens")
    if (
        kept is None
        or cfg.global_batch_tokens not in (None, kept)
        or continuation.flags["batch_tokens"] != cfg.batch_tokens
    ):
        return  # the check of the flags will say so
    parts = kept // cfg.batch_tokens
    if parts % ranks:
        raise ValueError(
            f"global_batch_tokens: the run in {continuation.checkpoint} has {kept}, {parts} parts of batch_tokens, "
            f"which {ranks} ranks cannot share equally; use a number of ranks that divides them"
        )
    cfg.global_batch_tokens, cfg.gradient_accumulation_steps = kept, parts // ranks


def about_run(cfg: TrainConfig, step: int, data: Any) -> str:
    """The text of RUN_FILE."""
    flags = json.loads(json.dumps(cfg.arithmetic(), default=str))
    about = {"task": cfg.task, "step": step, "flags": flags, "data": data}
    return json.dumps(about, indent=1, ensure_ascii=False)


def identity(data: Any) -> Any:
    """Of a fingerprint, what does not change when files are moved."""
    if not isinstance(data, dict):
        return [identity(part) for part in data] if isinstance(data, list) else data
    hashes = {"sha256", "source"}  # by the files' paths
    return {
        name: sorted(value.values(), key=str) if name in hashes and isinstance(value, dict) else identity(value)
        for name, value in data.items()
    }


def _changed(before: Any, now: Any) -> str:
    """Which files two fingerprints say other things of, in words that follow others; nothing if they say none."""
    if not all(isinstance(data, dict) and isinstance(data.get("sha256"), dict) for data in (before, now)):
        return ""
    old, new = before["sha256"], now["sha256"]
    found = [f"{path} has changed" for path in old if path in new and old[path] != new[path]]
    found += [f"{path} is gone" for path in old if path not in new]
    found += [f"{path} is new" for path in new if path not in old]
    return "".join(f"; {said}" for said in found[:5])


def _about(data: Any) -> str:
    if not isinstance(data, dict) or "rows" not in data:
        return "others"
    weights = f" with weights {', '.join(f'{w:g}' for w in data['weights'])}" if "weights" in data else ""
    return f"{data['rows']:,} rows{weights}"

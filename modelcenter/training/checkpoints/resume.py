"""Going on where a run was stopped: which checkpoint, and whether it is of the same run."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
from engine.checkpoint import from_rank_0, latest_checkpoint, load_checkpoint, together
from engine.optim import OptimManager
from modelcenter.data.examples import Examples
from modelcenter.hub.files.names import RUN_FILE
from modelcenter.models.base import Model
from modelcenter.training.config import TrainConfig
from modelcenter.training.config.common import PLACES
from modelcenter.training.output.json_text import json_text

CHECKPOINTS = "checkpoints"  # in output_dir

# Flags that say which rows a stream has, and in which order.
_OF_STREAMS = ("seed", "shuffle_window", "max_length", "document", "noise_density", "mean_span")

# Flags that a run may change when it goes on, and that change its scores.
_OF_SCORES = ("language", "num_beams", "max_new_tokens", "length_penalty", "no_repeat_ngram_size")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """A checkpoint to go on from. flags, data: of its run. forced: --resume named it, so flags may differ. own: it is
    in output_dir, not in the folder of another run."""

    checkpoint: Path
    step: int
    flags: dict[str, Any]
    data: Any
    forced: bool
    own: bool = True

    def check(self, cfg: TrainConfig, data: Any) -> None:
        """Raise ValueError for the first flag that says another run than the checkpoint is of, or for other data.
        Collective: rank 0 has written down the places that its node has things at, and looks at those alone."""
        with together(f"comparing the run with {self.checkpoint}"):
            self._check(cfg, data)

    def _check(self, cfg: TrainConfig, data: Any) -> None:
        now = json.loads(json.dumps(cfg.arithmetic(), default=str))
        seen = [name for name in self.flags if name in now and (engine.rank() == 0 or name not in PLACES)]
        others = {n: self.flags[n] for n in seen if _in_one_spelling(n, now[n]) != _in_one_spelling(n, self.flags[n])}
        remedy = f"--resume never starts anew, --resume {self.checkpoint} goes on all the same"
        if others and not self.forced:
            name, value = next(iter(others.items()))
            raise ValueError(
                f"{name}: got {now[name]!r}, but {self.checkpoint} is of a run with {value!r}. Give the same; or "
                + remedy
            )
        if identity(data) != identity(self.data) and not self.forced:
            raise ValueError(
                f"train_data: the rows are not those that {self.checkpoint} was trained on"
                f"{_differences(self.data, data)}. Give the same; or {remedy}"
            )
        for name in ("optimizer", "precision"):
            if name in others and (name == "optimizer" or "fp16" in (now[name], others[name])):  # fp16 scales the loss
                raise ValueError(
                    f"{name}: got {now[name]!r}, which has no use for the state that {self.checkpoint} keeps for "
                    f"{others[name]!r}. Give the same; or begin anew with its weights: --model {self.checkpoint} and "
                    "another --output_dir, without --resume"
                )
        if engine.rank() == 0:
            for name, value in others.items():
                log.warning("resume: %s is %r now, the checkpoint's run had %r", name, now[name], value)
            if identity(data) != identity(self.data):
                log.warning(
                    "resume: the rows of train_data are not those of the checkpoint's run%s",
                    _differences(self.data, data),
                )

    def another_stream(self, cfg: TrainConfig, data: Any) -> str | None:
        """The flag that makes the rows of a stream, or their order, others than those that the checkpoint has a place
        in; None: they are the same."""
        if identity(data) != identity(self.data):
            return "train_data"
        now = cfg.arithmetic()
        return next((name for name in _OF_STREAMS if name in now and now[name] != self.flags.get(name)), None)


def find_continuation(cfg: TrainConfig) -> Continuation | None:
    """The checkpoint that --resume means, if there is one. Collective.

    A run that --resume let begin with a checkpoint of another folder goes on from its own, once it has some: the same
    command, started again after a stop, loses nothing.

    Raises:
        ValueError: --resume names a place without a whole checkpoint of a run, or one beside which output_dir holds
            others that the run would be mixed up with.
    """
    if cfg.resume == "never" or cfg.overwrite_output_dir or cfg.dry_run or cfg.output_dir is None:
        return None
    home = Path(cfg.output_dir).absolute() / CHECKPOINTS
    newest = latest_checkpoint(home)
    if cfg.resume == "auto":
        return None if newest is None else _read(newest, cfg, forced=False, own=True)
    root = Path(cfg.resume).expanduser()
    if (root / CHECKPOINTS).is_dir():
        root = root / CHECKPOINTS
    path = latest_checkpoint(root)
    if newest is not None and (path is None or path.resolve() != newest.resolve()):
        if _about_checkpoint(newest).get("begun_with") == _place(cfg.resume):  # the same command, started again
            return _read(newest, cfg, forced=False, own=True)
    if path is None:
        raise ValueError(f"resume: {root} holds no whole checkpoint; give a run's folder or one of its checkpoints")
    path = path.resolve()
    if newest is None or path == newest.resolve():
        return _read(path, cfg, forced=True, own=newest is not None)
    if path.parent == home.resolve():
        raise ValueError(
            f"resume: {path} is not the newest checkpoint in {home}, {newest.name} is. To go on from that leave "
            "--resume out; to go back give another --output_dir"
        )
    raise ValueError(
        f"resume: {home} holds checkpoints of a run that did not begin with {cfg.resume}. To go on from them leave "
        "--resume out; to begin with it give another --output_dir"
    )


def _read(path: Path, cfg: TrainConfig, forced: bool, own: bool) -> Continuation:
    about = _about_checkpoint(path)
    if about["task"] != cfg.task:
        raise ValueError(f"resume: {path} is of a run of {about['task']}, this one is {cfg.task}")
    return Continuation(path, about["step"], about["flags"], about["data"], forced, own)


def _about_checkpoint(path: Path) -> dict[str, Any]:
    """What RUN_FILE says. Collective."""
    found: list[Any] = [None]
    with together(f"reading {path / RUN_FILE}"):
        if engine.rank() == 0:
            try:
                found[0] = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"resume: {path} is no checkpoint of a run: its {RUN_FILE}: {error}") from None
    return from_rank_0(found[0])


def _place(resume: str) -> str | None:
    """Where --resume lets a run begin, in one spelling; None where it names no place."""
    return None if resume in ("auto", "never") else str(Path(resume).expanduser().absolute())


def _in_one_spelling(name: str, value: Any) -> Any:
    """The value of a flag; that of a place may be relative."""
    place = name in PLACES and isinstance(value, str)
    return str(Path(value).expanduser().absolute()) if place else value


def load_state(checkpoint: Path, model: Model, manager: OptimManager) -> dict[str, Any]:
    """engine.load_checkpoint, but learning rates, decays and their like are what the flags say: --resume PATH may go on
    with others than the checkpoint's. Collective."""
    fixed = ("params", "lr", "lr_scale")  # the schedules set the rates
    groups = [
        [{name: value for name, value in group.items() if name not in fixed} for group in optimizer.param_groups]
        for optimizer in manager.optimizers
    ]
    schedules = [schedule.state_dict() for schedule in manager.lr_schedulers]
    state = load_checkpoint(checkpoint, model, manager)
    for optimizer, own in zip(manager.optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, own, strict=True):
            group.update(values)
    for schedule, values in zip(manager.lr_schedulers, schedules, strict=True):
        schedule.load_state_dict({**values, "num_iter": schedule.num_iter})
    return state


def best_counts(cfg: TrainConfig, metric: str, best: dict[str, Any]) -> bool:
    """Whether the best evaluation before a stop is still the one to beat: it is of the metric that is asked for now,
    and where its model may become the run's, it is in output_dir. Collective."""
    if not best:
        return True
    why = ""
    if best["metric"] != metric:
        why = f"best_metric is {metric.removeprefix('eval_')} now"
    elif cfg.best_metric is not None:
        assert cfg.output_dir is not None
        kept = best_checkpoint(Path(cfg.output_dir) / CHECKPOINTS)
        if kept is None or kept.name != f"step-{best['step']:08d}":
            why = "its checkpoint is not in output_dir, or damaged"
    if why:
        say_it_does_not_count(best, why)
    return not why


def say_it_does_not_count(best: dict[str, Any], why: str) -> None:
    """Say that an evaluation from before a stop is not one to beat."""
    if engine.rank() == 0:
        name = best["metric"].removeprefix("eval_")
        log.warning(
            "resume: the best so far, %s %.4g of step %d, does not count: %s", name, best["value"], best["step"], why
        )


def scored_on(cfg: TrainConfig, eval_set: Examples | None) -> dict[str, Any]:
    """What the scores of a run are of, by flag: only those of the same compare. {}: there are none."""
    if eval_set is None:
        return {}
    flags = {name: getattr(cfg, name) for name in _OF_SCORES if hasattr(cfg, name)}
    return json.loads(json.dumps({"eval_data": identity(eval_set.fingerprint()), **flags}))


def scored_otherwise(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The flag by which scores from before a stop do not compare with those of now; None: they do. Collective."""
    return from_rank_0(next((name for name in now if before and now[name] != before.get(name)), None))


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that `best` names; None: there is none, or a damaged one, which is said. Collective."""
    try:
        path = latest_checkpoint(checkpoints / "best")
    except ValueError as error:  # of a checkpoint that is named by itself; any other would be passed over
        if engine.rank() == 0:
            log.warning("the best checkpoint is passed over: %s", error)
        return None
    return None if path is None else path.resolve()


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
    _say_kept(continuation, most * (cfg.gradient_accumulation_steps or 1) * ranks, kept, "size")
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
    asked = cfg.batch_tokens * (cfg.gradient_accumulation_steps or 1) * ranks
    _say_kept(continuation, asked, kept, "tokens")
    cfg.global_batch_tokens, cfg.gradient_accumulation_steps = kept, parts // ranks


def _say_kept(continuation: Continuation, asked: int, kept: int, unit: str) -> None:
    """Say that a step has what it had, where flags that may differ would make another of it."""
    if continuation.forced and asked != kept and engine.rank() == 0:
        log.warning(
            "resume: a step keeps its global_batch_%s of %d, though the flags make %d; for that give --global_batch_%s "
            "too",
            unit, kept, asked, unit,
        )  # fmt: skip


def about_run(cfg: TrainConfig, step: int, data: Any, trained: list[str] | None) -> str:
    """The text of RUN_FILE. trained: parameters of the model that are trained whole beside an adapter."""
    flags = json.loads(json.dumps(cfg.arithmetic(), default=str))
    about = {"task": cfg.task, "step": step, "flags": flags, "data": data, "begun_with": _place(cfg.resume)}
    about |= {} if trained is None else {"trained": trained}
    return json_text(about, indent=1)


_HASHES = ("sha256", "source")  # fields of fingerprints that are by the files' paths


def identity(data: Any) -> Any:
    """Of a fingerprint, what does not change when files are moved."""
    if not isinstance(data, dict):
        return [identity(part) for part in data] if isinstance(data, list) else data
    return {
        name: sorted(value.values(), key=str) if name in _HASHES and isinstance(value, dict) else identity(value)
        for name, value in data.items()
    }


def _differences(before: Any, now: Any) -> str:
    """What two fingerprints say other things of, in brackets; nothing if they do not tell."""
    found = []
    if all(isinstance(data, dict) and "rows" in data for data in (before, now)):
        found.append(f"{_amount(now)} now, {_amount(before)} then")
    old, new = _files(before), _files(now)
    files = [f"{path} has changed" for path in old if path in new and old[path] != new[path]]
    files += [f"{path} is gone" for path in old if path not in new]
    files += [f"{path} is new" for path in new if path not in old]
    found += files[:5]
    return f" ({'; '.join(found)})" if found else ""


def _files(data: Any) -> dict[str, Any]:
    """path -> hash of all files in a fingerprint."""
    if isinstance(data, list):
        return {path: value for part in data for path, value in _files(part).items()}
    found: dict[str, Any] = {}
    for name, value in data.items() if isinstance(data, dict) else ():
        found |= value if name in _HASHES and isinstance(value, dict) else _files(value)
    return found


def _amount(data: dict[str, Any]) -> str:
    weights = f" with weights {', '.join(f'{w:g}' for w in data['weights'])}" if "weights" in data else ""
    return f"{data['rows']:,} rows{weights}"

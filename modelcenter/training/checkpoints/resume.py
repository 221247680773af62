"""Resuming a run that was stopped: finding the checkpoint, and checking that it belongs to the same run."""

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

import engine
from engine.checkpoint import latest_checkpoint, load_checkpoint
from engine.checkpoint.steps import newest as newest_checkpoint
from engine.collectives import from_rank_0, together
from engine.optim import OptimManager
from engine.tensors import local_tensor
from modelcenter.hub.files.json_files import read_json
from modelcenter.hub.files.names import RUN_FILE
from modelcenter.models.base import Model
from modelcenter.training.checkpoints.fingerprints import differences, identity
from modelcenter.training.config import TrainConfig
from modelcenter.training.config.common import PLACES
from modelcenter.training.output.folder import CHECKPOINTS
from modelcenter.training.output.json_text import json_text

# Flags that determine which parameters there are, and which of them the optimizer has.
_PARAMETER_FLAGS = ("freeze", "lora_rank", "lora_targets", "use_dora", "quantize", "share_embeddings")
# Flags that determine the rows of a stream and their order.
_STREAM_FLAGS = ("seed", "shuffle_window", "max_length", "document", "noise_density", "mean_span")
_RUN_FIELDS = (("task", str, "a text"), ("step", int, "a number"), ("flags", dict, "an object"))  # of RUN_FILE

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """A checkpoint that a run resumes from.

    Attributes:
        flags, data: those of the checkpoint's run. forced: --resume names it, so flags may differ.
        in_output_dir: it is in this run's output_dir, not in another run's folder.
    """

    checkpoint: Path
    step: int
    flags: dict[str, Any]
    data: Any
    forced: bool
    in_output_dir: bool = True

    def check(self, cfg: TrainConfig, data: Any) -> None:
        """Raise ValueError if flags or data differ from those of the checkpoint's run, naming the first such flag.
        Collective. The checkpoint has the paths of rank 0's node, so only rank 0 compares paths."""
        with together(f"comparing the run with {self.checkpoint}"):
            now = json.loads(json.dumps(cfg.arithmetic(), default=str))
            changed = self._changed_flags(now, cfg.unsaid)
            self._check_state_fits(now, changed)
            if not self.forced:
                self._check_same(now, changed, data)
            if engine.rank() == 0:
                self._warn_of_changes(now, changed, data)

    def _changed_flags(self, now: dict[str, Any], unsaid: Mapping[str, Any]) -> dict[str, Any]:
        """{flag: the value in the checkpoint's run} for flags whose values differ now.

        unsaid: what None means, for flags where that is known.
        """
        known = [name for name in self.flags if name in now and (engine.rank() == 0 or name not in PLACES)]

        def meant(name: str, value: Any) -> Any:
            return unsaid.get(name) if value is None else value

        before = {name: meant(name, self.flags[name]) for name in known}
        return {n: x for n, x in before.items() if absolute_path(n, x) != absolute_path(n, meant(n, now[n]))}

    def _check_same(self, now: dict[str, Any], changed: dict[str, Any], data: Any) -> None:
        remedy = f"`--resume never` starts over, `--resume {self.checkpoint}` continues nevertheless"
        if changed:
            name, value = next(iter(changed.items()))
            raise ValueError(
                f"{name}: got {now[name]!r}, but the run of {self.checkpoint} had {value!r}. Give the same; or "
                + remedy
            )
        if identity(data) != identity(self.data):
            raise ValueError(
                f"train_data: the rows differ from those that {self.checkpoint} was trained "
                f"on{differences(self.data, data)}. Give the same; or {remedy}"
            )

    def _check_state_fits(self, now: dict[str, Any], changed: dict[str, Any]) -> None:
        """Raise ValueError if the state in the checkpoint cannot be used, even if --resume names it."""
        weights = f"--model {self.checkpoint}"
        if self.flags.get("lora_rank") is not None:  # the checkpoint has to be exported first
            weights = f"`modelcenter export {shlex.quote(str(self.checkpoint))} DST`, then --model DST"
        remedy = (
            f"Give the same; or start a new run with its weights: {weights} and another --output_dir, without --resume"
        )
        for name, before in changed.items():
            if name in _PARAMETER_FLAGS:
                raise ValueError(
                    f"{name}: got {now[name]!r}, but the run of {self.checkpoint} had {before!r}, which trains other "
                    f"parameters. {remedy}"
                )
            if name == "optimizer" or (name == "precision" and "fp16" in (now[name], before)):  # fp16 has a loss scale
                raise ValueError(
                    f"{name}: got {now[name]!r}, which cannot use the state for {before!r} in {self.checkpoint}. "
                    f"{remedy}"
                )

    def sums_of_other_base(self, cfg: TrainConfig, model: Model) -> dict[str, float] | None:
        """`frozen_sums` of a model with an adapter, for `check_base`, if --model is not that of the checkpoint's run;
        else None. Collective; call it before the checkpoint is loaded."""
        if model.adapter is None or not from_rank_0(bool(self._changed_flags({"model": cfg.model}, {}))):
            return None
        return frozen_sums(model)

    def check_base(self, cfg: TrainConfig, model: Model, before: Mapping[str, float] | None) -> None:
        """Raise ValueError if another --model's weights are not those under the adapter in the checkpoint, since the
        saved adapter would name it as its base. Collective; call it after the checkpoint is loaded.

        Args:
            before: the result of `sums_of_other_base`.
        """
        if before is None:
            return
        with together(f"comparing the weights under the adapter with those of {self.checkpoint}"):
            if frozen_sums(model) != before:
                raise ValueError(
                    f"model: got {cfg.model!r}, but the adapter in {self.checkpoint} was trained on other weights. "
                    f"Give the model of that run, {self.flags['model']!r}; or start a new run with this one, without "
                    "--resume"
                )

    def _warn_of_changes(self, now: dict[str, Any], changed: dict[str, Any], data: Any) -> None:
        for name, value in changed.items():
            log.warning("resume: %s is %r now, the checkpoint's run had %r", name, now[name], value)
        if identity(data) != identity(self.data):
            log.warning(
                "resume: the rows of train_data are not those of the checkpoint's run%s", differences(self.data, data)
            )

    def changed_stream_flag(self, cfg: TrainConfig, data: Any) -> str | None:
        """The flag that changes the rows of a stream, or their order, so that the checkpoint's position in it is not
        valid; None: there is none."""
        if identity(data) != identity(self.data):
            return "train_data"
        now = cfg.arithmetic()
        return next((name for name in _STREAM_FLAGS if name in now and now[name] != self.flags.get(name)), None)


def find_continuation(cfg: TrainConfig) -> Continuation | None:
    """The checkpoint to resume from, as --resume says, if there is one. Collective.

    A run that --resume started from a checkpoint in another folder resumes from its own checkpoints once it has some,
    so repeating the same command after a stop loses nothing.

    Raises:
        ValueError: there is no complete checkpoint where --resume says, output_dir holds checkpoints of another run,
            which would be mixed up with this run's, or all of its checkpoints are damaged: starting over would remove
            what may be repaired.
    """
    if cfg.resume == "never" or cfg.overwrite_output_dir or cfg.dry_run or cfg.output_dir is None:
        return None
    home = Path(cfg.output_dir).absolute() / CHECKPOINTS
    newest, damaged = newest_checkpoint(home, verify=False)
    if newest is None and damaged:
        raise ValueError(
            f"resume: {home} has no checkpoint that is whole ({damaged[0]}). Restore the file, give another "
            "--output_dir, or start over with --resume never, which removes these checkpoints"
        )
    if cfg.resume == "auto":
        return None if newest is None else _read(newest, cfg, forced=False, in_output_dir=True)
    root = Path(expanduser(cfg.resume))
    if (root / CHECKPOINTS).is_dir():
        root = root / CHECKPOINTS
    path = latest_checkpoint(root)
    if newest is not None and (path is None or path.resolve() != newest.resolve()):
        if _read_run_file(newest).get("begun_with") == _start_of(cfg.resume):  # the same command, started again
            return _read(newest, cfg, forced=False, in_output_dir=True)
    if path is None:
        fix = "give a run's folder or one of its checkpoints"
        if (Path(expanduser(cfg.resume)) / "model").is_dir():  # a finished run that kept no checkpoint
            fix = f"to start a run with its weights, give --model {cfg.resume}"
        raise ValueError(f"resume: {root} has no complete checkpoint; {fix}")
    path = path.resolve()
    if newest is None or path == newest.resolve():
        return _read(path, cfg, forced=True, in_output_dir=newest is not None)
    if path.parent == home.resolve():
        raise ValueError(
            f"resume: got {path}, but the newest checkpoint in {home} is {newest.name}. To continue from that, leave "
            "--resume out; to go back, give another --output_dir"
        )
    raise ValueError(
        f"resume: {home} has checkpoints of a run that did not start from {cfg.resume}. To continue that run, leave "
        f"--resume out; to start from {cfg.resume}, give another --output_dir"
    )


def _read(path: Path, cfg: TrainConfig, forced: bool, in_output_dir: bool) -> Continuation:
    run = _read_run_file(path)
    if run["task"] != cfg.task:
        raise ValueError(f"resume: got {path}, a checkpoint of the task {run['task']}, expected one of {cfg.task}")
    return Continuation(path, run["step"], run["flags"], run.get("data"), forced, in_output_dir)


def _read_run_file(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's RUN_FILE. Collective."""
    content: dict[str, Any] = {}
    with together(f"reading {path / RUN_FILE}"):
        if engine.rank() == 0:
            try:
                content = read_json(path / RUN_FILE)
            except ValueError as error:
                raise ValueError(f"resume: {path} is not a checkpoint of a run: {error}") from None
            for name, kind, expected in _RUN_FIELDS:
                if not isinstance(value := content.get(name), kind):
                    raise ValueError(f"resume: {path / RUN_FILE} is damaged: {name} is {value!r}, expected {expected}")
    return from_rank_0(content)


def run_file_text(cfg: TrainConfig, step: int, data: Any, trained: list[str] | None) -> str:
    """The text of a checkpoint's RUN_FILE.

    Args:
        data: fingerprint of the training rows. trained: parameters of the model that are trained whole beside an
            adapter; None: there is no adapter.
    """
    flags = json.loads(json.dumps(cfg.arithmetic(), default=str))
    content = {"task": cfg.task, "step": step, "flags": flags, "data": data, "begun_with": _start_of(cfg.resume)}
    content |= {} if trained is None else {"trained": trained}
    return json_text(content, indent=1)


def _start_of(resume: str) -> str | None:
    """The absolute path of what --resume starts a run from; None if it names none."""
    return None if resume in ("auto", "never") else str(Path(expanduser(resume)).absolute())


def absolute_path(name: str, value: Any) -> Any:
    """The value of a flag, made absolute if it is a path."""
    is_path = name in PLACES and isinstance(value, str)
    return str(Path(expanduser(value)).absolute()) if is_path else value


def frozen_sums(model: Model) -> dict[str, float]:
    """The sum of this rank's part of each frozen parameter, which tells models apart."""
    frozen = ((name, local_tensor(p)) for name, p in model.named_parameters() if not p.requires_grad)
    return {name: tensor.sum(dtype=torch.float64).item() for name, tensor in frozen}


def load_state(checkpoint: Path, model: Model, manager: OptimManager) -> dict[str, Any]:
    """engine.load_checkpoint, except that learning rates, decays and the like are those of the flags, which may differ
    from the checkpoint's with --resume PATH. Collective."""
    groups = [
        [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        for optimizer in manager.optimizers
    ]
    schedules = [schedule.state_dict() for schedule in manager.lr_schedulers]
    state = load_checkpoint(checkpoint, model, manager)
    for optimizer, settings in zip(manager.optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
    for schedule, values in zip(manager.lr_schedulers, schedules, strict=True):
        schedule.load_state_dict({**values, "num_iter": schedule.num_iter})  # also sets the learning rates
    return state

"""Models by the names that users give them: the folder of a run, or anything that from_pretrained takes."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from modelcenter import registry
from modelcenter.command_line.errors import flag_in_errors
from modelcenter.command_line.yaml_file import read_mapping
from modelcenter.convert.config_map import names_of_numbers
from modelcenter.hub.files.cross_encoder_files import is_cross_encoder, stored_score_tokens
from modelcenter.hub.files.described_tasks import described_task
from modelcenter.hub.files.names import CONFIG_FILE, GENERATOR
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import ModelFiles, read_config, resolve, resolve_file
from modelcenter.hub.sidecar import SidecarFiles
from modelcenter.registry import model_type_of, nearest, own_preset
from modelcenter.training.config import TrainConfig
from modelcenter.training.tasks import TASKS, TaskInfo, task_of_head, tasks_of


@dataclass
class TrainedModel:
    """A trained model: its folder or Hub name, and the task and flags of the run that trained it, if they are known."""

    source: str
    task: str | None = None
    run: TrainConfig | None = None

    @classmethod
    def find(cls, name: str) -> "TrainedModel":
        """The model of a run's folder, or of anything else that modelcenter.from_pretrained takes.

        Raises:
            ValueError: the folder is of a run that left no model, or only an adapter.
        """
        folder = Path(expanduser(name))
        if not (folder / "config.yaml").is_file() or (folder / CONFIG_FILE).is_file():
            return cls(name)
        if not (folder / "model" / CONFIG_FILE).is_file():
            check_leaves_model(folder)
            if own_preset(name) is not None:  # whose name the run's folder has
                return cls(name)
            last = folder / "checkpoints" / "last"
            instead = f"; its newest checkpoint is {last}" if last.exists() else ""
            raise ValueError(
                f"{folder} is a run without a model, because it did not finish. The command that started it continues "
                f"it{instead}"
            )
        task = _task_of_run(folder / "config.yaml")
        return cls(str(folder / "model"), task, TASKS[task].flags().from_yaml(folder / "config.yaml"))

    def task_info(self, revision: str | None = None, asked: str | None = None) -> TaskInfo:
        """The task of the model: the one that is asked for, else the run's, else the one that the head of the
        checkpoint is for; a head with one label is a reranker's where the files say that it was made as one.

        Raises:
            ValueError: there is no such task, or none is for the head of the checkpoint.
        """
        if asked is not None:
            if asked not in TASKS:
                raise ValueError(f"task: unknown task {asked!r}.{nearest(asked, TASKS)} Tasks: {', '.join(TASKS)}")
            return TASKS[asked]
        if self.task is not None:
            return TASKS[self.task]
        files = self._files(HubOptions(revision))
        config, named = files.config, files.config.get("architectures")
        arch = registry.get(model_type_of(config), named).arch_map()
        sidecar = SidecarFiles(files.directory, files.repo, HubOptions(files.revision))
        head = described_task(sidecar.file, arch) or arch.declared_task(named)
        task = task_of_head(arch.model_type, head or "base")
        classifies = head == "sequence-classification" or stored_score_tokens(sidecar.file)
        if classifies and is_cross_encoder(config, sidecar.file):
            task = "reranking"
        if task is None:
            heads = ", ".join(sorted({head for info in TASKS.values() for head in info.heads}))
            raise ValueError(
                f"{self.source}: got a model for {head or 'base'}, expected one that was trained for {heads}; "
                "`modelcenter finetune TASK` trains it"
            )
        return TASKS[task]

    def described(self, revision: str | None = None) -> str | None:
        """The task that files other than config.json describe (hub.files.described_tasks); None: none."""
        files = self._files(HubOptions(revision))
        return described_task(SidecarFiles(files.directory, files.repo, HubOptions(files.revision)).file)

    def _files(self, options: HubOptions) -> ModelFiles:
        """Its files, with config.json in Hugging Face's form; for a checkpoint of ModelCenter, inferred from its
        weights."""
        found = resolve(self.source, options, weights=Path(expanduser(self.source)).is_file())
        if model_type_of(found.config) is not None:
            return found
        from modelcenter.hub.legacy import in_hf_form  # torch comes with it

        return in_hf_form(resolve(self.source, options))


def check_leaves_model(folder: Path) -> None:
    """Raise ValueError for a finished run that left no model because its weights are in 4 bits."""
    flags, adapter = read_mapping(folder / "config.yaml"), folder / "adapter"
    kind = flags.get("quantize")
    if kind is not None and adapter.is_dir():
        raise ValueError(
            f"{folder} is a run with weights in 4 bits ({kind}), which writes {adapter} but no model. "
            + how_to_merge(flags, _task_of_run(folder / "config.yaml"), str(adapter))
        )


def how_to_merge(flags: Mapping[str, Any], task: str, adapter: str) -> str:
    """The command that makes a model of the adapter of a run with weights in 4 bits, in a sentence.

    Args:
        flags, task: of the run.
    """
    head = TASKS[task].heads[0]
    labels = " --labels NAMES" if head.endswith("-classification") else ""
    base = shlex.quote(str(flags.get("model")))
    base += f" --revision {shlex.quote(str(flags['revision']))}" if flags.get("revision") else ""
    names = ", where NAMES are the names of the labels in the order of the run" if labels else ""
    return (
        f"`modelcenter export {base} --adapter {shlex.quote(adapter)} --task {head}{labels} --output DST` makes a "
        f"model{names}"
    )


def _task_of_run(path: Path) -> str:
    task = read_mapping(path).get("task", "classification")
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"{path}: unknown task {task!r}; tasks: {', '.join(TASKS)}")
    return task


def resolve_model_names(cfg: Any) -> None:
    """In the flags that name models, replace runs by their models, and local paths by absolute ones. An evaluation of
    DPO may run in another folder, and looks for the model that its run began with.

    Raises:
        ValueError: the run left no model.
    """
    for name in ("model", "tokenizer", "reference", "teacher", "generator"):
        given = getattr(cfg, name, None)
        if given is not None:
            own = Path(expanduser(given)) / GENERATOR
            left = name == GENERATOR and (own / CONFIG_FILE).is_file()  # by a run of replaced tokens, beside its model
            source = str(own) if left else TrainedModel.find(given).source
            path = Path(expanduser(source))
            local = (path / CONFIG_FILE).is_file() or (path.suffix and path.is_file())
            setattr(cfg, name, str(path.absolute()) if local else source)


def class_names(config: dict[str, Any]) -> list[str]:
    """The names of the classes of a checkpoint's head, in order; empty if its configuration has none."""
    named = config.get("id2label") or names_of_numbers(config)
    if not isinstance(named, dict) or not all(str(number).isdecimal() for number in named):
        return []
    return [str(named[number]) for number in sorted(named, key=int)]


def check_family(cfg: TrainConfig, head: str) -> dict[str, Any]:
    """Make sure that the model is of a family that has the head of the task. Only its configuration is read.

    Returns:
        The configuration, in Hugging Face's names.

    Raises:
        ValueError: there is no such model, or it is of a family without the head; those with it are named.
    """
    path = Path(expanduser(str(cfg.model)))
    with flag_in_errors("model"):
        if path.is_file() and not cfg.from_scratch:
            values = resolve_file(path).config  # weights, whose configuration is in the same folder
        else:
            values = read_config(cfg.model, HubOptions(cfg.revision))
    kind = values.get("model_type")
    if kind is None:  # a checkpoint of ModelCenter, known by its weights
        return values
    spec = registry.get(kind, values.get("architectures"))
    heads, families = spec.arch_map().tasks, TASKS[cfg.task].families or tuple(registry.ARCHITECTURES)
    if head in heads and spec.model_type in families:
        return values
    able = sorted(name for name in families if head in registry.ARCHITECTURES[name].arch_map().tasks)
    verb = TASKS[cfg.task].verb
    own = {
        v: ", ".join(name for name, info in tasks_of(v).items() if info.takes(spec.model_type, heads))
        for v in ("finetune", "pretrain")
    }
    raise ValueError(
        f"model: {cfg.model} is of the family {spec.model_type}, but {verb} {cfg.task.removeprefix(f'{verb}-')} needs "
        f"one of {', '.join(able)}. {spec.model_type} is for "
        f"{'; '.join(f'{v} {n}' for v, n in own.items() if n) or 'no task'}"
    )

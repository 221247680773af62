"""Saving a model as a Hugging Face directory or a distributed checkpoint, and pushing it to the Hub."""

import functools
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

import engine
from engine.checkpoint import all_tensors, named_tensors, save_model, whole_tensor
from engine.collectives import from_rank_0, gather_objects, together
from modelcenter import registry
from modelcenter.convert.layout import compile_layout
from modelcenter.convert.rules import ArchMap
from modelcenter.convert.stream import export_tensor
from modelcenter.hub.access_tokens import without_tokens
from modelcenter.hub.card import make_card, read_card
from modelcenter.hub.dtypes import parse_dtype
from modelcenter.hub.files.atomic_directory import new_directory
from modelcenter.hub.files.described_tasks import write_described
from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.multi_vector_files import marking_prefixes
from modelcenter.hub.files.names import (
    CARD_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATES_FOLDER,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILES,
)
from modelcenter.hub.files.occupied import refuse_occupied
from modelcenter.hub.files.safetensors import Entry, SafetensorsWriter, parse_size, plan_files, write_index
from modelcenter.hub.files.sharded_writer import ShardedWriter
from modelcenter.hub.remote.push import upload
from modelcenter.hub.tokenizer import load_tokenizer, mark_prompts, save_tokenizer
from modelcenter.registry import ARCHITECTURES, shipped_file

log = logging.getLogger("modelcenter")

FORMATS = ("hf", "distributed")


def save_pretrained(
    model: Any,
    path: str | os.PathLike[str],
    format: str = "hf",
    *,
    max_shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    card: Mapping[str, Any] | str | None = None,
) -> None:
    """Save a model. Collective. The directory appears when it is complete, or not at all.

    An earlier checkpoint at `path` is replaced; other files are kept, so a tokenizer may be saved before or after.

    Args:
        path: a directory; its parents are created.
        format: "hf": for transformers. "distributed": shards that load on any number of ranks.
        max_shard_size: maximum bytes of a file in format "hf", as a number or "5GB".
        dtype: of the weights in format "hf"; None: that of the model.
        tokenizer: a transformers tokenizer; None: the one at `path`, else that of the checkpoint from which the model
            was loaded, which is downloaded if it is not cached.
        card: the README.md, or details for it (hub.card.make_card); None: a short one, unless there is one.

    Raises:
        ValueError: the format, dtype or size is unknown; the path cannot be written, or is an adapter's or a run's. On
            every rank.
    """
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, expected {' or '.join(FORMATS)}")
    weight_dtype, shard_bytes = parse_dtype(dtype), parse_size(max_shard_size)
    if format == "distributed" and weight_dtype is not None:
        raise ValueError("dtype: a distributed checkpoint holds the parameters as they are; export with format='hf'")
    _check_adapter(model, format)
    place, activity = Path(expanduser(path)), f"saving to {path}"
    export = _Export(model, weight_dtype, shard_bytes)
    # Outermost, because the last step, renaming the directory, can fail on rank 0 alone.
    with together(activity), _as_value_errors(), ExitStack() as stack:
        directory, has_tokenizer = Path(), False
        with together(activity):
            if engine.rank() == 0:
                refuse_occupied(place)
                directory = stack.enter_context(new_directory(place))
                if card is None and (place / CARD_FILE).is_file():
                    card = read_card(place / CARD_FILE)
                has_tokenizer = any((place / name).is_file() for name in TOKENIZER_FILES)
                if format == "hf":
                    write_texts(model, directory, export.dtype, tokenizer, card, has_tokenizer)
        directory = from_rank_0(directory)
        if format == "hf":
            export.write(directory, activity)
        else:
            _write_distributed(
                model, directory, lambda inner: write_texts(model, inner, export.dtype, tokenizer, card, has_tokenizer)
            )


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Turn another rank's OSErrors into ValueErrors, as new_directory does with this rank's."""
    try:
        yield
    except OSError as error:
        raise ValueError(str(error)) from error


def _write_distributed(model: Any, directory: Path, write_files: Callable[[Path], None]) -> None:
    """Fill a directory with a distributed checkpoint, which is first written to a separate folder. Collective."""
    inner = directory / "checkpoint"
    save_model(inner, model, write_files)
    if engine.rank() == 0:
        for item in inner.iterdir():
            item.rename(directory / item.name)
        inner.rmdir()


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    max_shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    card: Mapping[str, Any] | str | None = None,
) -> str:
    """Save a model and upload it. Collective. Creates the repository if it does not exist.

    Args:
        repo_id: "owner/name". token: with write access; None: HF_TOKEN or that of `hf auth login`.
        private: for a new repository; True is refused if an existing one is public.
        revision: branch to commit to, created if it does not exist, or a pull request (refs/pr/1).
        create_pr: open a pull request with the commit instead of changing the branch.
        The rest: as in save_pretrained; the repository's card and tokenizer are kept unless others are given.

    Returns:
        The URL of the commit, or of the new pull request.

    Raises:
        ValueError: the Hub denies the upload or cannot be reached; as save_pretrained.
    """
    with tempfile.TemporaryDirectory(prefix="modelcenter-push-") as scratch:
        target = Path(from_rank_0(scratch)) / "model"
        save_pretrained(model, target, max_shard_size=max_shard_size, dtype=dtype, tokenizer=tokenizer, card=card)
        address = ""
        with together(f"pushing to {repo_id}", patient=True):
            if engine.rank() == 0:
                keep: tuple[tuple[str, ...], ...] = ((CARD_FILE,),) if card is None else ()
                keep += ((*TOKENIZER_FILES, f"{TEMPLATES_FOLDER}/*"),) if tokenizer is None else ()
                pushed = upload(target, repo_id, token, private, revision, commit_message, keep, create_pr)
                address = pushed["address"]
        return from_rank_0(address)


def _check_adapter(model: Any, format: str) -> None:
    """Raise ValueError for a model whose adapter is not merged, or is merged but cannot be saved in this format."""
    adapter = getattr(model, "adapter", None)
    if adapter is not None and not adapter.merged:
        merge = ", or merge it with merge_lora first" if adapter.kind == "lora" else "; it cannot be merged"
        raise ValueError(
            f"the model has an adapter ({adapter.kind}): save it with modelcenter.adapters.save_adapter{merge}"
        )
    if format == "distributed" and adapter is not None:
        raise ValueError("format: a sharded model whose adapter was merged saves with format='hf' only")


class _Export:
    """A model as its hub tensors, in the order of the files to write. The same on every rank."""

    def __init__(self, model: Any, dtype: torch.dtype | None, max_bytes: int):
        arch: ArchMap = registry.get(model.config.model_type).arch_map()
        self.model, self.held, self.parameters = model, named_tensors(model), all_tensors(model)
        if (adapter := getattr(model, "adapter", None)) is not None:
            names = adapter.layout.native_shapes  # once merged, the adapter's own parameters add nothing
            self.parameters = {name: t for name, t in self.parameters.items() if name in names}
        self.dtype = dtype or next(iter(self.parameters.values())).dtype
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.layout = layout = compile_layout(arch, model.task, model.config, shapes)
        keys = {key: key for key in layout.shapes} | {tie.hub: tie.to for tie in layout.ties.values() if tie.write}
        self.key_of = {layout.written[name]: key for name, key in keys.items()}
        entries: list[Entry] = []
        for name, key in self.key_of.items():
            held = [self.parameters[native].dtype for native in layout.natives(key)]  # a user may have cast some
            own = functools.reduce(torch.promote_types, held)
            entries.append((name, own if dtype is None or key in layout.buffers else dtype, layout.shapes[key]))
        self.files = plan_files(entries, max_bytes)

    def write(self, directory: Path, activity: str) -> None:
        """Write the files. Collective. Each rank writes its slices, unless some cannot see the directory of rank 0."""
        first = engine.rank() == 0
        writer = ShardedWriter(directory, self.files, self.layout, self.key_of)
        with together(activity):
            if first:
                writer.allocate()
        if not all(gather_objects(writer.is_visible())):
            log.info("not all ranks can access %s: rank 0 gathers and writes the model", directory)
            with together(activity):
                self._write_gathered(directory) if first else deque(self._gathered(), maxlen=0)
        else:
            with together(activity):
                try:
                    done = writer.write(self.model)
                except OSError as error:
                    why = error.strerror or error
                    raise ValueError(f"{activity} failed: {why}; nothing was changed there") from error
            assert sum(gather_objects(done)) == writer.numel, "some element is written by no rank or by two"
        with together(activity):
            if first:
                write_index(directory, self.files)

    @torch.no_grad()
    def _gathered(self) -> Iterator[dict[str, torch.Tensor]]:
        """For each tensor to write, its whole parameters, on the CPU. Collective."""
        held: dict[str, torch.Tensor] = {}
        for file in self.files:
            for name, _, _ in file.entries:
                natives = self.layout.natives(self.key_of[name])
                held = {n: held[n] if n in held else self._whole(n) for n in natives}
                yield held

    @torch.no_grad()
    def _write_gathered(self, directory: Path) -> None:
        """Write the files on rank 0, while the other ranks participate in the gathering."""
        gathered = self._gathered()
        try:
            for file in self.files:
                with SafetensorsWriter(directory / file.name, file.entries) as writer:
                    for name, dtype, _ in file.entries:
                        natives = {native: values.to(dtype) for native, values in next(gathered).items()}
                        writer.write(export_tensor(self.layout, self.key_of[name], natives))
        finally:
            deque(gathered, maxlen=0)  # also after a failure, because the other ranks wait for this one

    def _whole(self, name: str) -> torch.Tensor:
        full = whole_tensor(self.model, self.held, name)
        return self.parameters[name] if full is None else full.detach().cpu()  # other stages do not read it


def write_texts(
    model: Any, directory: Path, dtype: torch.dtype, tokenizer: Any, card: Any, has_tokenizer: bool = False
) -> None:
    """Write everything except the weights: config.json, README.md, and the tokenizer (None: the model's own, unless
    there is one).

    has_tokenizer: the directory to be replaced has one, perhaps with tokens that the model's own lacks.
    """
    arch: ArchMap = registry.get(model.config.model_type).arch_map()
    hf_class = arch.tasks[model.task].hf_class
    write_json(directory / CONFIG_FILE, arch.config.write(model.config, hf_class, str(dtype).removeprefix("torch.")))
    for name in arch.files:
        shutil.copyfile(shipped_file(name), directory / Path(name).name)
    if model.generation_config:
        write_json(directory / GENERATION_FILE, model.generation_config)
    write_described(model, directory)
    text = without_tokens(card) if isinstance(card, str) else make_card(model, hf_class, card)
    (directory / CARD_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
    elif not has_tokenizer and (report := getattr(model, "load_report", None)) is not None:
        report.sidecar.copy_tokenizer(directory)
        _mark_in_tokenizer(directory, marking_prefixes(report.sidecar.file) if model.task == "multi-vector" else ())


def _mark_in_tokenizer(directory: Path, prompts: Sequence[str]) -> None:
    """See mark_prompts, for the tokenizer in a directory: the form in which files are written does not say that a
    prompt is a token."""
    if prompts and (directory / TOKENIZER_CONFIG_FILE).is_file():
        tokenizer = load_tokenizer(directory)
        if mark_prompts(tokenizer, prompts):
            save_tokenizer(tokenizer, directory)


def write_own_texts(model: Any, directory: Path) -> None:
    """Write the files with which a checkpoint can be exported by itself: those of write_texts, with the model's own
    tokenizer.

    Does nothing for an architecture or a task that is not registered and so cannot be exported.
    """
    spec = ARCHITECTURES.get(model.config.model_type)
    if spec is not None and model.task in spec.arch_map().tasks:
        write_texts(model, directory, model.dtype, None, None)

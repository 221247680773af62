"""Reading adapters in peft's format, trained on our model or on transformers'."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import named_tensors
from engine.init import write_
from engine.names import clean_name
from modelcenter.adapters.low_rank import HubModule, LowRankUpdate, hub_modules, to_native
from modelcenter.adapters.modules_to_save import check_modules
from modelcenter.adapters.peft_format import (
    ADAPTER_NAME,
    CONFIG_FILE,
    PICKLE_FILE,
    PREFIX,
    PROMPT_PREFIX,
    PROMPT_TENSOR,
    WEIGHTS_FILE,
)
from modelcenter.adapters.state import embedding_width, layout_of
from modelcenter.convert.layout import Layout
from modelcenter.convert.match import to_key
from modelcenter.convert.pieces import HUB, NATIVE, view
from modelcenter.convert.rules import ArchMap
from modelcenter.hub.files.dense_files import add_dense_weights
from modelcenter.hub.files.described_tasks import dense_steps, described_task
from modelcenter.hub.files.reader import FileSource
from modelcenter.hub.files.weight_files import open_weight_files
from modelcenter.hub.remote.download import HubOptions, download_file, from_hub_or_cache, is_offline
from modelcenter.hub.resolve import is_hub_id
from modelcenter.hub.sidecar import SidecarFiles
from modelcenter.models.base import Model

# Fields of peft's config whose effect we do not reproduce; files that use one are refused.
UNSUPPORTED = (
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "alora_invocation_tokens",
    "kasa_config",
    "monteclora_config",
)
# Initialisations (init_lora_weights) that subtract the adapter's initial update from the base's weights.
CHANGE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
# Parts of tensor names that peft saves, sometimes in addition to the plain name.
_WRAPPED = (".original_module.", ".modules_to_save.", ".base_layer.")
_MERGE = "merge it with peft (merge_and_unload) and load the merged model"
# peft's types that add tokens or states instead of changing weights.
_NO_WEIGHTS = ("PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")


@dataclass(frozen=True)
class AdapterValues:
    """The values of an adapter on disk for one model, under our names.

    Attributes:
        updates: {linear layer: its update}, in the order of the model.
        saved: {parameter of a fully trained module: its value}.
        prompt: (count, width); None for LoRA.
    """

    updates: dict[str, LowRankUpdate] = field(default_factory=dict)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    prompt: torch.Tensor | None = None


@dataclass(frozen=True)
class AdapterFile:
    """The content of an adapter on disk; `lora_values` and `prompt_values` convert it for a model."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def alpha(self) -> float:
        return self.number("lora_alpha")

    def number(self, name: str, usual: float | None = None) -> float:
        """A number in the config. Raises ValueError if it is missing and has no default, or is not a number."""
        value: Any = self.config.get(name, usual)
        if not _is_number(value):
            raise self.wrong(name, "a finite number")
        return value

    def flag(self, name: str) -> bool:
        """A boolean in the config, False if missing. Raises ValueError if it is neither true nor false."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def wrong(self, name: str, expected: str) -> ValueError:
        """The error for an invalid field of the config."""
        found = repr(self.config[name]) if name in self.config else "nothing"
        return ValueError(f"{self.directory / CONFIG_FILE}: {name} is {found}, expected {expected}")

    def lora_values(self, model: Model, layout: Layout) -> AdapterValues:
        """The updates of LoRA, and the modules saved with them.

        Raises:
            ValueError: the type of adapter is not supported, or it does not fit the model.
        """
        self._check_kind()
        self._check_alphas()
        self._check_wrapped()
        arch, _ = layout_of(model)
        lora: dict[str, dict[str, torch.Tensor]] = {}  # {key of a weight: its A, B and magnitudes}
        names: dict[str, str] = {}  # of the modules in the trained model, which may have another task
        copies: dict[str, str] = {}
        saved: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            plain = name.removeprefix(PREFIX)
            module, mark, part = plain.partition(".lora_")
            key = to_key(arch, f"{module}.weight" if mark else plain)
            key = layout.aliases.get(key, key)
            if mark:
                self._check_adapted(model, layout, layout.ties[key].to if key in layout.ties else key, module)
                lora.setdefault(key, {})[part.removesuffix(".weight")] = tensor
                names[key] = module
            elif key in layout.ties:
                copies[name] = layout.ties[key].to
            elif not any(mark in name for mark in _WRAPPED):
                self._add_saved(saved, layout, key, name, model.config)
        if not lora:
            raise ValueError(f"{self.directory}: none of its tensors is a lora_A or lora_B, so it updates nothing")
        self._check_copies(arch, layout, copies)
        check_modules(layout, saved, {to_key(arch, name.removeprefix(PREFIX)) for name in copies})
        if unknown := [key for key in lora if key not in layout.shapes]:
            raise ValueError(
                f"{self.directory}: {len(unknown)} of its modules are not in this {arch.model_type}: "
                f"{', '.join(unknown[:5])}. Was it trained on another architecture or task?"
            )
        adapted = {native.removesuffix(".weight") for key in lora for native in layout.natives(key)}
        modules = hub_modules(layout, adapted)
        updates = to_native(modules, lambda module: self._update(module, names[module.key], lora[module.key]))
        order = [name.removesuffix(".weight") for name in layout.native_shapes]
        return AdapterValues({name: updates[name] for name in order if name in updates}, saved)

    def prompt_values(self, model: Model, layout: Layout) -> AdapterValues:
        """A tuned prompt, and the modules saved with it.

        Raises:
            ValueError: the prompt or a module does not fit the model.
        """
        arch, _ = layout_of(model)
        prompt = self.tensors[PROMPT_TENSOR]
        if prompt.shape[1] != (width := embedding_width(model)):
            raise ValueError(
                f"{self.directory}: the prompt is {prompt.shape[1]} wide, the model's embeddings are {width}"
            )
        saved: dict[str, torch.Tensor] = {}
        for name in self.tensors:
            if name != PROMPT_TENSOR:
                self._add_saved(saved, layout, to_key(arch, name.removeprefix(PROMPT_PREFIX)), name, model.config)
        return AdapterValues(saved=saved, prompt=prompt[: self.config["num_virtual_tokens"]])

    def _add_saved(self, saved: dict[str, torch.Tensor], layout: Layout, key: str, name: str, config: Any) -> None:
        """Add the tensor `name`, `key` in the model, to the fully trained parameters."""
        tensor, key = self.tensors[name], layout.aliases.get(key, key)
        if key not in layout.shapes:
            raise ValueError(f"{self.directory}: tensor {name!r} is not in this model; was it trained on another task?")
        if tuple(tensor.shape) != layout.shapes[key]:
            fix = "change num_labels"
            if layout.shapes[key][0] == getattr(config, "vocab_size", None):
                rows = tensor.shape[0] if tensor.dim() else 0
                fix = f"tokens were added: call model.resize_token_embeddings({rows}), then load_lora(..., model)"
            raise ValueError(
                f"{self.directory}: tensor {name!r} has shape {tuple(tensor.shape)}, expected {layout.shapes[key]}; "
                f"{fix}"
            )
        for piece in layout.pieces[key]:
            native = piece.names[NATIVE]
            if native not in saved:
                saved[native] = torch.zeros(layout.native_shapes[native], dtype=tensor.dtype)
            view(saved[native], piece, NATIVE).copy_(view(tensor, piece, HUB))

    def _update(self, module: HubModule, name: str, parts: Mapping[str, torch.Tensor]) -> LowRankUpdate:
        """The update of a module, whose name in the file is `name`."""
        from peft.utils.other import get_pattern_key

        self._check_shapes(module, parts)
        a, b = parts["A"].float(), parts["B"].float()
        if a.shape[0] != b.shape[1]:
            raise ValueError(f"{self.directory}: {module.name} has ranks {a.shape[0]} in A and {b.shape[1]} in B")
        alphas = self.config.get("alpha_pattern") or {}
        alpha = float(alphas.get(get_pattern_key(list(alphas), name), self.alpha))
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if self.flag("use_rslora") else rank)
        magnitude = parts.get("magnitude_vector")
        if self.flag("use_dora") != (magnitude is not None):
            raise ValueError(f"{self.directory}: use_dora and the tensors of {module.name} contradict each other")
        return LowRankUpdate(a, b, scale, None if magnitude is None else magnitude.float())

    def _check_shapes(self, module: HubModule, parts: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError unless A is (rank, inputs) and B (outputs, rank), with a rank above 0."""
        expected = {"A": ("rank", module.inputs), "B": (module.outputs, "rank")}
        for part, sizes in expected.items():
            tensor = parts.get(part)
            shape = () if tensor is None else tuple(tensor.shape)
            fits = len(shape) == 2 and all(size in ("rank", n) for size, n in zip(sizes, shape, strict=True))
            if not fits or 0 in shape:
                found = "no tensor" if tensor is None else f"shape {shape}"
                want = f"({sizes[0]}, {sizes[1]})" + (" with a rank of at least 1" if 0 in shape else "")
                raise ValueError(f"{self.directory}: {module.name}.lora_{part} has {found}, expected {want}")

    def _check_kind(self) -> None:
        """Raise ValueError for fields of peft's config whose effect is not reproduced."""
        used = [name for name in UNSUPPORTED if self.config.get(name)]
        if self.config.get("bias", "none") != "none":
            used.append("bias")
        if used:
            raise ValueError(
                f"{self.directory}: it uses {', '.join(used)}, which is not supported; train it without, or {_MERGE}"
            )
        start = self.config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(CHANGE_BASE):
            raise ValueError(
                f"{self.directory}: init_lora_weights is {start!r}, so it fits only a modified base; let peft convert "
                f"it (path_initial_model_for_weight_conversion), or {_MERGE}"
            )

    def _check_alphas(self) -> None:
        """Raise ValueError unless alpha_pattern, if given, maps modules to numbers above 0."""
        alphas = self.config.get("alpha_pattern") or {}
        if not isinstance(alphas, dict) or not all(_is_number(value) and value > 0 for value in alphas.values()):
            raise self.wrong("alpha_pattern", "names of modules with numbers above 0")
        for name in alphas:
            try:
                re.compile(f"({name})")  # as in peft
            except re.error as error:
                raise self.wrong("alpha_pattern", f"regular expressions, but {name!r} is not ({error})") from None

    def _check_wrapped(self) -> None:
        """Raise ValueError for a fully trained module that is saved only under the names of peft's wrapper."""
        for name in self.tensors:
            module, mark, _ = name.partition(".modules_to_save.")
            if mark and not any(n.startswith(f"{module}.") and not any(w in n for w in _WRAPPED) for n in self.tensors):
                raise ValueError(
                    f"{self.directory}: {name!r} has a name in peft's wrapper, but the file has no {module} itself; "
                    "save the adapter with peft's save_pretrained"
                )

    def _check_adapted(self, model: Model, layout: Layout, key: str, module: str) -> None:
        """Raise ValueError for an update of anything but a linear layer of the body."""
        natives = layout.natives(key) if key in layout.shapes else []
        table = any(name == "embed.weight" or name.endswith(".embed.weight") for name in natives)
        if table or any(model.is_head(name) for name in natives):
            what = "the embedding" if table else "a head"
            raise ValueError(
                f"{self.directory}: it updates {module}, {what}, by low rank, but only linear layers outside heads are "
                f"adapted here; {_MERGE}"
            )

    def _check_copies(self, arch: ArchMap, layout: Layout, copies: Mapping[str, str]) -> None:
        """Raise ValueError unless tied tensors (of a tied head) are saved with the values of the tensors they share.

        Args:
            copies: {name in the file: key of the tensor that it must equal}.
        """
        held = {to_key(arch, name.removeprefix(PREFIX)): tensor for name, tensor in self.tensors.items()}
        for name, key in copies.items():
            if key not in held or not torch.equal(held[key], self.tensors[name]):
                raise ValueError(
                    f"{self.directory}: {name!r} is {layout.written[key]} in this model, but has values of its own: "
                    "peft trained a copy of a tied tensor; leave it out of modules_to_save, or train with "
                    "ensure_weight_tying"
                )


def write_values(model: Model, values: AdapterValues) -> None:
    """Write the values of an adapter into the adapter's parameters in a model; each rank keeps its slices."""
    tensors = dict(values.saved)
    if values.prompt is not None:
        tensors["tuned_prompt.weight"] = values.prompt
    for name, update in values.updates.items():
        tensors[f"{name}.lora_A.{ADAPTER_NAME}.weight"] = update.a
        tensors[f"{name}.lora_B.{ADAPTER_NAME}.weight"] = update.b
        if update.magnitude is not None:
            tensors[f"{name}.lora_magnitude_vector.{ADAPTER_NAME}.weight"] = update.magnitude
    named_tensors(model)  # puts the shards in place
    for raw, parameter in model.named_parameters():
        if (value := tensors.get(clean_name(raw))) is not None:
            write_(parameter, value)


def open_adapter(path: str | os.PathLike[str], kind: str = "LORA", options: HubOptions | None = None) -> AdapterFile:
    """Read an adapter from a directory or from the Hub.

    Raises:
        ValueError: the adapter is missing, incomplete, malformed or of another type; as hub.remote.download.
    """
    name = os.fspath(path)
    directory = Path(expanduser(name))
    if is_hub_id(name):
        directory = from_hub_or_cache(name, partial(_download, name), options or HubOptions())
    config_path = directory / CONFIG_FILE
    if not config_path.is_file():
        inner = directory / "adapter"  # the adapter of a run
        hint = f". Did you mean {str(inner)!r}?" if (inner / CONFIG_FILE).is_file() else ""
        raise ValueError(
            f"adapter {directory}: expected a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, or a Hub repository"
            + hint
        )
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        found = config["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config_path} is not a config of peft: {error!r}") from None
    if found != kind:
        raise ValueError(f"{config_path}: peft_type is {found!r}, expected {kind!r}; {_instead(str(found))}")
    weights = next((w for w in (directory / WEIGHTS_FILE, directory / PICKLE_FILE) if w.is_file()), None)
    if weights is None:
        raise ValueError(f"adapter {directory}: {WEIGHTS_FILE} is missing")
    with open_weight_files(weights) as source:
        tensors = {key: source.read(key) for key in source.tensors}
    prefix = PREFIX if kind == "LORA" else PROMPT_PREFIX
    tensors |= {prefix + key: tensor for key, tensor in _read_dense(directory, name, options or HubOptions()).items()}
    for key, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise ValueError(f"{weights}: tensor {key!r} has values that are not finite, which would corrupt the model")
    return AdapterFile(directory, config, tensors)


def _read_dense(directory: Path, name: str, options: HubOptions) -> dict[str, torch.Tensor]:
    """The dense layers of a model of embeddings saved with an adapter, if any, by their names in hub.files.dense_files.

    Args:
        directory: of the adapter's files. name: the user's name for the adapter. options: of the Hub.
    """
    repo = name if is_hub_id(name) else None
    find = SidecarFiles(directory, repo, replace(options, revision=directory.name)).file
    with FileSource({}) as source:
        add_dense_weights(source, dense_steps(described_task(find), find), find)
        return {key: source.read(key) for key in source.tensors}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _instead(kind: str) -> str:
    """Advice for an adapter of another type than expected, by peft's name of its type."""
    if kind in ("LORA", "PROMPT_TUNING"):
        return "load_lora reads it" if kind == "LORA" else "load_prompt reads it; no weights can hold a prompt"
    if kind in _NO_WEIGHTS:
        return "it extends the inputs of the model, which no weights can hold; use it with peft"
    return f"{_MERGE}, if peft can merge this type"


def _download(repo: str, options: HubOptions) -> Path:
    """The cache directory of an adapter's two files, both from the same commit."""
    config = download_file(repo, CONFIG_FILE, options)
    where = "in the cache (offline)" if is_offline(options) else "in the repository"
    if config is None:
        raise ValueError(f"adapter {repo}: no {CONFIG_FILE} {where}, so it is not an adapter of peft")
    options = replace(options, revision=config.parent.name)
    if all(download_file(repo, name, options) is None for name in (WEIGHTS_FILE, PICKLE_FILE)):
        raise ValueError(f"adapter {repo}: no {WEIGHTS_FILE} {where}")
    return config.parent

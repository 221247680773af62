"""Saving adapters in peft's format under Hugging Face's names, for `peft.PeftModel.from_pretrained`."""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import engine
from engine.checkpoint import named_tensors, whole_tensor
from engine.collectives import together
from modelcenter.adapters.low_rank import LowRankUpdate, hub_modules, to_hub
from modelcenter.adapters.modules_to_save import gather_modules
from modelcenter.adapters.peft_format import (
    ADAPTER_NAME,
    CONFIG_FILE,
    PREFIX,
    PROMPT_PREFIX,
    PROMPT_TENSOR,
    TASK_TYPES,
    WEIGHTS_FILE,
    import_peft,
)
from modelcenter.adapters.state import layout_of
from modelcenter.convert.layout import Layout
from modelcenter.hub.files.atomic_directory import new_directory
from modelcenter.hub.files.described_tasks import write_described
from modelcenter.hub.files.embedding_files import DENSE_WEIGHTS
from modelcenter.hub.files.json_files import write_json
from modelcenter.hub.files.safetensors import Entry, SafetensorsWriter
from modelcenter.hub.tokenizer import save_tokenizer
from modelcenter.models.base import Model


def save_adapter(model: Model, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Save the adapter of a model, and the modules that were trained with it. Collective.

    Writes adapter_config.json and adapter_model.safetensors under Hugging Face's names, and for an embedding model the
    files and dense layers of sentence-transformers. The base model is neither gathered nor written. Other files in the
    directory are kept.

    Args:
        tokenizer: a transformers tokenizer to save with the adapter; None: none.

    Raises:
        ValueError: the model has no adapter or a merged one, or the path cannot be written. On every rank.
    """
    state = model.adapter
    if state is None or state.merged:
        raise ValueError(
            "save_adapter: the model has no adapter"
            if state is None
            else "save_adapter: the adapter was merged; save the model itself with model.save_pretrained"
        )
    first, doing = engine.rank() == 0, f"saving to {path}"
    with together(doing), ExitStack() as stack:
        directory = Path()
        with together(doing):
            if first:
                directory = stack.enter_context(new_directory(Path(path)))
        config, tensors = _lora_file(model) if state.kind == "lora" else _prompt_file(model)
        with together(doing):
            if first:
                write_json(directory / CONFIG_FILE, config)
                write_described(model, directory)
                for file, held in _by_file(tensors).items():
                    entries: list[Entry] = [(name, t.dtype, tuple(t.shape)) for name, t in held.items()]
                    with SafetensorsWriter(directory / file, entries) as writer:
                        for tensor in held.values():
                            writer.write(tensor)
                if tokenizer is not None:
                    save_tokenizer(tokenizer, directory)


def _by_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """{file: its tensors}. Dense layers of embeddings have their own folders, as in a complete model of
    sentence-transformers, so that peft, whose model has no such layers, ignores them."""
    files: dict[str, dict[str, torch.Tensor]] = {WEIGHTS_FILE: {}}
    for name, tensor in tensors.items():
        folder = name.removeprefix(PREFIX).removeprefix(PROMPT_PREFIX).rpartition("/")[0]
        files.setdefault(f"{folder}/{DENSE_WEIGHTS[0]}" if folder else WEIGHTS_FILE, {})[name] = tensor
    return files


def _lora_file(model: Model) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    peft, state = import_peft(), model.adapter
    _, layout = layout_of(model)
    held = named_tensors(model)
    updates = {name: _update_of(model, name, held) for name in state.ranks}
    tensors: dict[str, torch.Tensor] = {}
    modules = hub_modules(layout, state.ranks)
    ranks, alphas = {}, {}
    for module in modules:
        update = to_hub(module, updates)
        tensors[f"{PREFIX}{module.name}.lora_A.weight"] = update.a
        tensors[f"{PREFIX}{module.name}.lora_B.weight"] = update.b
        if update.magnitude is not None:
            tensors[f"{PREFIX}{module.name}.lora_magnitude_vector"] = update.magnitude
        alpha = update.scale * (math.sqrt(update.rank) if state.rslora else update.rank)
        ranks[module.name], alphas[module.name] = update.rank, int(alpha) if alpha == int(alpha) else alpha
    saved_tensors, saved_names = gather_modules(model, layout, held)
    tensors |= saved_tensors
    everything = module_names(layout)
    rank, alpha = _most_common(ranks), _most_common(alphas)
    config = peft.LoraConfig(
        task_type=_task_type(model),
        base_model_name_or_path=state.base,
        revision=state.revision,
        inference_mode=True,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=state.dropout,
        fan_in_fan_out=any(module.transposed for module in modules),
        target_modules=sorted(short_names(list(ranks), everything)),
        rank_pattern=patterns({n: v for n, v in ranks.items() if v != rank}, everything),
        alpha_pattern=patterns({n: v for n, v in alphas.items() if v != alpha}, everything),
        modules_to_save=[name for name in saved_names if "/" not in name] or None,
        use_dora=state.dora,
        use_rslora=state.rslora,
        bias="none",
    )
    return _as_json(config), tensors


def _prompt_file(model: Model) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    peft, state = import_peft(), model.adapter
    _, layout = layout_of(model)
    held = named_tensors(model)
    prompt = whole_tensor(model, held, "tuned_prompt.weight")
    assert prompt is not None  # a prompt cannot be added to a pipeline
    reader: Any = getattr(model.config, "encoder", model.config)  # of two composed models, the encoder reads the prompt
    config = peft.PromptTuningConfig(
        task_type=_task_type(model),
        base_model_name_or_path=state.base,
        revision=state.revision,
        inference_mode=True,
        num_virtual_tokens=prompt.shape[0],
        token_dim=prompt.shape[1],
        num_transformer_submodules=1,
        num_attention_heads=reader.num_heads,
        num_layers=reader.num_layers,
    )
    saved_tensors, _ = gather_modules(model, layout, held, PROMPT_PREFIX)
    return _as_json(config), {PROMPT_TENSOR: prompt.detach().cpu(), **saved_tensors}


def _task_type(model: Model) -> str | None:
    """peft's name of the task; None: none. For a classifier peft requires the head in the file."""
    state = model.adapter
    named = TASK_TYPES.get(model.task)
    whole = {name for name in state.layout.native_shapes if name.startswith("head.")} <= set(state.trained)
    if named in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") and not whole:
        named = None
    # Without a task, peft ignores a prompt.
    return "FEATURE_EXTRACTION" if named is None and state.kind == "prompt" else named


def _as_json(config: Any) -> dict[str, Any]:
    """A config of peft as JSON, with sorted sets so that equal adapters give equal files."""
    values = config.to_dict()
    return json.loads(json.dumps(values, default=lambda v: sorted(v) if isinstance(v, set) else str(v), sort_keys=True))


def _most_common(values: Mapping[str, Any]) -> Any:
    counts = list(values.values())
    return max(counts, key=counts.count)


def _update_of(model: Model, name: str, held: Mapping[str, torch.Tensor]) -> LowRankUpdate:
    """The whole update of one layer, on the CPU. Collective; for a layer of another pipeline stage, on rank 0 only."""
    state = model.adapter
    outputs, inputs = state.layout.native_shapes[f"{name}.weight"]
    shapes: dict[str, tuple[int, ...]] = {
        f"lora_A.{ADAPTER_NAME}.weight": (state.ranks[name], inputs),
        f"lora_B.{ADAPTER_NAME}.weight": (outputs, state.ranks[name]),
    }
    if state.dora:
        shapes[f"lora_magnitude_vector.{ADAPTER_NAME}.weight"] = (outputs,)
    parts = []
    for part, shape in shapes.items():
        full = whole_tensor(model, held, f"{name}.{part}")
        parts.append(torch.empty(shape) if full is None else full.detach().cpu())
    return LowRankUpdate(parts[0], parts[1], state.scales[name], parts[2] if state.dora else None)


def module_names(layout: Layout) -> list[str]:
    """The names of all modules of transformers' model that hold a tensor of the layout."""
    return list(dict.fromkeys(layout.in_model(key).rpartition(".")[0] for key in layout.written))


def short_names(chosen: Collection[str], everything: Iterable[str]) -> list[str]:
    """The shortest suffixes of module names that match the chosen modules and no others."""
    ending: dict[str, set[str]] = {}
    for name in everything:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            ending.setdefault(".".join(parts[-k:]), set()).add(name)
    wanted = set(chosen)
    found: dict[str, None] = {}
    for name in chosen:
        parts = name.split(".")
        suffixes = (".".join(parts[-k:]) for k in range(1, len(parts) + 1))
        found[next((s for s in suffixes if ending.get(s, {name}) <= wanted), name)] = None
    return list(found)


def patterns(values: Mapping[str, Any], everything: Iterable[str]) -> dict[str, Any]:
    """{short name: value} for peft's rank_pattern and alpha_pattern, from {module: value}."""
    by_value: dict[Any, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    names = list(everything)
    return {short: value for value, found in by_value.items() for short in short_names(found, names)}

"""LoRA (Hu et al. 2021, arXiv:2106.09685) and its kin by peft's own layers, on models that may be sharded."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

import engine
from engine.checkpoint import named_tensors
from engine.init import clean_name, init_parameters_
from engine.shards import is_sharded
from engine.tensors import local_box, local_tensor
from modelcenter.adapters.quantize import check_quantize, quantized
from modelcenter.adapters.read import AdapterFile, open_adapter
from modelcenter.adapters.state import (
    NAME,
    Attached,
    adapter_parameters,
    base_name,
    check_free,
    layout_of,
    let_go,
    materialize_own,
    take_over,
    trained_whole,
)
from modelcenter.convert.rules import Layout
from modelcenter.hub.remote.download import HubOptions
from modelcenter.models.base import Model
from modelcenter.registry import nearest

ALL_LINEAR = "all-linear"


def import_peft() -> Any:
    """The package peft.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"LoRA needs the package peft ({error}): pip install 'modelcenter[lora]'") from error
    return peft


@dataclass
class Lora:
    """A low-rank update of linear layers, for `from_pretrained(adapter=...)`.

    Args:
        rank: of the updates. alpha: an update counts alpha / rank times; None: 2 * rank.
        dropout: of what goes into an update.
        targets: layers, by our names ("q", "attn.out", "layers.*.mlp.up") or Hugging Face's ("q_proj"); None or
            "all-linear": every linear layer outside heads.
        modules_to_save: modules that are trained whole and saved with the adapter, by our names or Hugging Face's;
            None: the head of a classification task and whatever the checkpoint lacked.
        use_dora: DoRA (Liu et al. 2024, arXiv:2402.09353). use_rslora: alpha / sqrt(rank) (arXiv:2312.03732).
        quantize: keep the weights of the adapted layers in 4 bits, "nf4" or "fp4" (adapters.quantize); one process.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] | None = None
    modules_to_save: Sequence[str] | None = None
    use_dora: bool = False
    use_rslora: bool = False
    quantize: str | None = None
    saved: AdapterFile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"lora_rank: got {self.rank!r}, expected a whole number of at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora_dropout: got {self.dropout!r}, expected a number from 0 to below 1")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"lora_alpha: got {self.alpha!r}, expected a number above 0")

    def attach(self, model: Model, fresh: Collection[str] = ()) -> None:
        """Put the updates into a model, on any device or meta, before it is sharded; all else but `modules_to_save`
        is frozen.

        Args:
            fresh: the parameters that the checkpoint lacked.

        Raises:
            ValueError: a target or module that the model lacks or that cannot be adapted; peft is missing.
        """
        peft = import_peft()
        check_free(model, "adapter")
        check_quantize(self.quantize)
        if self.quantize is not None and self.use_dora:
            raise ValueError("quantize: not with use_dora, which needs the norms of the weights; leave one out")
        _, layout = layout_of(model)
        if self.saved is None:
            trained = trained_whole(model, self.modules_to_save, fresh)
            ranks = dict.fromkeys(_targets(model, layout, self.targets, trained), self.rank)
            alpha = 2 * self.rank if self.alpha is None else self.alpha
            scales = dict.fromkeys(ranks, alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank))
        else:
            ranks, scales, trained = self.saved.match(model, layout)
            alpha = self.saved.alpha
        state = Attached("lora", layout, base_name(model), ranks, scales, self.rank, alpha, self.dropout)
        state.dora, state.rslora, state.trained = self.use_dora, self.use_rslora, trained
        state.required = {clean_name(n): p.requires_grad for n, p in model.named_parameters()}
        if engine.runtime.current().tp_size > 1:
            if self.use_dora or (self.dropout and self.saved is None):
                what = "use_dora" if self.use_dora else "lora_dropout"
                raise ValueError(f"{what}: not with tp_size above 1; leave it out, or use tp_size=1")
            if self.dropout:
                model.register_forward_pre_hook(_refuse_training)
        spec = model.init_spec()
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=alpha,
            lora_dropout=self.dropout,
            target_modules=list(ranks),
            rank_pattern={re.escape(name): rank for name, rank in ranks.items() if rank != self.rank},
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
        )
        peft.inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        for name, layer in _layers(model).items():
            layer.scaling[NAME] = scales[name]
        for raw, parameter in model.named_parameters():
            name = clean_name(raw)
            if name in trained:
                parameter.requires_grad_(state.required[name])
            elif parameter.requires_grad and parameter.itemsize < 4:
                parameter.data = parameter.data.float()  # small steps would vanish in 16 bits
        take_over(model, state, spec)

    def start(self, model: Model, seed: int = 0) -> None:
        """Give the updates their first values: those of a file, or A by `seed` and B zero. The same on any mesh."""
        if self.quantize is not None:
            if is_sharded(model):
                raise ValueError("quantize: the model is sharded; pass policy=False, or Policy(precision='fp32')")
            for layer in _layers(model).values():
                layer.base_layer = quantized(layer.base_layer, self.quantize)
            model.adapter.quantized = self.quantize
        if self.saved is not None:
            self.saved.fill(model)
            return
        init_parameters_(model, seed, adapter_parameters(model))
        if model.adapter.dora:
            for layer in _layers(model).values():
                _own_magnitude(layer.lora_magnitude_vector[NAME].weight, _rows(layer))


def add_lora(
    model: Model,
    rank: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Sequence[str] | None = None,
    modules_to_save: Sequence[str] | None = None,
    *,
    use_dora: bool = False,
    use_rslora: bool = False,
    quantize: str | None = None,
    seed: int = 0,
) -> Model:
    """Put LoRA into a plain model, in place, and return it; then call `engine.shard`, if at all. See Lora.

    Raises:
        ValueError: the model is sharded, or has an adapter; as Lora.
    """
    report = getattr(model, "load_report", None)
    lora = Lora(rank, alpha, dropout, targets, modules_to_save, use_dora, use_rslora, quantize)
    return _put_in(lora, model, seed, () if report is None else report.initialised)


def load_lora(path: Any, model: Model | None = None, *, quantize: str | None = None, **hub: Any) -> Any:
    """A saved LoRA in peft's format, trained on our model or on transformers'.

    Args:
        path: its directory, or a Hub id.
        model: the plain model to put it into, which is returned. None: a Lora to pass to from_pretrained(adapter=...).
        quantize: as Lora's.
        hub: revision, token, cache_dir, local_files_only: as from_pretrained's.

    Raises:
        ValueError: a file is missing or malformed, or the adapter does not fit the model; the Hub refuses.
    """
    saved = open_adapter(path, options=HubOptions(**hub))
    config = saved.config
    lora = Lora(
        max(1, int(saved.number("r"))),
        float(saved.alpha),
        float(saved.number("lora_dropout", 0.0)),
        use_dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")),
        quantize=quantize,
        saved=saved,
    )
    return lora if model is None else _put_in(lora, model)


def _put_in(lora: Lora, model: Model, seed: int = 0, fresh: Collection[str] = ()) -> Model:
    on_meta = any(p.is_meta for p in model.parameters())
    if on_meta:
        raise ValueError("the model is on the meta device: load it with from_pretrained(adapter=...) instead")
    lora.attach(model, fresh)
    materialize_own(model)
    lora.start(model, seed)
    return model


@torch.no_grad()
def merge_lora(model: Model) -> Model:
    """Add the updates to the weights, in place. Collective on a sharded model.

    Sums are made in fp32 and rounded once to the dtype of the weight: exact within fp32 rounding for fp32 weights; for
    16-bit weights an update smaller than half a unit in the last place of a weight is lost there, so load the base with
    dtype="float32" to keep it. A plain model is an ordinary model afterwards; a sharded one, or a stage of a pipeline,
    keeps the adapter's layers, which then add nothing, and saves as an ordinary one.

    Raises:
        ValueError: the model has no LoRA, or one that was merged.
    """
    state = model.adapter
    if state is None or state.kind != "lora" or state.merged:
        what = "none" if state is None else "one that is merged" if state.merged else f"a {state.kind}"
        raise ValueError(f"merge: the model has {what}, expected a LoRA")
    if state.quantized:
        raise ValueError(
            f"merge: the weights are in 4 bits ({state.quantized}), and rounding the sum to them would lose the "
            "update; save the adapter, load the base without quantize, then load_lora and merge"
        )
    named_tensors(model)  # shows the shards, not what an evaluation gathered
    for layer in _layers(model).values():
        weight = layer.base_layer.weight
        merged = _rows(layer)
        if state.dora:
            magnitude = _whole(layer.lora_magnitude_vector[NAME].weight).to(merged)
            if hasattr(weight, "placements"):
                size, offset = local_box(weight.shape, weight.device_mesh, weight.placements)
                magnitude = magnitude[offset[0] : offset[0] + size[0]]
            merged *= (magnitude / merged.norm(dim=1))[:, None]
        local_tensor(weight).copy_(merged)
    if not is_sharded(model) and model.pipeline is None:
        for name, layer in _layers(model).items():
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.base_layer)
        model.__dict__.pop("peft_config", None)
        let_go(model)
        return model
    for layer in _layers(model).values():
        local_tensor(layer.lora_B[NAME].weight).zero_()
        if state.dora:
            _own_magnitude(layer.lora_magnitude_vector[NAME].weight, _rows(layer))
    state.merged = True
    return model


def _refuse_training(model: Any, *_: Any) -> None:
    """A saved adapter's dropout is no obstacle to those who only use it."""
    if model.training and model.adapter is not None and not model.adapter.merged:
        raise ValueError(
            "lora_dropout: this adapter has dropout, and cannot be trained with tp_size above 1. To use it, call "
            "model.eval(); to train it, use tp_size=1 or adapter=dataclasses.replace(load_lora(path), dropout=0.0)"
        )


# -- parts -----------------------------------------------------------------------------------------------------------


def _layers(model: nn.Module) -> dict[str, Any]:
    """{name of a linear layer of ours: peft's layer around it}; of a pipeline, those of this rank's stage."""
    named: Any = model.named_modules()
    adapted = {clean_name(name): module for name, module in named if hasattr(module, "lora_A")}
    return {name: layer for name, layer in adapted.items() if layer.base_layer.weight is not None}


def _targets(
    model: Model, layout: Layout, wanted: str | Sequence[str] | None, trained: Collection[str] = ()
) -> list[str]:
    """Names of the linear layers to adapt, in the model's order; not those of the parameters `trained` whole.

    Raises:
        ValueError: a target that no linear layer has, or one that is trained whole.
    """
    linears = [
        clean_name(n) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not model.is_head(f"{n}.")
    ]
    if wanted is None or wanted == ALL_LINEAR or list(wanted) == [ALL_LINEAR]:
        return [name for name in linears if f"{name}.weight" not in trained]
    if not wanted:
        raise ValueError("lora_targets: got none; name layers, or leave it out for every linear layer outside heads")
    hub_of: dict[str, list[str]] = {}
    for key in layout.shapes:
        for native in layout.natives(key):
            module = native.rpartition(".")[0]
            if module in linears:
                hub_of.setdefault(module, []).append(layout.written[key].rpartition(".")[0])
    found: set[str] = set()
    for target in [wanted] if isinstance(wanted, str) else wanted:
        patterns = (target, f"*.{target}")
        hits = [n for n in linears if any(fnmatchcase(x, p) for x in (n, *hub_of.get(n, ())) for p in patterns)]
        if not hits:
            leaves = {n.rpartition(".")[2] for n in (*linears, *(h for hub in hub_of.values() for h in hub))}
            raise ValueError(
                f"lora_targets: {target!r} matches no linear layer.{nearest(target, leaves)} This model has "
                f"{', '.join(sorted({n.rpartition('.')[2] for n in linears}))} (and Hugging Face's names of these), or "
                f"{ALL_LINEAR!r}"
            )
        found.update(hits)
    chosen = [name for name in linears if name in found]
    if both := [name for name in chosen if f"{name}.weight" in trained]:
        raise ValueError(f"modules_to_save: {', '.join(both)} would be trained whole and adapted; leave it out of one")
    return chosen


def _whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def _rows(layer: Any) -> torch.Tensor:
    """This rank's part of the updated weight of a layer, in fp32 or wider."""
    weight = layer.base_layer.weight
    local = local_tensor(weight).detach()
    wide = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
    a, b = _whole(layer.lora_A[NAME].weight).to(wide), _whole(layer.lora_B[NAME].weight).to(wide)
    if hasattr(weight, "placements"):
        size, offset = local_box(weight.shape, weight.device_mesh, weight.placements)
        b, a = b[offset[0] : offset[0] + size[0]], a[:, offset[1] : offset[1] + size[1]]
    return wide.addmm_(b, a, alpha=layer.scaling[NAME])


@torch.no_grad()
def _own_magnitude(parameter: Any, rows: torch.Tensor) -> None:
    """Set DoRA's magnitudes to the norms of the rows, which are split over the ranks as the magnitudes are."""
    own = local_tensor(parameter)
    if own.shape[0] != rows.shape[0]:
        raise ValueError("use_dora: the rows of a weight and their norms are on different ranks; use tp_size=1")
    own.copy_(rows.norm(dim=1))

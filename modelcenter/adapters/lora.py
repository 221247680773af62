"""LoRA (Hu et al. 2021, arXiv:2106.09685) and its variants, with peft's layers, on models that may be sharded."""

import math
import os
import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import engine
from engine.checkpoint import named_tensors
from engine.collectives import together
from engine.init import init_parameters_
from engine.names import clean_name
from engine.shards import is_sharded
from engine.tensors import local_tensor
from modelcenter.adapters.load import AdapterFile, open_adapter, write_values
from modelcenter.adapters.lora_layers import lora_layers, merged_weight, reset_magnitude
from modelcenter.adapters.low_rank import check_dora
from modelcenter.adapters.modules_to_save import choose_parameters
from modelcenter.adapters.peft_format import ADAPTER_NAME, import_peft
from modelcenter.adapters.quantize import check_quantize, quantized
from modelcenter.adapters.state import (
    AdapterState,
    adapter_parameters,
    check_free,
    install,
    is_adapter,
    layout_of,
    make_state,
    materialize_adapter,
    uninstall,
)
from modelcenter.adapters.targets import choose_layers
from modelcenter.adapters.update_dropout import key_update_dropout
from modelcenter.hub.remote.download import HubOptions
from modelcenter.models.base import Model


@dataclass
class Lora:
    """Low-rank updates of linear layers, for `from_pretrained(adapter=...)`.

    Args:
        rank: of the updates. alpha: updates are scaled by alpha / rank; None: 2 * rank.
        dropout: on the input of an update.
        targets: layers, by our names ("q", "attn.out", "layers.*.mlp.up") or Hugging Face's ("q_proj"); None or
            "all-linear": every linear layer outside heads.
        modules_to_save: modules that are fully trained and saved with the adapter, by our names or Hugging Face's;
            None: the head of a classification task, dense layers of embeddings, and modules that the checkpoint lacked.
        use_dora: DoRA (Liu et al. 2024, arXiv:2402.09353). use_rslora: alpha / sqrt(rank) (arXiv:2312.03732).
        quantize: keep the weights of the adapted layers in 4 bits, "nf4" or "fp4" (adapters.quantize); one process.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] | None = None
    modules_to_save: str | Sequence[str] | None = None
    use_dora: bool = False
    use_rslora: bool = False
    quantize: str | None = None
    saved: AdapterFile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"lora_rank: got {self.rank!r}, expected a whole number of at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora_dropout: got {self.dropout!r}, expected a number from 0 to below 1")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(f"lora_alpha: got {self.alpha!r}, expected a finite number above 0")

    def attach(self, model: Model, fresh: Collection[str] = ()) -> None:
        """Add the updates to a model, on any device or meta, before it is sharded, and freeze everything else except
        `modules_to_save`.

        Args:
            fresh: the parameters that the checkpoint lacked.

        Raises:
            ValueError: the model lacks a target or module, or it cannot be adapted; peft is not installed.
        """
        import_peft()
        check_free(model, "adapter")
        check_quantize(self.quantize)
        if self.quantize is not None and self.use_dora:
            raise ValueError("quantize: not with use_dora, which needs the norms of the weights; leave one out")
        state = self._make_state(model, fresh)
        split = engine.runtime.current().tp_size > 1
        if split and self.use_dora:  # the norms of the rows would span ranks
            raise ValueError("use_dora: not with tp_size above 1; leave it out, or use tp_size=1")
        init_spec = model.init_spec()
        self._inject(model, state)
        if self.dropout:
            state.hooks = key_update_dropout(model, split)
        for raw, parameter in model.named_parameters():
            name = clean_name(raw)
            if name in state.trained:
                parameter.requires_grad_(state.required[name])
            elif parameter.requires_grad and parameter.itemsize < 4:
                parameter.data = parameter.data.float()  # small steps would vanish in 16 bits
        install(model, state, init_spec)

    def _make_state(self, model: Model, fresh: Collection[str]) -> AdapterState:
        """The record of the adapted layers and fully trained modules: those of the file, or those requested."""
        _, layout = layout_of(model)
        values = None
        if self.saved is None:
            trained = choose_parameters(model, self.modules_to_save, fresh)
            ranks = dict.fromkeys(choose_layers(model, layout, self.targets, trained), self.rank)
            if self.use_dora:
                check_dora(layout, ranks)
            scales = dict.fromkeys(ranks, self._alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank))
        else:
            values = self.saved.lora_values(model, layout)
            trained = list(values.saved)
            ranks = {name: update.rank for name, update in values.updates.items()}
            scales = {name: update.scale for name, update in values.updates.items()}
        return make_state(
            model,
            "lora",
            layout,
            trained,
            ranks=ranks,
            scales=scales,
            dropout=self.dropout,
            dora=self.use_dora,
            rslora=self.use_rslora,
            initial=values,
        )

    @property
    def _alpha(self) -> float:
        return 2 * self.rank if self.alpha is None else self.alpha

    def _inject(self, model: Model, state: AdapterState) -> None:
        """Wrap the linear layers in peft's layers, each with its rank and scale."""
        peft = import_peft()
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self._alpha if self.saved is None else self.saved.alpha,
            lora_dropout=self.dropout,
            target_modules=list(state.ranks),
            rank_pattern={re.escape(name): rank for name, rank in state.ranks.items() if rank != self.rank},
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
        )
        peft.inject_adapter_in_model(config, model, ADAPTER_NAME, low_cpu_mem_usage=True)
        for name, layer in lora_layers(model).items():
            layer.scaling[ADAPTER_NAME] = state.scales[name]

    def start(self, model: Model, seed: int = 0) -> None:
        """Initialise the updates from the file, or with A drawn by `seed` and B zero. The same on any mesh."""
        if self.quantize is not None:
            for layer in lora_layers(model).values():
                layer.base_layer = quantized(layer.base_layer, self.quantize)
            model.adapter.quantized = self.quantize
        if self.saved is not None:
            write_values(model, model.adapter.initial)
            model.adapter.initial = None
            return
        init_parameters_(model, seed, adapter_parameters(model))
        if model.adapter.dora:
            for layer in lora_layers(model).values():
                reset_magnitude(layer)


def add_lora(
    model: Model,
    rank: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Sequence[str] | None = None,
    modules_to_save: str | Sequence[str] | None = None,
    *,
    use_dora: bool = False,
    use_rslora: bool = False,
    quantize: str | None = None,
    seed: int = 0,
) -> Model:
    """Add LoRA to a plain model, in place, and return it; call `engine.shard` only afterwards. See Lora.

    Raises:
        ValueError: the model is sharded or already has an adapter; as Lora.
    """
    report = getattr(model, "load_report", None)
    lora = Lora(rank, alpha, dropout, targets, modules_to_save, use_dora, use_rslora, quantize)
    return _put_in(lora, model, seed, () if report is None else report.initialised)


def load_lora(
    path: str | os.PathLike[str], model: Model | None = None, *, quantize: str | None = None, **hub: Any
) -> Any:
    """Load LoRA in peft's format, trained on our model or on transformers'.

    Args:
        path: a directory, or a Hub id.
        model: the plain model to add it to, which is returned. None: return a Lora for from_pretrained(adapter=...).
        quantize: as in Lora.
        hub: revision, token, cache_dir, local_files_only: as in from_pretrained.

    Raises:
        ValueError: a file is missing or malformed, the adapter does not fit the model, or the Hub denies access.
    """
    saved = open_adapter(path, options=HubOptions(**hub))
    lora = Lora(
        max(1, int(saved.number("r"))),
        float(saved.alpha),
        float(saved.number("lora_dropout", 0.0)),
        use_dora=saved.flag("use_dora"),
        use_rslora=saved.flag("use_rslora"),
        quantize=quantize,
        saved=saved,
    )
    return lora if model is None else _put_in(lora, model)


def _put_in(lora: Lora, model: Model, seed: int = 0, fresh: Collection[str] = ()) -> Model:
    on_meta = any(p.is_meta for p in model.parameters())
    if on_meta:
        raise ValueError("the model is on the meta device: load it with from_pretrained(adapter=...) instead")
    lora.attach(model, fresh)
    materialize_adapter(model)
    lora.start(model, seed)
    return model


@torch.no_grad()
def merge_lora(model: Model) -> Model:
    """Add the updates to the weights, in place. Collective on a sharded model.

    Sums are computed in fp32 and rounded once to the dtype of the weight: exact within fp32 rounding for fp32 weights.
    In 16-bit weights, an update below half a unit in the last place is lost; load the base with dtype="float32" to keep
    it. A plain model has no adapter afterwards. A sharded one, or a stage of a pipeline, keeps the adapter's layers,
    which then add nothing, and is saved without them. Another adapter on the merged model names no base, because no
    checkpoint has these weights: save the merged model and load it first to have one named.

    Raises:
        ValueError: the model has no LoRA, it is already merged, or it has values that are not finite.
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
    whole = not is_sharded(model) and model.pipeline is None
    with nullcontext() if whole else together("merging the adapter"):
        for name, tensor in named_tensors(model).items():  # its call reshards what an evaluation left gathered
            if is_adapter(name) and not local_tensor(tensor).isfinite().all():
                raise ValueError(f"merge: {name} has values that are not finite, which would corrupt the weights")
    for layer in lora_layers(model).values():
        local_tensor(layer.base_layer.weight).copy_(merged_weight(layer, state.dora))
    if whole:
        for name, layer in lora_layers(model).items():
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.base_layer)
        model.__dict__.pop("peft_config", None)
        uninstall(model)
        model.holds_merged = True
        return model
    for layer in lora_layers(model).values():
        local_tensor(layer.lora_B[ADAPTER_NAME].weight).zero_()
        layer.lora_dropout[ADAPTER_NAME] = torch.nn.Identity()
        if state.dora:
            reset_magnitude(layer)
    state.merged = True
    return model

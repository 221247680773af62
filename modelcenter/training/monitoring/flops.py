"""The floating-point operations of training, and their share of the devices' peak: model FLOPs utilisation (mfu), as in
PaLM (arXiv:2204.02311, appendix B).

The count includes the products of linear layers and attention at every token, and those with the vocabulary at every
label; a multiplication and an addition are two operations. Recomputation in backward and padding are not counted,
because they only take time, and neither are DeBERTa's few projections of distances. As is usual, every layer counts at
every token, even the last one, which computes only the states that the head reads (Model.reads), and even at tokens
that are left out (Model.without_unneeded). In shallow models with few labels, this makes the share larger than that of
the executed products.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.names import clean_name
from engine.ops import Experts
from modelcenter.config import ModelConfig
from modelcenter.hub.architecture import find_spec, on_meta
from modelcenter.layers.attention import CrossAttention, SelfAttention
from modelcenter.layers.convolution import TokenConvolution
from modelcenter.layers.experts import Router
from modelcenter.layers.heads import ExtractiveQA, LateClassifier, ReplacedTokens, TokenClassifier, VocabularyHead
from modelcenter.models.base import Model
from modelcenter.training.metrics import sum_over_ranks

# Published peaks, in 1e12 operations per second: dense products of 16-bit numbers, summed in fp32, on the fastest board
# of that name (data sheets also give twice as many, for sparse weights). The first key that is part of a device's name
# is used. A MI250X is two devices. Sources: NVIDIA's data sheets, as on
# nvidia.com/en-us/data-center/<a100|h100|h200|l4|l40s|...>; Blackwell's architecture brief (HGX B100: 112e15 sparse fp4
# operations of 8 boards, divided by 64 here); the white papers of GA102 (A40, RTX A6000, RTX 3090) and Ada (RTX 6000,
# RTX 4090); the A10G's data sheet for AWS. H800 and A800 are as H100 and A100. MI...: AMD's Instinct data sheets.
PUBLISHED_PEAKS: dict[str, float] = {
    "GB200": 2500, "B200": 2250, "B100": 1750, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835,
    "H200": 989, "GH200": 989, "H800 PCIe": 756, "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A30": 165,
    "A40": 150, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "V100-PCIE": 112, "V100": 125, "T4": 65,
    "RTX A6000": 155, "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 3090": 71, "MI355X": 2500, "MI350X": 2300,
    "MI325X": 1307, "MI300X": 1307, "MI250X": 191.5,
}  # fmt: skip


def published_peak(name: str) -> float | None:
    """The published peak operations per second of a device; None if it is not in the table."""
    return next((1e12 * rate for part, rate in PUBLISHED_PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch on which the number of operations depends.

    tokens: lengths of its sequences. target: those of the decoder of an encoder-decoder, else empty. labelled: the
    number of tokens with a label, if the head predicts tokens.
    """

    tokens: Tensor
    target: Tensor
    labelled: int

    def counts(self) -> dict[str, float]:
        """{kind of place where linear layers are applied: number of these places}."""
        source, target = int(self.tokens.sum()), int(self.target.sum())
        return {"source": source, "target": target, "labelled": self.labelled, "sequences": len(self.tokens)}


@dataclass(frozen=True)
class Arithmetic:
    """The multiplications of one pass of training.

    model: on the meta device, which takes no memory. weights: {kind of place: multiplications at each, in forward and
    backward}. attention: for every layer (the number of pairs of tokens as a function of the sizes, multiplications per
    pair). prefix: the number of tokens that the model puts before each sequence.
    """

    model: Model
    weights: Mapping[str, float]
    attention: tuple[tuple[Callable[[Sizes], float], float], ...]
    prefix: int = 0

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        task: str,
        frozen: Collection[str] = (),
        updates: Iterable[str] = (),
        prefix: int = 0,
    ) -> Arithmetic:
        """The arithmetic of the whole model of a configuration, however the trained model is sharded.

        Args:
            frozen: names of its parameters that are not trained: they get no gradients, and neither does anything
                before the first trained parameter. updates: names of the adapter's parameters, inside its modules or
                before all of them; they are so small that only the gradients passed on to them count.
        """
        model = on_meta(find_spec({"model_type": config.model_type}, None, "the config"), config, task)
        trained = {name for name, _ in model.named_parameters() if name not in frozen}
        adapters = [name for name in updates if name not in trained]
        modules = dict(model.named_modules())
        weights = dict.fromkeys(("source", "target", "labelled", "sequences"), 0.0)
        attention: list[tuple[Callable[[Sizes], float], float]] = []
        # Whether something before this module is trained, so that gradients pass through it.
        reached = any(name.partition(".")[0] not in modules for name in adapters)
        for name, module in _in_passing(model):
            own = {f"{name}.{part}" for part, _ in module.named_parameters(recurse=False)} & trained
            inside = any(update.startswith(f"{name}.") for update in adapters)
            if isinstance(module, (SelfAttention, CrossAttention)):
                # Scores, and sums of values by them. Queries and keys depend on parameters that this layer trains.
                below = reached or inside or any(f"{name}.{part}" in trained for part, _ in module.named_parameters())
                scores = module.head_dim * getattr(module, "products", 1)
                width = module.num_heads * (scores + getattr(module, "value_dim", module.head_dim))
                attention.append((_pairs(name, module), width * (3.0 if below else 1.0)))
            for part, numbers in _products(module).items():
                if f"{name}.{part}" not in model.constants:
                    passes = 1 + (f"{name}.{part}" in own) + reached
                    weights[_place(name, modules, _has_decoder(model))] += numbers * passes
            if isinstance(module, VocabularyHead):
                table = model.embed.weight if module.weight is None else module.weight
                tied = next(name for name, parameter in model.named_parameters() if parameter is table)
                if model.task == "sparse-embedding":  # backward reads but a few of the logits
                    weights["source"] += table.numel()
                    continue
                taught = tied in trained if module.weight is None else bool(own)
                weights["labelled"] += table.numel() * (1 + taught + reached)
            reached = reached or bool(own) or (inside and isinstance(module, nn.Linear))
        return cls(model, weights, tuple(attention), prefix)

    @classmethod
    def of_model(cls, model: Model) -> Arithmetic:
        """The arithmetic of a model, which may be sharded. A pipeline stage does not know which parameters others
        freeze."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for name, parameter in model.named_parameters():
            names[parameter.requires_grad].append(clean_name(name))
        return cls.of(model.config, model.task, set(names[False]), names[True], model.prefix_tokens)

    def sizes(self, batch: Mapping[str, Any]) -> Sizes:
        """The sizes of a packed batch."""
        tokens = batch["cu_seqlens"].diff()
        # A decoder without its own inputs reads the encoder's.
        target = batch.get("decoder_cu_seqlens", batch["cu_seqlens"]).diff() if _has_decoder(self.model) else tokens[:0]
        labelled = 0
        if self.weights["labelled"]:  # some heads, such as an embedding's, have no labels
            labelled, *_ = self.model.loss_counts(batch).values()  # the first of several terms is the vocabulary's
        return Sizes(tokens, target, int(labelled))

    def operations(self, sizes: Sizes) -> float:
        """The operations of forward and backward on a batch."""
        if self.prefix:
            sizes = Sizes(sizes.tokens + self.prefix, sizes.target, sizes.labelled)
        counts = sizes.counts()
        products = sum(weight * counts[place] for place, weight in self.weights.items())
        return 2.0 * (products + sum(pairs(sizes) * each for pairs, each in self.attention))


def _in_passing(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) in the order of a forward; modules of a unit occur as often as the unit runs."""
    units, names = list(model.units), {module: name for name, module in model.named_modules()}
    repeated = len(set(units)) < len(units)
    in_units = {module for unit in units for module in unit.modules()} if repeated else set()
    begun = False
    for module, name in names.items():
        if module not in in_units:
            yield name, module
        elif not begun:
            begun = True
            for unit in units:
                yield from unit.named_modules(prefix=names[unit])


def _products(module: nn.Module) -> dict[str, int]:
    """{name of a parameter that is a matrix of a product: multiplications at each place}."""
    if isinstance(module, Experts):
        matrices = module.named_parameters(recurse=False)
        return {part: each[0].numel() * module.experts_per_token for part, each in matrices}
    if isinstance(module, nn.Linear | TokenConvolution | Router):
        return {"weight": module.weight.numel()}
    return {}


def _has_decoder(model: Model) -> bool:
    return model.is_encoder_decoder and getattr(model, "decoder", None) is not None


def _place(name: str, modules: Mapping[str, nn.Module], two_sides: bool) -> str:
    """The kind of place where a linear layer is applied: the tokens of a side, labelled tokens, or sequences."""
    first, *rest = name.split(".")
    owners = [modules[".".join([first, *rest[:i]])] for i in range(len(rest) + 1)]
    if first == "head":
        if any(isinstance(owner, VocabularyHead) for owner in owners):
            return "labelled"
        by_token = any(isinstance(owner, (TokenClassifier, ExtractiveQA, ReplacedTokens)) for owner in owners)
        by_token = by_token or (isinstance(owners[0], LateClassifier) and rest == ["dense"])
        return "sequences" if not by_token else "target" if two_sides else "source"
    if first == "pooler":
        return "sequences"
    if first == "transform":
        return "source" if isinstance(modules.get("head"), (TokenClassifier, ExtractiveQA)) else "sequences"
    across = any(isinstance(owner, CrossAttention) for owner in owners) and rest[-1] in ("k", "v")
    return "target" if first == "decoder" and not across else "source"


def _pairs(name: str, module: SelfAttention | CrossAttention) -> Callable[[Sizes], float]:
    """A function that returns the number of pairs of tokens that an attention multiplies: with a causal mask, only half
    of all pairs."""
    if isinstance(module, CrossAttention):
        return lambda sizes: float((sizes.tokens.double() * sizes.target.double()).sum())
    decodes = name.startswith("decoder.")

    def pairs(sizes: Sizes) -> float:
        n = (sizes.target if decodes else sizes.tokens).double()
        seen = n if module.window is None else n.clamp(max=module.window)
        if not module.causal:
            return float((2 * n * seen - seen.square() - (n - seen)).sum())
        return float((n * seen - seen.square() / 2).sum())

    return pairs


class Utilisation:
    """The operations of a run as a share of its devices' peak. Every rank creates one and calls it at the same steps.

    peak: operations per second of all devices together; None if that of one device is unknown.
    """

    def __init__(self, model: Model, device_peak: float | None):
        """device_peak: operations per second of one device; None: the published number."""
        self.done = 0.0
        device = engine.device()
        if device_peak is None and device.type == "cuda":
            device_peak = published_peak(torch.cuda.get_device_name(device))
        numbers = torch.tensor([device_peak or 0.0, float(device_peak is not None)], dtype=torch.float64)
        peak, known_devices = sum_over_ranks(numbers).tolist()
        self.peak = peak if known_devices == engine.world_size() else None
        networks = getattr(model, "networks", (model,))  # a model that consists of several
        self.arithmetics = [] if self.peak is None else [Arithmetic.of_model(net) for net in networks]

    def add(self, batch: Mapping[str, Any]) -> None:
        """Count a packed microbatch of this rank."""
        self.done += sum(each.operations(each.sizes(batch)) for each in self.arithmetics)

    def since_last(self, seconds: float) -> float | None:
        """The share of the peak used in the seconds since the last call. Collective."""
        if self.peak is None:
            return None
        # Ranks that share a model have the same batches.
        copies = engine.world_size() // engine.data_size()
        done = sum_over_ranks(torch.tensor([self.done], dtype=torch.float64)).item() / copies
        self.done = 0.0
        return done / max(seconds, 1e-9) / self.peak

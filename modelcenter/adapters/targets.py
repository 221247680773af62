"""Choosing the linear layers that LoRA adapts."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from engine.names import clean_name
from engine.ops import Experts
from modelcenter.convert.layout import Layout
from modelcenter.models.base import Model
from modelcenter.registry import nearest

ALL_LINEAR = "all-linear"


def choose_layers(
    model: Model, layout: Layout, targets: str | Sequence[str] | None, trained: Collection[str] = ()
) -> list[str]:
    """The names of the linear layers to adapt, in the model's order, without those of the fully `trained` parameters
    and those frozen by name.

    Raises:
        ValueError: a target matches no linear layer, or a fully trained one; or nothing is left to adapt.
    """
    chosen = [name for name in _layers_of(model, layout, targets, trained) if f"{name}.weight" not in model.frozen]
    if not chosen and model.frozen:
        raise ValueError("freeze: leaves no linear layer to adapt; freeze fewer, or leave lora_rank out")
    return chosen


def _layers_of(
    model: Model, layout: Layout, targets: str | Sequence[str] | None, trained: Collection[str]
) -> list[str]:
    found = [clean_name(n) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    linears = [n for n in found if not model.is_head(f"{n}.") and f"{n}.weight" not in model.constants]
    if targets is None or targets == ALL_LINEAR or list(targets) == [ALL_LINEAR]:
        return [name for name in linears if f"{name}.weight" not in trained]
    if not targets:
        raise ValueError("lora_targets: got none; name layers, or leave it out for every linear layer outside heads")
    hub_names = _hub_names(layout, linears)
    matched: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        patterns = (target, f"*.{target}")
        hits = [n for n in linears if any(fnmatchcase(x, p) for x in (n, *hub_names[n]) for p in patterns)]
        if not hits:
            leaves = {n.rpartition(".")[2] for n in (*linears, *(h for names in hub_names.values() for h in names))}
            experts = any(isinstance(module, Experts) for module in model.modules())
            raise ValueError(
                f"lora_targets: {target!r} matches no linear layer.{nearest(target, leaves)} This model has "
                f"{', '.join(sorted({n.rpartition('.')[2] for n in linears}))} (and Hugging Face's names of these), or "
                f"{ALL_LINEAR!r}" + "; experts and their routers are no linear layers, so they stay frozen" * experts
            )
        matched.update(hits)
    chosen = [name for name in linears if name in matched]
    if both := [name for name in chosen if f"{name}.weight" in trained]:
        raise ValueError(f"modules_to_save: {', '.join(both)} would be both fully trained and adapted; choose one")
    return chosen


def _hub_names(layout: Layout, linears: Sequence[str]) -> dict[str, list[str]]:
    """{linear layer: modules of transformers' model that hold its parameters}."""
    names: dict[str, list[str]] = {linear: [] for linear in linears}
    for key in layout.shapes:
        for native in layout.natives(key):
            module = native.rpartition(".")[0]
            if module in names:
                names[module].append(layout.written[key].rpartition(".")[0])
    return names

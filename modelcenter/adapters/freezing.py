"""Freezing parameters, and reporting which are trained."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine.checkpoint import all_tensors
from engine.names import clean_name
from engine.shards import is_sharded
from modelcenter.adapters.state import is_adapter, layout_of
from modelcenter.models.base import Model
from modelcenter.registry import nearest


@dataclass
class Freeze:
    """`freeze` for `from_pretrained(adapter=...)`."""

    patterns: str | Sequence[str]

    def attach(self, model: Model, fresh: Collection[str] = ()) -> None:
        freeze(model, self.patterns)

    def start(self, model: Model, seed: int = 0) -> None:
        pass


def freeze(model: Model, patterns: str | Sequence[str]) -> list[str]:
    """Freeze the parameters that match, and return their names. Call it before the model is sharded, and before `Lora`,
    which does not adapt layers with frozen weights.

    Args:
        patterns: names of parameters or of modules, ours or Hugging Face's, with * for any characters: "embed",
            "layers.0", "layers.*.mlp.*", "bert.embeddings". A parameter that is a part of a Hugging Face tensor (q of
            c_attn) is frozen with that tensor.

    Raises:
        ValueError: a pattern matches nothing (the message suggests the nearest names), or nothing is left to train.
    """
    if is_sharded(model):
        raise ValueError("freeze: the model is sharded already; pass adapter=Freeze([...]) to from_pretrained")
    _, layout = layout_of(model)
    names: dict[str, list[str]] = {clean_name(name): [] for name, _ in model.named_parameters()}
    for key in layout.shapes:
        for native in set(layout.natives(key)) & names.keys():
            names[native] += [layout.written[key], layout.in_model(key)]
    frozen: dict[str, None] = {}
    given = [patterns] if isinstance(patterns, str) else patterns
    for pattern in given:
        hits = [name for name, others in names.items() if any(_matches(pattern, n) for n in (name, *others))]
        if not hits:
            every = {place for name, others in names.items() for n in (name, *others) for place in _places(n)}
            raise ValueError(
                f"freeze: {pattern!r} matches no parameter.{nearest(pattern, sorted(every))} Names are those of "
                "model.named_parameters() or of Hugging Face's checkpoint; * matches any characters"
            )
        frozen.update(dict.fromkeys(hits))
    held = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    if not any(p.requires_grad for name, p in held.items() if name not in frozen):
        raise ValueError(f"freeze: {', '.join(given)} leave nothing to train")
    for name in frozen:
        held[name].requires_grad_(False)
    model.frozen |= frozen.keys()
    return list(frozen)


def _places(name: str) -> list[str]:
    """The name of a parameter, and of the modules that contain it."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts) + 1)]


def _matches(pattern: str, name: str) -> bool:
    return any(fnmatchcase(place, pattern) for place in _places(name))


def trainable_parameters(model: Model) -> str:
    """A line with the number of trained parameters; those of an adapter are also given separately."""
    trained = model.num_parameters(only_trainable=True)
    own = sum(t.numel() for name, t in all_tensors(model).items() if is_adapter(name))
    if model.adapter is None:
        whole = model.num_parameters()
    else:  # 4-bit weights show fewer elements than they hold
        whole = own + model.adapter.layout.num_parameters
    beside = f" ({own:,} of the adapter)" if own else ""
    return f"trainable parameters: {trained:,} of {whole:,}, {100 * trained / max(1, whole):.4g} %{beside}"

"""Units: the modules whose parameters are gathered together. What belongs to no unit belongs to the root, the model.

A parameter that two units share, or a unit and the root, cannot be gathered with either: such a unit is dissolved, and
its parameters become the root's. So do those of a unit that one forward runs several times (a list of units names it
that often): gathered, cast and reduced at each run, they would cost as much communication as so many layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn


def find_units(model: nn.Module) -> list[nn.Module]:
    """The blocks of any model: those that it or ``transformers`` declares, or else the items of its ModuleLists."""
    if callable(say := getattr(model, "shard_units", None)):
        return list(say())
    if names := set(getattr(model, "_no_split_modules", None) or ()):
        if found := [m for m in model.modules() if type(m).__name__ in names and m is not model]:
            return found
    found = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


@dataclass(frozen=True)
class Units:
    """The units of ``engine.shard``, in the order of ``model.modules()``.

    Attributes:
        gathered: those whose own parameters are gathered together, and in 16 bits cast together.
        repeated: those that a forward runs more than once; their parameters belong to the root.
    """

    gathered: list[nn.Module]
    repeated: list[nn.Module]

    @property
    def all(self) -> set[nn.Module]:
        return {*self.gathered, *self.repeated}


def units_of(model: nn.Module, units: Sequence[nn.Module] | None) -> Units:
    """The units of ``model``: those given, or found if None, except those without parameters or with shared ones.

    Raises ValueError if one of those given is not a module of ``model``.
    """
    chosen, repeated = _choose(model, units), _repeated(model, units)
    order = [module for module in model.modules() if module in chosen]
    return Units([m for m in order if m not in repeated], [m for m in order if m in repeated])


def _choose(model: nn.Module, units: Sequence[nn.Module] | None) -> set[nn.Module]:
    inside = set(model.modules())
    wanted = find_units(model) if units is None else list(units)
    chosen: set[nn.Module] = set()
    for unit in wanted:
        # A list has no forward of its own, so its items are the units.
        for module in unit if isinstance(unit, nn.ModuleList) else [unit]:
            if module not in inside:
                raise ValueError(f"units has a {type(module).__name__} that is not a module of {type(model).__name__}")
            if module is not model and next(module.parameters(), None) is not None:
                chosen.add(module)
    while shared := _sharing_units(model, chosen):
        chosen -= shared
    return chosen


def _repeated(model: nn.Module, units: Sequence[nn.Module] | None) -> set[nn.Module]:
    """The units that are listed more than once, because a forward runs them more than once."""
    runs = Counter(find_units(model) if units is None else units)
    return {unit for unit, count in runs.items() if count > 1}


def unit_parameters(model: nn.Module, units: Collection[nn.Module]) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """The (name, parameter) pairs that each unit, or the root, has of its own."""
    groups: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def visit(module: nn.Module, prefix: str, group: nn.Module) -> None:
        group = module if module in units else group
        if (module, group) in seen:  # once for each unit that holds the module
            return
        seen.add((module, group))
        groups.setdefault(group, []).extend(
            (prefix + name, p) for name, p in module._parameters.items() if p is not None
        )
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", group)

    visit(model, "", model)
    return groups


def _sharing_units(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Units that hold a parameter which another unit, or the root, holds too."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for group, members in unit_parameters(model, chosen).items():
        for _, parameter in members:
            holders.setdefault(parameter, set()).add(group)
    return {group for groups in holders.values() if len(groups) > 1 for group in groups if group is not model}

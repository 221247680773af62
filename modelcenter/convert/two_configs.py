"""The config.json of an encoder-decoder that contains one for each side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import COMMON, ConfigMap
from modelcenter.convert.rules import ArchMap


@dataclass(frozen=True)
class TwoConfigsMap(ConfigMap):
    """A config.json that contains those of both sides. An override unknown to the outer config goes to each side.

    Attributes:
        left_out: outer fields that a side's own replaces. not_of_sides: fields of the sides that the outer replaces.
    """

    left_out: tuple[str, ...] = ("vocab_size",)
    not_of_sides: tuple[str, ...] = ()

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = {name: value for name, value in values.items() if name not in self.left_out}
        changes = dict(overrides or {})
        known = {*config_class.field_names(), *self.fields, *COMMON}
        shared = {name: changes.pop(name) for name in list(changes) if name not in known}  # e.g. dropout, sizes
        of_decoder: dict[str, Any] = {name: changes.pop(name) for name in self.left_out if name in changes}
        sides = {side: changes.pop(side, given.get(side)) for side in ("encoder", "decoder")}
        for side, inner in sides.items():
            if isinstance(inner, Mapping):
                sides[side] = {name: value for name, value in inner.items() if name not in self.not_of_sides}
        held = {name for part in (given, *sides.values()) if isinstance(part, Mapping) for name in part}
        changes |= {name: None for name, value in shared.items() if value is None and name in given}
        for side, inner in sides.items():
            more: dict[str, Any] = {  # None drops a field where it exists; one that exists nowhere is unknown
                name: value
                for name, value in shared.items()
                if value is not None or name not in held or (isinstance(inner, Mapping) and name in inner)
            }
            more |= of_decoder if side == "decoder" else {}
            rules = self.side_rules(side, inner)
            try:
                read = rules.config.read(inner, config_class.kinds[rules.model_type], more)  # type: ignore[attr-defined]
            except ValueError as error:
                raise ValueError(f"{side}: {error}") from error
            given[side] = read.to_dict()
        return super().read(given, config_class, changes)

    def side_rules(self, side: str, values: Any) -> ArchMap:
        """The rules of a side, from its config.json. Raises ValueError if its family cannot be one."""
        raise NotImplementedError

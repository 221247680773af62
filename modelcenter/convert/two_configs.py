"""The config.json of an encoder-decoder that holds one for each side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.config_map import COMMON, ConfigMap
from modelcenter.convert.rules import ArchMap


@dataclass(frozen=True)
class TwoConfigsMap(ConfigMap):
    """A config.json that holds those of both sides. An override that is not of the whole is of each side.

    Attributes:
        left_out: of the whole, what a side's own says. not_of_sides: of the sides, what the whole says.
    """

    left_out: tuple[str, ...] = ("vocab_size",)
    not_of_sides: tuple[str, ...] = ()

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = {name: value for name, value in values.items() if name not in self.left_out}
        changes = dict(overrides or {})
        known = {*config_class.field_names(), *self.fields, *COMMON}
        shared = {name: changes.pop(name) for name in list(changes) if name not in known}  # of both: dropout, sizes
        of_decoder: dict[str, Any] = {name: changes.pop(name) for name in self.left_out if name in changes}
        sides = {side: changes.pop(side, given.get(side)) for side in ("encoder", "decoder")}
        for side, inner in sides.items():
            if isinstance(inner, Mapping):
                sides[side] = {name: value for name, value in inner.items() if name not in self.not_of_sides}
        held = {name for part in (given, *sides.values()) if isinstance(part, Mapping) for name in part}
        changes |= {name: None for name, value in shared.items() if value is None and name in given}
        for side, inner in sides.items():
            more: dict[str, Any] = {  # a field is dropped where it is, and unknown where it is nowhere
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
        """The rules of a side, from its config.json. Raises ValueError: it is of no family that can be one."""
        raise NotImplementedError

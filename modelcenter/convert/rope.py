"""Fields of rotary embeddings in config.json: transformers 5 keeps them in `rope_parameters`, version 4 one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeFields:
    """The names that version 4 gave to fields which version 5 keeps inside `rope_parameters`.

    Attributes:
        names: name inside `rope_parameters` -> name beside it. What has no name here is of `rope_scaling`.
    """

    names: Mapping[str, str]

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same fields in version 4's form: `rope_scaling` is None for an embedding that is not scaled."""
        values = dict(values)
        inside = values.pop("rope_parameters", None) or values.get("rope_scaling")
        if not inside:
            return values
        if not isinstance(inside, Mapping):
            raise ValueError(f"rope_scaling: got {inside!r:.80}, expected an object with a rope_type, or none")
        scaling = _one_spelling({key: value for key, value in inside.items() if key not in self.names})
        values |= {self.names[key]: value for key, value in inside.items() if key in self.names}
        values["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same fields in both forms and spellings, so that either version reads them."""
        values = dict(values)
        scaling = values.get("rope_scaling")
        inside = {"rope_type": "default", **(scaling or {})}
        inside |= {key: values[name] for key, name in self.names.items()}
        if scaling:
            values["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}
        return values | {"rope_parameters": inside}


def _one_spelling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, which was first called `type`; files of MiniCPM have both."""
    scaling = dict(scaling)
    kind = scaling.pop("type", "default")
    return {"rope_type": kind, **scaling}

"""Fields of rotary embeddings in config.json: in transformers 5 inside `rope_parameters`, in version 4 separate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelcenter.convert.config_map import set_once


@dataclass(frozen=True)
class RopeFields:
    """The names in version 4 of fields that version 5 keeps inside `rope_parameters`.

    Attributes:
        names: name inside `rope_parameters` -> version 4's name in config.json itself. Other fields belong to
            `rope_scaling`. Late files of version 4 have both names there.
    """

    names: Mapping[str, str]

    @property
    def handles(self) -> frozenset[str]:
        return frozenset({"rope_parameters", *self.names})

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in version 4's form: `rope_scaling` is None for an embedding that is not scaled.

        Raises:
            ValueError: a field has two names, or both forms, that differ, or its scaling is not supported by any model
                here.
        """
        values = dict(values)
        for name, flat_name in self.names.items():
            if name != flat_name:
                set_once(values, flat_name, values.pop(name, None), name)
        forms = [form for form in (values.pop("rope_parameters", None), values.get("rope_scaling")) if form]
        if not forms:
            return values
        for form in forms:
            if not isinstance(form, Mapping):
                raise ValueError(f"rope_scaling: got {form!r:.80}, expected an object with a rope_type, or none")
        parameters, other = forms[0], forms[-1]
        scaling = _one_spelling({key: value for key, value in parameters.items() if key not in self.names})
        # files for both versions have both; a user who adds rope_scaling to a file of version 5 makes them differ
        if not _one_spelling(other).items() <= _one_spelling(parameters).items():
            raise ValueError(
                f"config fields 'rope_parameters' and 'rope_scaling' differ: {parameters!r:.80} and {other!r:.80}. "
                "Write the scaling into 'rope_parameters' and remove 'rope_scaling'"
            )
        values |= {self.names[key]: value for key, value in parameters.items() if key in self.names}
        factor = scaling.pop("partial_rotary_factor", None)
        # With "default", transformers also rotates all channels.
        if factor not in (None, 1) and scaling["rope_type"] != "default":
            raise ValueError(f"rope_scaling: partial_rotary_factor is {factor!r}, but here every channel is rotated")
        values["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        return values

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in both forms and spellings, so that either version reads them."""
        values = dict(values)
        scaling = values.get("rope_scaling")
        parameters = {"rope_type": "default", **(scaling or {})}
        parameters |= {name: values[flat_name] for name, flat_name in self.names.items()}
        if scaling:
            values["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}
        return values | {"rope_parameters": parameters}


def _one_spelling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `type`, the first name of `rope_type`; files of MiniCPM have both."""
    scaling = dict(scaling)
    kind = scaling.pop("type", "default")
    return {"rope_type": kind, **scaling}

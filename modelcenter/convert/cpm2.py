"""CPM-2's checkpoints: T5's form, which transformers loads, marked by a second class in `architectures`.

A directory that transformers has saved again names only T5's class, and loads as T5: the same network. The published
files are Megatron's, one for each rank (convert.legacy.megatron).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelcenter.config import ModelConfig
from modelcenter.convert.t5 import ARCH as T5
from modelcenter.convert.t5 import T5ConfigMap


def _mark(hf_class: str) -> str:
    return hf_class.replace("T5", "CPM2")


@dataclass(frozen=True)
class CPM2ConfigMap(T5ConfigMap):
    """T5's config.json, with the second class."""

    def read(
        self, values: Mapping[str, Any], config_class: type[ModelConfig], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        given = dict(values)
        if given.get("model_type") == "t5":
            given["model_type"] = config_class.model_type
        return super().read(given, config_class, overrides)

    def write(self, config: ModelConfig, hf_class: str, dtype: str) -> dict[str, Any]:
        out = super().write(config, hf_class, dtype)
        return out | {"model_type": "t5", "architectures": [hf_class, _mark(hf_class)]}


ARCH = replace(
    T5,
    model_type="cpm2",
    tasks={name: replace(task, class_aliases=(_mark(task.hf_class),)) for name, task in T5.tasks.items()},
    config=CPM2ConfigMap(
        fields=T5.config.fields,
        required=T5.config.required,
        ignored=T5.config.ignored,
        scaled=lambda tied: False,
    ),
)

"""The kinds of attention in each layer, as in configs of transformers (`layer_types`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelcenter.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(kw_only=True)
class LayerTypesFields(ModelConfig):
    """Fields of models in which some layers have sliding-window attention. It is the last base of a config: it has the
    fields of ModelConfig too, whose defaults would otherwise take the place of the other base's.

    layer_types: for each layer "full_attention" or "sliding_attention". None: the family has a rule, in `slides` or in
    its `__post_init__`, which writes the types here.
    """

    num_layers: int
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (types := self.layer_types) is not None:
            known = len(types) == self.num_layers and set(types) <= {FULL, SLIDING}
            self.require(known, "layer_types", f"{self.num_layers} (num_layers) of {FULL} or {SLIDING}")

    def slides(self, layer: int) -> bool:
        """Whether layer 0, 1, ... has sliding-window attention."""
        assert self.layer_types is not None
        return self.layer_types[layer] == SLIDING

    def fields_of_kept_layers(self, numbers: Sequence[int], of_decoder: bool = False) -> dict[str, Any]:
        types = [SLIDING if self.slides(number) else FULL for number in numbers]
        return super().fields_of_kept_layers(numbers, of_decoder) | {"layer_types": types}

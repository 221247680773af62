"""The kinds of attention in each layer, as in configs of transformers (`layer_types`)."""

from modelcenter.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def check_layer_types(config: ModelConfig, types: list[str], num_layers: int) -> None:
    """Raise ValueError unless there is a known type for each layer."""
    known = len(types) == num_layers and set(types) <= {FULL, SLIDING}
    config.require(known, "layer_types", f"{num_layers} (num_layers) of {FULL} or {SLIDING}")

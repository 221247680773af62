"""Which of ModelCenter's networks a checkpoint is of."""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert.legacy.cpm import CPM1, CPM2, CPM3, CPM_BEE
from modelcenter.convert.legacy.networks import BERT, GPT2, GPTJ, ROBERTA, T5
from modelcenter.convert.legacy.translation import Config, LegacyNetwork
from modelcenter.convert.pieces import Shape

# The first that recognises a checkpoint takes it.
NETWORKS: tuple[LegacyNetwork, ...] = (CPM2, CPM_BEE, CPM3, CPM1, T5, ROBERTA, BERT, GPT2, GPTJ)


def has_legacy_names(names: Mapping[str, Any]) -> bool:
    """Whether these are the names of a network of ModelCenter's."""
    return "input_embedding.weight" in names and any(name.endswith("attention.project_q.weight") for name in names)


def legacy_prefix(names: Mapping[str, Any]) -> str:
    """What stands before the names of a network of ModelCenter's, as where a class with a head has it; "": nothing, or
    they are none of its."""
    known = "input_embedding.weight"
    prefixes = [name.removesuffix(known) for name in names if name.endswith(f".{known}")]
    return next((p for p in prefixes if has_legacy_names({name.removeprefix(p): None for name in names})), "")


def find_network(config: Config, shapes: Mapping[str, Shape], model_type: str | None = None) -> LegacyNetwork:
    """The network of a checkpoint.

    Args:
        config: its config.json. shapes: of its tensors. model_type: what the caller says it is.

    Raises:
        ValueError: none of those known, or not the one that the caller says.
    """
    named = model_type or config.get("model_type")
    for network in NETWORKS:
        if named in network.model_types or (named is None and network.recognises(config, shapes)):
            return network
    known = ", ".join(name for network in NETWORKS for name in network.model_types)
    raise ValueError(
        "a ModelCenter checkpoint whose architecture is not "
        + (f"{named!r}" if named else "recognised")
        + f"; known: {known}. Its class says which it is: modelcenter.Bert.from_pretrained(...)"
    )

"""Recognising which of ModelCenter's networks a checkpoint holds."""

from collections.abc import Mapping
from typing import Any

from modelcenter.convert.legacy.cpm import CPM1, CPM2, CPM3, CPM_BEE
from modelcenter.convert.legacy.networks import BERT, GPT2, GPTJ, LLAMA, OPT, ROBERTA, T5
from modelcenter.convert.legacy.translation import Config, LegacyNetwork
from modelcenter.convert.pieces import Shape

# The first network that recognises a checkpoint is used.
NETWORKS: tuple[LegacyNetwork, ...] = (CPM2, CPM_BEE, CPM3, CPM1, T5, ROBERTA, BERT, OPT, LLAMA, GPT2, GPTJ)

# A tensor that only this network of ModelCenter has -> the network, which is not supported here.
_UNSUPPORTED = {
    "block_position_embedding.weight": "GLM",
    "encoder.layers.0.self_att.self_attention.project_q_global.weight": "Longformer",
    "patch_embed.cls_token": "ViT",
}


def has_legacy_names(names: Mapping[str, Any]) -> bool:
    """Whether these are names in one of ModelCenter's networks."""
    embeds = "input_embedding.weight" in names or "patch_embed.cls_token" in names
    return embeds and any(name.endswith("attention.project_q.weight") for name in names)


def legacy_prefix(names: Mapping[str, Any]) -> str:
    """The prefix of the names of a ModelCenter network, such as that of a class with a head; "" if there is none, or if
    the names are not ModelCenter's."""
    known = "input_embedding.weight"
    prefixes = [name.removesuffix(known) for name in names if name.endswith(f".{known}")]
    return next((p for p in prefixes if has_legacy_names({name.removeprefix(p): None for name in names})), "")


def find_network(config: Config, shapes: Mapping[str, Shape], model_type: str | None = None) -> LegacyNetwork:
    """The network of a checkpoint.

    Args:
        config: its config.json. shapes: of its tensors. model_type: the architecture that the caller expects.

    Raises:
        ValueError: the network is unknown, or not the one that the caller expects.
    """
    known = ", ".join(name for network in NETWORKS for name in network.model_types)
    if unsupported := next((net for tensor, net in _UNSUPPORTED.items() if tensor in shapes), None):
        raise ValueError(f"a ModelCenter checkpoint of {unsupported}, which is not supported; supported: {known}")
    named = model_type or config.get("model_type")
    for network in NETWORKS:
        if named in network.model_types or (named is None and network.recognises(config, shapes)):
            return network
    raise ValueError(
        "a ModelCenter checkpoint whose architecture is not "
        + (f"{named!r}" if named else "recognised")
        + f"; known: {known}. Its class says which it is: modelcenter.Bert.from_pretrained(...)"
    )

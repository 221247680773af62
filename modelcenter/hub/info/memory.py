"""The memory for training and inference of a model, in bytes per rank, from parameter counts. Imports no torch."""

from collections.abc import Mapping

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params", "bf16-sr")
_SIXTEEN_BITS_KEPT = ("bf16-params", "bf16-sr")


def training_bytes(sizes: Mapping[str, int], layers: int, precision: str, zero: int, ranks: int) -> dict[str, int]:
    """Bytes that each rank needs for training with AdamW, without activations.

    Args:
        sizes: parameters by component. layers: number of units that hold the parameters of attention, mlp and norms;
            0: they run several times in a forward and belong to the root.
        precision, zero: as in engine.Policy. ranks: over which the model is sharded.

    Returns:
        kept: parameters, gradients and optimizer state between steps, as engine.describe counts them. working: maximum
            of gathered parameters and gradients that are not reduced yet.
    """
    total = sum(sizes.values())
    root = sum(sizes.get(name, 0) for name in ("embeddings", "pooler", "head", "other")) if layers else total
    unit = -(-(total - root) // max(layers, 1))
    stored = 2 if precision in _SIXTEEN_BITS_KEPT else 4
    state = {"bf16-params": 12, "bf16-sr": 8}.get(precision, 8)  # two moments, and an fp32 master of 16-bit parameters
    computed = 4 if precision == "fp32" else 2
    shard = -(-total // ranks) if zero else total
    kept = shard * (stored + stored + state)
    if ranks == 1 and precision == "fp32":
        return {"kept": kept, "working": 0}  # a plain module, not sharded
    if zero == 3:  # the root stays gathered until backward has passed it; at most two units are gathered at a time
        working = (root + 2 * unit) * computed + max(root, unit) * computed
    else:
        copies = 0 if zero == 0 and stored == computed else total * computed
        whole = {0: 0, 1: total * 4, 2: max(root, unit) * computed}[zero]  # level 1 reduces once per step, from fp32
        working = copies + whole
    return {"kept": kept, "working": working}


def inference_bytes(total: int, width: int, ranks: int = 1) -> int:
    """Bytes of the weights on each of `ranks` ranks, without keys, values and activations."""
    return -(-total // ranks) * width

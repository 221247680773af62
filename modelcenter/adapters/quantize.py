"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): the weights under an adapter in 4 bits, by bitsandbytes.

Runs on CUDA, and on CPUs with the versions of bitsandbytes that have CPU code (0.46 on). In one process only: a packed
weight cannot be cut into rows for other ranks. engine.shard leaves it as it is, for the precision of the rest.
"""

from typing import Any

import torch
from torch import nn

import engine

KINDS = ("nf4", "fp4")


def check_quantize(kind: str | None) -> None:
    """Raise ValueError unless weights can be quantised so here; None: they are not."""
    if kind is None:
        return
    if kind not in KINDS:
        raise ValueError(f"quantize: got {kind!r}, expected {' or '.join(KINDS)}, or leave it out")
    if engine.world_size() > 1:
        raise ValueError(
            f"quantize: got {kind!r} on {engine.world_size()} ranks; 4-bit weights cannot be sharded, so run one "
            "process, or load the base with dtype='bfloat16' and shard it"
        )
    import_bitsandbytes()


def import_bitsandbytes() -> Any:
    """The package bitsandbytes.

    Raises:
        ValueError: it is not installed, or does not work here.
    """
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"quantize: the package bitsandbytes cannot be used here ({error}): pip install 'modelcenter[qlora]'"
        ) from error
    return bitsandbytes


@torch.no_grad()
def quantized(linear: nn.Linear, kind: str) -> nn.Linear:
    """The same layer with its weight in 4 bits, on the same device; computes in the dtype of its input."""
    library = import_bitsandbytes()
    weight, device = linear.weight, linear.weight.device
    packed = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        quant_type=kind,
        device="meta",
    )
    packed.compute_type_is_set = True  # else it would be that of the first input for good
    # In eval mode on a CPU it would pack the weight anew for products that have no gradient, and keep it so.
    packed.support_avx512bf16_for_cpu = False
    packed.bias = linear.bias
    packed.weight = library.nn.Params4bit(weight.data, requires_grad=False, quant_type=kind, module=packed)
    return packed.to(device)

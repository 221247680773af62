"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): 4-bit weights under an adapter, by bitsandbytes.

It runs on CUDA, and on CPUs with versions of bitsandbytes that support them (0.46 and later). Only one process is
supported, because a packed weight cannot be split into rows; engine.shard then only sets the precision of the rest.
"""

from typing import Any

import torch
from torch import nn

import engine

KINDS = ("nf4", "fp4")


def check_quantize(kind: str | None) -> None:
    """Raise ValueError unless weights can be quantised this way here; None: no quantisation."""
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
    """The layer with a 4-bit weight, on the same device; it computes in the dtype of its input."""
    library = import_bitsandbytes()
    weight, device = linear.weight, linear.weight.device
    packed = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        quant_type=kind,
        device="meta",
    )
    packed.compute_type_is_set = True  # else the first input would set it permanently
    # In eval mode on a CPU, it would permanently repack the weight for products without a gradient.
    packed.support_avx512bf16_for_cpu = False
    packed.bias = linear.bias
    packed.weight = library.nn.Params4bit(weight.data, requires_grad=False, quant_type=kind, module=packed)
    return packed.to(device)

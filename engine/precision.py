"""The policy: how a model is sharded and in which numbers it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")


@dataclass(frozen=True)
class Policy:
    """How ``engine.shard`` treats a model.

    Attributes:
        zero_level: 0 to 3; None: what ``init_distributed`` was given.
        precision:
            "fp32": parameters are used as they are;
            "bf16", "fp16": forward and backward in 16 bits, parameters kept and gradients reduced in fp32
            (fp16 needs ``OptimManager(loss_scale=...)``);
            "bf16-params": parameters are bf16, gradients are reduced in fp32, ``AdamOptimizer`` keeps fp32 masters.

    Raises:
        ValueError: a value is not one of these.
    """

    zero_level: int | None = None
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.zero_level not in (None, 0, 1, 2, 3):
            raise ValueError(f"zero_level is {self.zero_level!r}, expected 0, 1, 2, 3 or None")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of parameters and of floating-point inputs in forward and backward; None: as they are."""
        import torch

        return {"fp32": None, "fp16": torch.float16}.get(self.precision, torch.bfloat16)

    def mixed_precision(self) -> MixedPrecisionPolicy:
        """The same in FSDP's words."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        reduce_dtype = None if self.precision == "fp32" else torch.float32
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=reduce_dtype)

    def cast_parameters_(self, model: nn.Module) -> None:
        """Bring the parameters to the dtype they are kept in.

        Only trainable ones are raised to fp32 for "bf16" and "fp16": a frozen 16-bit base gains nothing by it.
        """
        import torch

        if self.precision == "fp32":
            return
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if self.precision == "bf16-params":
                parameter.data = parameter.data.to(torch.bfloat16)
            elif parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)

"""The policy: how a model is sharded, in which precision it computes, and what it recomputes or offloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

RECOMPUTE = ("none", "cheap", "full", "selective", "offload")
OFFLOAD = ("none", "optimizer", "all")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params", "bf16-sr")


@dataclass(frozen=True)
class Policy:
    """How ``engine.shard`` treats a model.

    Attributes:
        zero_level: 0 to 3; None: what ``init_distributed`` was given.
        precision:
            "fp32": parameters are used as they are;
            "bf16", "fp16": forward and backward in 16 bits, parameters kept and gradients reduced in fp32
            (fp16 needs ``OptimManager(loss_scale=...)``);
            "bf16-params": parameters are bf16, gradients are reduced in fp32, ``engine.accumulate`` sums them in fp32,
            and ``AdamOptimizer`` keeps fp32 masters;
            "bf16-sr": the same without masters: ``AdamOptimizer`` rounds each update into the parameters at random, so
            that its expectation is exact (``engine.optim.rounding``); another optimizer rounds to nearest.
        recompute: what backward computes again, instead of forward keeping it in memory:
            "none": nothing;
            "cheap": the results of this project's norms, activations and dropouts that a matrix product reads, and
            16-bit casts of parameters, which take hardly longer to compute again than to read. In a compiled unit,
            torch.compile decides what it recomputes;
            "full": everything, from the unit's input;
            "selective": everything but the outputs of matrix products and attention operators;
            "offload": nothing; what forward keeps is in host memory.
            Dropout draws the same masks again, because torch's generators are restored (Python's and numpy's are not).
            "selective" does not work for units that later change a kept output in place (torch raises in backward) nor,
            in a sharded model, for units that contain other units.
        offload: what is kept in host memory instead of on the device:
            "optimizer": the optimizer's states; the optimizer must be an ``AdamOffloadOptimizer``;
            "all": also what forward keeps for backward, as with recompute="offload", which it implies.
            Parameters and gradients stay on the device; ZeRO level 3 splits them over ranks.
        compile: compile the forward of each unit: True (torch's default backend) or a backend's name.
        sequence_parallel: with tp_size above 1, also split by tokens what tensor parallelism alone repeats on each
            rank: norms, dropout and residuals of the units (Korthikanti et al. 2022, arXiv:2205.05198).

    Raises:
        ValueError: a value is not one of these, or offload is "all" and recompute discards what that keeps.
    """

    zero_level: int | None = None
    precision: str = "fp32"
    recompute: str = "none"
    offload: str = "none"
    compile: bool | str = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.zero_level not in (None, 0, 1, 2, 3):
            raise ValueError(f"zero_level is {self.zero_level!r}, expected 0, 1, 2, 3 or None")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}, expected one of {', '.join(RECOMPUTE)}")
        if self.offload not in OFFLOAD:
            raise ValueError(f"offload is {self.offload!r}, expected one of {', '.join(OFFLOAD)}")
        if self.offload == "all":
            if self.recompute not in ("none", "offload"):
                raise ValueError(
                    f"offload is 'all', which keeps activations in host memory, but recompute={self.recompute!r} "
                    "recomputes them: pass offload='optimizer' with it, or leave recompute out"
                )
            object.__setattr__(self, "recompute", "offload")
        if not isinstance(self.compile, bool | str):
            raise ValueError(f"compile is {self.compile!r}, expected True, False or a backend of torch.compile")
        if not isinstance(self.sequence_parallel, bool):
            raise ValueError(f"sequence_parallel is {self.sequence_parallel!r}, expected True or False")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of parameters and of floating-point inputs in forward and backward; None: as they are."""
        import torch

        return {"fp32": None, "fp16": torch.float16}.get(self.precision, torch.bfloat16)

    def mixed_precision(self) -> MixedPrecisionPolicy:
        """The precision as FSDP's policy."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        reduce_dtype = None if self.precision == "fp32" else torch.float32
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=reduce_dtype)

    def cast_parameters_(self, model: nn.Module) -> None:
        """Convert the parameters, in place, to the dtype in which they are stored.

        With "bf16" and "fp16", only trainable ones become fp32: a frozen 16-bit base would gain nothing.
        """
        import torch

        if self.precision == "fp32":
            return
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if self.precision in ("bf16-params", "bf16-sr"):
                parameter.data = parameter.data.to(torch.bfloat16)
            elif parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)

"""BMTrain's layers."""

from engine.bmtrain.linear import Linear, OpLinear
from engine.bmtrain.parallel import ColumnParallelLinear, OpParallelLinear, ReduceType, RowParallelLinear, VPEmbedding

__all__ = [
    "ColumnParallelLinear",
    "Linear",
    "OpLinear",
    "OpParallelLinear",
    "ReduceType",
    "RowParallelLinear",
    "VPEmbedding",
]

"""BMTrain's tensor-parallel layers: each rank of a ``tp`` group holds a part of each matrix.

Activations between layers are split by rows (dimension 0) over the group, or whole on each rank, as the arguments of
each layer say. Gradients are those of one loss: either the same value on all ranks of the group, or the sum of the
losses that each rank computes from its own rows. Parameters have their whole shapes until ``init_parameters`` or
``load`` shards the model, and again in the files of ``save``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from engine import runtime
from engine.bmtrain.linear import Linear
from engine.bmtrain.parameter import DistributedModule, DistributedParameter, ParameterInitializer
from engine.ops import linear
from engine.parallel import functional as f
from engine.parallel.mesh import device_mesh


class ReduceType(Enum):
    """How ranks that each have a part of the inputs sum their partial outputs."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2


class OpParallelLinear:
    """``OpParallelLinear.apply(x, weight, ...)``: the product with this rank's part of a weight, differentiable."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | int | None = None,
        async_gather_chunks: int = 2,
    ) -> Tensor:
        """input (rows, ..., in) @ weight.T + bias, over the ranks of this rank's tensor-parallel group.

        Args:
            weight: (out, in), this rank's rows or columns of the whole. bias: (out,), added before any sum.
            gather_input: the input has this rank's rows, and those of all ranks are gathered.
            split_input: multiply only this rank's columns of the input.
            gather_output: return the columns of all ranks.
            reduce_output_type: sum the outputs over ranks: all rows on each rank, or each rank's rows. None: no sum.
            async_gather_chunks: ignored.
        """
        group = _group()
        kind = None if reduce_output_type is None else ReduceType(reduce_output_type)
        if group is None:
            return linear(input, weight, bias)
        if gather_input:
            input = f.gather_rows(input, group)
        elif kind is None:
            input = f.copy_to(input, group)
        if split_input:
            width = input.shape[-1] // group.size()
            input = input.narrow(-1, group.rank() * width, width)
        out = linear(input, weight, bias)
        if gather_output:
            out = f.join_columns(out, group, out.shape[-1] * group.size())
        if kind is ReduceType.ALL_REDUCE:
            return f.reduce_from(out, group)
        if kind is ReduceType.REDUCE_SCATTER:
            if out.shape[0] % group.size():
                raise ValueError(
                    f"dimension 0 has {out.shape[0]} rows, which {group.size()} ranks (tp_size) cannot share: pad "
                    "them, or use all_reduce_output=True"
                )
            return f.scatter_sum_rows(out, group)
        return out


def _group() -> Any:
    """The tensor-parallel group of this rank; None: it is alone."""
    return device_mesh()["tp"].get_group() if runtime.current().tp_size > 1 else None


def _check(name: str, size: int) -> None:
    ranks = runtime.current().tp_size
    if size % ranks:
        raise ValueError(f"{name} is {size}, expected a multiple of the {ranks} ranks that share it (tp_size)")


class _Parallel(DistributedModule):
    """A layer that declares how it is split: engine.parallel.tensor reads `tp_split` when it shards the model.

    Attributes:
        tp_split: {parameter: the dimension that is split over the ranks; None: whole on each rank}.
    """

    tp_split: ClassVar[dict[str, int | None]]

    def local(self, name: str, partial: bool = False) -> Any:
        """This rank's part of a parameter. partial: sum the gradients of the ranks, each from its own rows."""
        parameter = self._parameters[name]  # the attribute would gather it
        if not isinstance(parameter, DTensor):
            return parameter
        return parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()


class ColumnParallelLinear(_Parallel, Linear):
    """A linear layer whose output features are split over the ranks.

    ``init_parameters`` draws the whole weight by xavier_normal_; bias is 0.

    Args:
        in_features, out_features: those of the whole layer; tp_size divides out_features.
        gather_input: the input has this rank's rows, (rows, ..., in_features), and the output all rows,
            (tp_size * rows, ..., out_features / tp_size). False: the input is the same on all ranks.
        gather_output: return all features on each rank, (..., out_features).
        async_gather_chunks: ignored (BMTrain's overlap).

    Raises:
        ValueError: tp_size does not divide out_features.
    """

    tp_split: ClassVar[dict[str, int | None]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
    ) -> None:
        _check("out_features", out_features)
        super().__init__(in_features, out_features, bias, dtype)
        self.gather_output, self.gather_input = gather_output, gather_input

    def forward(self, input: Tensor) -> Tensor:
        """input (rows, ..., in_features) -> (all rows, ..., this rank's output features)."""
        weight, bias = self.local("weight"), self.local("bias")
        return OpParallelLinear.apply(input, weight, bias, self.gather_input, self.gather_output)


class RowParallelLinear(_Parallel, Linear):
    """A linear layer whose input features are split over the ranks, which sum their outputs.

    ``init_parameters`` draws the whole weight by xavier_normal_; bias is 0. The bias is added once.

    Args:
        in_features, out_features: those of the whole layer; tp_size divides in_features.
        split_input: the input has this rank's rows with all features, (rows, ..., in_features); rows are gathered.
            False: it has all rows with this rank's features, as ColumnParallelLinear returns them.
        all_reduce_output: return all rows on each rank. False: each rank's rows, (rows / tp_size, ..., out_features).
        async_chunks: ignored (BMTrain's overlap).

    Raises:
        ValueError: tp_size does not divide in_features.
    """

    tp_split: ClassVar[dict[str, int | None]] = {"weight": 1, "bias": None}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
    ) -> None:
        _check("in_features", in_features)
        super().__init__(in_features, out_features, bias, dtype)
        self.split_input, self.all_reduce_output = split_input, all_reduce_output

    def forward(self, input: Tensor) -> Tensor:
        """input (rows, ..., this rank's input features) -> (rows, ..., out_features)."""
        kind = ReduceType.ALL_REDUCE if self.all_reduce_output else ReduceType.REDUCE_SCATTER
        weight, split = self.local("weight"), self.split_input
        out = OpParallelLinear.apply(input, weight, None, split, False, split, kind)
        bias = self.local("bias", partial=not self.all_reduce_output)
        return out if bias is None else out + bias


class VPEmbedding(_Parallel):
    """An embedding, and a projection onto the vocabulary, whose rows are split over the ranks.

    Args:
        vocab_size: number of words, a multiple of tp_size. embedding_size: length of each embedding.
        init_mean, init_std: those of the normal distribution from which ``init_parameters`` draws.

    Raises:
        ValueError: tp_size does not divide vocab_size.
    """

    tp_split: ClassVar[dict[str, int | None]] = {"weight": 0}

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        _check("vocab_size", vocab_size)
        super().__init__()
        self.vocab_size, self.dim_model = vocab_size, embedding_size
        self.weight = DistributedParameter(
            torch.empty(vocab_size, embedding_size, dtype=dtype),
            init_method=ParameterInitializer(nn.init.normal_, mean=init_mean, std=init_std),
        )

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        """Embed the words of this rank's rows: x (rows, ...) integers -> (rows, ..., embedding_size).

        With ``projection``, x (rows, ..., embedding_size) -> (all rows, ..., vocab_size / tp_size): the logits of this
        rank's words, for ``loss.FusedCrossEntropy(parallel=True)`` with the targets of all rows.
        """
        weight, group = self.local("weight"), _group()
        if projection:
            return OpParallelLinear.apply(x, weight, None, True)
        return F.embedding(x, weight if group is None else f.gather_rows(weight, group))

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return f"vocab_size={self.vocab_size}, embedding_size={self.dim_model}"

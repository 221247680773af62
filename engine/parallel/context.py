"""Context and sequence parallelism: each rank of a group computes a part of the tokens of a batch.

A model takes part through one object, ``token_split``, which its forward asks for this rank's tokens, for sums and for
all rows; see ``TokenSplit``. Tokens are rows: a batch without padding is one axis of T tokens, split into equal parts
(a dummy sequence fills the last one). Attention needs whole sequences. If the number of ranks divides the number of
heads, the ranks exchange tokens for heads (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509); otherwise they
gather keys and values.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from engine.parallel import functional as f
from engine.parallel.rng import rng_streams


class TokenSplit:
    """Which tokens this rank computes, and the collectives over the ranks that compute the others.

    With ``sequence``, the tokens of a rank are split once more while the units run, over the ranks of tensor
    parallelism: ``to_units`` and ``from_units``.

    Attributes:
        size, rank: of the group that shares tokens from the embedding to the head; 1 and 0 without context parallelism.
        multiple: the number of tokens must be a multiple of it.
    """

    def __init__(self, mesh: DeviceMesh, sequence: bool = False) -> None:
        self._group = mesh["cp"].get_group()
        self.size, self.rank = mesh["cp"].size(), mesh["cp"].get_local_rank()
        self._tp = mesh["tp"].get_group() if sequence else None
        self._tp_rank = mesh["tp"].get_local_rank()
        self.multiple = self.size * (mesh["tp"].size() if sequence else 1)
        self._training = False

    def padding(self, tokens: int) -> int:
        """Length of the dummy sequence. Even an empty batch gets one, so that every rank has tokens."""
        return -tokens % self.multiple if tokens else self.multiple

    def local(self, x: Tensor) -> Tensor:
        """This rank's rows of x (T, ...), which every rank has and which needs no gradient."""
        rows = x.shape[0] // self.size
        return x.narrow(0, self.rank * rows, rows)

    def gather(self, x: Tensor) -> Tensor:
        """(T / size, ...) of each rank -> (T, ...), differentiable."""
        return f.gather_rows(x, self._group) if self.size > 1 else x

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, differentiable, for losses over tokens."""
        return f.sum_over(x, self._group) if self.size > 1 else x

    def sum_of_units(self, x: Tensor) -> Tensor:
        """The sum of x, which each rank computed from its rows in the units, over the ranks; differentiable."""
        return self.sum(x if self._tp is None else f.reduce_from(x, self._tp))

    def to_heads(self, x: Tensor) -> Tensor:
        """(T / size, n, heads * d) -> (T, n, heads / size * d): from some tokens of all heads to all tokens of some."""
        parts = x.unflatten(2, (self.size, -1)).movedim(2, 0)
        return f.all_to_all(parts.contiguous(), self._group).flatten(0, 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """(T, heads / size * d) -> (T / size, heads * d): the reverse of `to_heads`."""
        parts = f.all_to_all(x.unflatten(0, (self.size, -1)), self._group)
        return parts.movedim(0, 1).flatten(1)

    def enter(self, training: bool) -> None:
        """From here on, activations are this rank's tokens, so each rank draws its own random numbers."""
        self._training = training
        if training and self.size > 1:
            rng_streams.enter("cp", self.rank)

    def to_units(self, x: Tensor) -> Tensor:
        """The input of the units: with ``sequence``, this rank's rows of x."""
        if self._tp is None:
            return x
        if self._training:
            rng_streams.enter("sp", self._tp_rank)
        return f.split_rows(x, self._tp)

    def of_units(self, x: Tensor) -> Tensor:
        """As `to_units`, for tensors that need no gradient."""
        if self._tp is None:
            return x
        rows = x.shape[0] * self.size // self.multiple
        return x.narrow(0, self._tp_rank * rows, rows)

    def from_units(self, x: Tensor, last: bool = True) -> Tensor:
        """The reverse of `to_units`, for the output of a unit. last: no unit comes after it."""
        if self._tp is None:
            return x
        if last:
            rng_streams.leave("sp")
        return f.join_rows(x, self._tp)

    def gather_units(self, x: Tensor) -> Tensor:
        """This rank's rows, as a unit gets them -> all rows (T, ...), differentiable."""
        return self.gather(x if self._tp is None else f.gather_rows(x, self._tp))

    def leave(self) -> None:
        """From here on, all ranks compute the same, and draw the same random numbers."""
        rng_streams.leave("cp")


def split_tokens(model: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> None:
    """Give ``model`` its ``token_split``.

    Raises ValueError if it has no such attribute: a model that does not use it would compute wrong results.
    """
    if not hasattr(model, "token_split"):
        raise ValueError(
            f"cp_size is {mesh['cp'].size()} and sequence_parallel is {sequence}, but {type(model).__name__} has no "
            "attribute token_split, which splitting its tokens needs: use cp_size=1 and no sequence_parallel"
        )
    model.token_split = TokenSplit(mesh, sequence)  # type: ignore[assignment]

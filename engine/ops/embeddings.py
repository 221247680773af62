"""Embedding tables whose gradients cost as much as the rows that are looked up, and are accurate in 16 bits on CPUs."""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from engine.ops.table_memory import TableMemory, table_memory
from engine.tensors import local_tensor
from engine.torch_compat import (
    assert_on_device,
    can_go_backward,
    run_after_backward,
    running_backward,
    will_accumulate,
)

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class _GivenGradient:
    """A gradient of a whole table that autograd has received in this backward pass, and the rows that look-ups add.

    The gradient of a look-up is zero except for some rows. As a separate tensor it would have to be filled, and the
    whole table traversed to add it. Instead, a hook adds the rows to the sum of the table's gradients.

    Args:
        node: the autograd node of a head that made the gradient in forward; None: a look-up, which makes a new one each
            time.
    """

    def __init__(self, node: Any = None):
        self._pass, self._node = running_backward(), None if node is None else weakref.ref(node)
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._hook: Any = None

    def takes(self, table: Tensor, rows: Tensor, sums: Tensor) -> bool:
        """In the backward of a look-up: accept sums (n, width) to add to rows (n,), without duplicates. False: the
        look-up must return its gradient itself, as this is another pass, or another hook must see the whole gradient.
        """
        if running_backward() != self._pass:
            return False
        if self._hook is None:
            if table._backward_hooks:
                return False
            self._hook = table.register_hook(self._add)
            run_after_backward(self._end)
        self._rows.append((rows, sums))
        return True

    def _add(self, grad: Tensor) -> Tensor | None:
        if running_backward() != self._pass:  # another thread's backward, or a later one after this has failed
            return None
        node = None if self._node is None else self._node()
        if node is not None and can_go_backward(node):  # the head keeps its gradient for another backward
            grad = grad.clone()
        whole = local_tensor(grad)
        for rows, sums in self._rows:
            whole.index_add_(0, rows, sums.to(whole.dtype))
        return grad

    def _end(self) -> None:
        self._hook.remove()
        self._rows.clear()


# {table: the last gradient of the whole table}, for tables that are also heads, and for large ones.
_given = WeakTensorKeyDictionary()


def head_gives_gradient(table: Tensor, node: Any) -> None:
    """Called in the backward of a head, with its autograd node: the head returns the gradient of a plain table."""
    _given[table] = _GivenGradient(node)


def takes_rows(table: Tensor, rows: Tensor, sums: Tensor) -> bool:
    """In the backward of a look-up: add its rows to an existing gradient of the table, from this pass or from earlier
    microbatches. Autograd would add whole tables, although only these rows differ from zero.

    Args:
        table: a parameter; of a shard, rows of this rank. rows: (n,), without duplicates. sums: (n, width).

    Returns:
        False: the look-up must return its gradient itself and, if the table is large, call `gives_gradient`.
    """
    given, grad = _given.get(table), table.grad
    if given is not None and given.takes(table, rows, sums):
        return True
    if grad is None or torch.is_grad_enabled() or table._backward_hooks or not will_accumulate(table):
        return False
    whole = local_tensor(grad)
    if type(whole) is not Tensor or whole.layout is not torch.strided:
        return False
    whole.index_add_(0, rows, sums.to(whole.dtype))
    return True


def gives_gradient(table: Tensor | None) -> None:
    """Called in the backward of a look-up: it returns the gradient of a whole table, to which others may add. None: the
    table no longer exists."""
    if table is not None:
        _given[table] = _GivenGradient()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int, memory: TableMemory | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table if table.is_leaf else None
        ctx.shape, ctx.padding, ctx.memory = table.shape, padding, memory
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,), memory = ctx.saved_tensors, ctx.memory
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        rows, at = ids.unique(return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(wide, at, len(rows), -1, False).to(grad.dtype)
        if ctx.padding >= 0:
            sums[rows == ctx.padding] = 0.0
        rows, table = rows.long(), ctx.table
        if table is not None and takes_rows(table, rows, sums):
            return None, None, None, None
        if memory is not None:
            gives_gradient(table)
        whole = grad.new_zeros(ctx.shape) if memory is None else memory.gradients.take_zeros(ctx.shape, grad.dtype)
        return None, whole.index_copy_(0, rows, sums), None, None


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """F.embedding, with gradients summed in fp32.

    On a CPU torch sums the gradients of a 16-bit table in 16 bits, where a sum stops growing at 256 (bf16) or 2,048
    (fp16) times its summands: a row that 4,096 tokens look up, such as a token type, keeps a sixteenth of its gradient.

    Args:
        ids: integers of any shape. weight: (rows, width). padding_idx: a row that is not trained.

    Returns:
        (*shape of ids, width).
    """
    if weight.is_cpu and weight.requires_grad and torch.is_grad_enabled():
        memory = table_memory(weight)
        plain = type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
        if memory is not None or (plain and (weight.dtype in _SIXTEEN_BITS or weight in _given)):
            padding = -1 if padding_idx is None else padding_idx % len(weight)
            return _Lookup.apply(ids, weight, padding, memory)
    return F.embedding(ids, weight, padding_idx)


class Embedding(nn.Embedding):
    """torch.nn.Embedding that looks up by `embedding`. Raises ValueError for max_norm, scale_grad_by_freq and sparse,
    which that does not support."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = {"max_norm": self.max_norm, "scale_grad_by_freq": self.scale_grad_by_freq, "sparse": self.sparse}
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(f"Embedding does not support {', '.join(wrong)}: leave it out, or use torch.nn.Embedding")

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx)


def check_ids(ids: Tensor, rows: int) -> None:
    """Check the ids for a table of `rows` rows that are split over ranks: an id beyond them would give zeros.

    Raises IndexError as nn.Embedding does; on a GPU it is a device-side assertion.
    """
    if ids.device.type != "cpu":
        assert_on_device(((ids >= 0) & (ids < rows)).all(), "index out of range of a table that tp_size splits")
    elif ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < rows):
        raise IndexError(f"index out of range: the table has {rows} rows")

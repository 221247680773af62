"""Collectives of ranks with pretended GPUs: they run over gloo and are checked by NCCL's rules.

A rank's process group serves both its devices, as "cpu:gloo,cuda:nccl" does. NCCL's asynchrony and speed are not
simulated.
"""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.startup import init_distributed
from engine.torch_compat import default_store

NAMESPACES = ("c10d", "_c10d_functional")
# ncclDataType of ProcessGroupNCCL, which has no 16-bit integers. Complex numbers are passed as pairs.
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
SECONDS = 20.0
_met: set[tuple[str, int, int]] = set()  # pairs of ranks of a group that have a communicator
_for_hosts: set[str] = set()  # names of groups with only gloo


class Nccl:
    """Raises for calls that NCCL does not support, or in which ranks would wait forever."""

    def check(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        """Check a collective or message, torch's operator `func`, with these tensors on the GPU."""
        name = func.__name__.partition(".")[0]
        copied = func.namespace == "_c10d_functional" and name in ("all_reduce", "broadcast")  # to contiguous memory
        name = name.rstrip("_")
        for x in tensors:
            if x.dtype not in DTYPES:
                raise RuntimeError(f"{name}: NCCL has no {x.dtype}")
            if not x.is_contiguous() and not copied:
                raise RuntimeError(f"{name}: NCCL takes contiguous tensors, this has strides {x.stride()}")
        for value in args:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                group = dist.ProcessGroup.unbox(value)
                if group.group_name in _for_hosts:
                    raise RuntimeError(f"{name} of a GPU's tensor in a group that has gloo alone")
                if name in ("send", "recv"):
                    self._meet(name, group, *args[2:4])
        if name == "recv_any_source":
            raise RuntimeError("NCCL receives from a rank that is named")

    @staticmethod
    def _meet(name: str, group: dist.ProcessGroup, other: int, tag: int) -> None:
        """For the first message between two ranks of a group, wait until both have reached it, because they create a
        communicator together."""
        if tag:
            raise RuntimeError(f"{name}: NCCL has no tags, got {tag}")
        me = group.rank()
        key = group.group_name, min(me, other), max(me, other)
        if key not in _met:
            store = default_store()
            store.set(f"nccl/{key}/{me}", "")
            try:
                store.wait([f"nccl/{key}/{other}"], datetime.timedelta(seconds=SECONDS))
            except RuntimeError as error:
                raise RuntimeError(f"{name}: rank {other} of the group did not come to its first message") from error
            _met.add(key)


@contextmanager
def over_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside ``pretended``, on a rank of ``engine.testing``: initialise the engine on this rank's GPU, where DTensors
    are."""
    from torch.distributed.tensor import DTensor

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = made(*args, backend=backend, **kwargs)
        if backend == "gloo" and hasattr(group, "group_name"):
            _for_hosts.add(group.group_name)
        return group

    made = dist.new_group
    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        for name in ("device", "is_cuda", "is_meta"):  # in C++ a wrapper has the device of its content: meta
            patch.setattr(DTensor, name, property(lambda self, name=name: getattr(self._local_tensor, name)), False)
        init_distributed()
        yield

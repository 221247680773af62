"""What NCCL would be given by ranks whose GPUs are pretended: it goes over gloo, and is checked by NCCL's rules.

A rank's process group serves both its devices, as "cpu:gloo,cuda:nccl" does. Not pretended is what only NCCL and
streams bring: that the host goes on at once, and the speed.
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
# ncclDataType of ProcessGroupNCCL, which knows no 16-bit integers. Complex numbers it is given as pairs.
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
SECONDS = 20.0
_met: set[tuple[str, int, int]] = set()  # pairs of ranks of a group between which there is a communicator
_for_hosts: set[str] = set()  # names of groups that have gloo alone


class Nccl:
    """Raises for a call that NCCL does not take, or that ranks would wait in for ever."""

    def check(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        """A collective or message of these tensors, which are on the GPU: func is torch's operator for it."""
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
        """The first message between two ranks of a group: both wait until the other has come to it, too, as they make
        a communicator of the two."""
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
    """Inside ``pretended``, on a rank of ``engine.testing``: ``init_distributed`` takes this rank's GPU, and DTensors
    are on it."""
    from torch.distributed.tensor import DTensor

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = made(*args, backend=backend, **kwargs)
        if backend == "gloo" and hasattr(group, "group_name"):
            _for_hosts.add(group.group_name)
        return group

    made = dist.new_group
    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        for name in ("device", "is_cuda", "is_meta"):  # in C++ a wrapper has the device of what is in it: meta
            patch.setattr(DTensor, name, property(lambda self, name=name: getattr(self._local_tensor, name)), False)
        init_distributed()
        yield

"""A check that the ranks which compute a batch together were given the same one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from engine import runtime
from engine.collectives import first_difference
from engine.parallel.rng import rng_streams
from engine.tensors import as_bytes, local_tensor


def check_inputs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each call of ``model`` check that the ranks which compute a batch together were given the same inputs.

    A difference would give wrong results, or kill the process inside a collective. Shapes are compared on every device,
    values only on the CPU, since comparing them elsewhere would wait for the device.
    """
    groups = {name: mesh[name].get_group() for name in ("tp", "cp") if mesh[name].size() > 1}
    depths: list[int] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not depths:
            rng_streams.forget()
        depths.append(rng_streams.depth())
        mine = zlib.crc32(repr(sorted(kwargs)).encode(), digest((args, kwargs)))
        for name, group in groups.items():
            other = first_difference(mine, group)
            if other is not None:
                raise ValueError(
                    f"rank {runtime.rank()} computes one batch together with {group.size() - 1} other(s) "
                    f"({name}_size={group.size()}), but its inputs differ from those of number {other} of them: split "
                    "the data by engine.data_rank() and engine.data_size(), not by rank and world size"
                )

    def after(module: nn.Module, *_: Any) -> None:
        rng_streams.unwind(depths.pop() if depths else 0)

    model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    model.register_forward_hook(after, always_call=True)


def digest(value: Any) -> int:
    """A checksum of inputs: of names and shapes, and for tensors on the CPU also of values."""
    found = 0
    for name, x in _tensors_in(value):
        found = zlib.crc32(repr((name, tuple(x.shape), x.dtype)).encode(), found)
        if x.device.type == "cpu":
            found = zlib.crc32(as_bytes(x.contiguous()).numpy().data, found)
    return found


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, local_tensor(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors_in(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, name)

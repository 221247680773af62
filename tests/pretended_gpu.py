"""A simulated GPU: tensors report the device cuda:0 and hold their values on the CPU. Each of several ranks may have
one, see pretended_nccl.

Mixing devices fails as on a GPU, and so does waiting for it under set_sync_debug_mode("error"). A non-blocking copy to
the host holds NaNs until something waits. Kernels, the order of streams and speed are not simulated: compiled operators
run on the CPU, and other asynchronous operations run at once.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_nccl import NAMESPACES, Nccl
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.torch_compat import in_backward

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# Operators whose result the host reads, or whose size depends on values.
WAITING = (
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.masked_scatter_backward.default,
)  # fmt: skip
SETTING = (aten.index_put_.default, aten.index_put.default)  # values from the host are copied, which waits
INDEXING = (aten.index.Tensor, *SETTING)  # with a mask, the size depends on its values


class Waited(RuntimeError):
    """The host waited for the GPU, or would have."""


class OnGPU(torch.Tensor):
    """In C++ its device is meta, for which autograd needs no driver."""

    device, is_cuda, is_meta = GPU, True, False  # another device if this rank's GPU is not the first
    of_host = False  # a number from Python, which C++ keeps on the host

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "OnGPU":
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device="meta",
        )  # fmt: skip

    def __init__(self, values: torch.Tensor):
        self.values_here = values

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({self.values_here!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied = torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied
        return copied

    def __reduce_ex__(self, _: Any) -> Any:
        raise RuntimeError("a GPU's tensor was pickled: another rank would look for it on this rank's GPU")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of pretended()")


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self.on_their_way: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies to the host: (target, values)
        self._arriving = threading.RLock()  # a checkpoint's writer waits for its copies in a thread of its own
        self.nccl = Nccl()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(hasattr(x, "device_mesh") for x in given):
            return NotImplemented  # for DTensor, which calls again with its local tensors
        if func.namespace in NAMESPACES and any(type(x) is OnGPU for x in given):
            self.nccl.check(func, args, [x.values_here for x in given if type(x) is OnGPU])
        inside = any(type(x) is OnGPU for x in given)
        wanted, kind = kwargs.get("device"), ""
        if wanted is not None:
            kind = torch.device(wanted).type
            if kind == "cuda" and torch.device(wanted) not in (torch.device(kind), OnGPU.device):
                raise RuntimeError(f"{func} on {wanted}: the GPU of this rank is {OnGPU.device}")
            # C++ asks for the device that it sees, meta: next to a tensor of ours, for a number that goes with one, and
            # for the zeros that replace a missing gradient.
            ours = inside or func is aten.scalar_tensor.default or in_backward()
            inside = kind == "cuda" or kind == "meta" and ours
            kwargs["device"] = wanted if kind == "meta" and not inside else CPU
        kwargs.pop("pin_memory", None)
        leaves = False
        if func in (aten._to_copy.default, aten.copy_.default):
            later = kwargs.get("non_blocking", len(args) > 2 and args[2])
            source, target = given[-1], inside if func is aten._to_copy.default else type(given[0]) is OnGPU
            if (type(source) is OnGPU) != target and not later:
                self._wait(func)
            elif target and type(source) is not OnGPU:
                self.arrive()  # in stream order, it reads the copies before it
            leaves = type(source) is OnGPU and not target and later
        elif any(type(x) is OnGPU for x in given):
            self._check(func, given, args, kwargs)
        known: dict[int, torch.Tensor] = {}

        def here(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            values = x.values_here if type(x) is OnGPU else x
            known[id(values)] = x
            return values

        def there(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return known.get(id(x), OnGPU(x) if inside else x) if id(x) in known or inside else x

        found = func(*tree_map(here, args), **tree_map(here, kwargs))
        if func is aten.scalar_tensor.default and kind == "meta":
            number = there(found)
            number.of_host = True
            return number
        if leaves:
            with self._arriving:
                self.on_their_way.append((found, found.clone()))
                found.fill_(torch.nan if found.is_floating_point() else torch.iinfo(found.dtype).max)
        return tree_map(there, found)

    def arrive(self) -> None:
        """Complete the pending copies to the host."""
        with self._arriving:
            for target, values in self.on_their_way:
                target.copy_(values)
            self.on_their_way.clear()

    def _check(self, func: Any, given: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        masks = func in INDEXING and any(x is not None and x.dtype is torch.bool for x in args[1])
        if masks or func in WAITING or func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._wait(func)
        if func in SETTING and (type(args[2]) is not OnGPU or args[2].of_host):
            self._wait(func)
        # Arithmetic operators take a number on the host as an argument; so do indexing and filling.
        takes_numbers = torch.Tag.pointwise in func.tags or "foreach" in str(func)
        takes_numbers |= func in (*INDEXING, aten.fill_.Tensor)
        copied = [x for x in args[1] if x is not None and type(x) is not OnGPU] if func in INDEXING else []
        if any(x.dim() for x in copied):  # places that the host has
            self._wait(func)
        for x in given:
            if type(x) is not OnGPU and (x.dim() or not takes_numbers) and all(x is not y for y in copied):
                devices = [f"{x.device} {tuple(x.shape)}" for x in given]
                raise RuntimeError(f"Expected all tensors to be on the same device: {func}: {', '.join(devices)}")

    def _wait(self, func: Any) -> None:
        self.arrive()
        if self.strict:
            raise Waited(f"{func} waits for the GPU")


class _Indexed(TorchFunctionMode):
    """Replaces "cuda" by this rank's device: without an index, C++ would ask the driver, which does not exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def indexed(x: Any) -> Any:
            return OnGPU.device if type(x) in (str, torch.device) and str(x) == "cuda" else x

        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], OnGPU.device)
        if func is torch.Tensor.new_tensor and type(args[0]) is OnGPU:
            kwargs = {"dtype": args[0].dtype, "device": OnGPU.device, **(kwargs or {})}
            func, args = torch.tensor, args[1:]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        return func(*map(indexed, args), **{name: indexed(value) for name, value in (kwargs or {}).items()})


class _Stream:
    """A stream, and also its events."""

    cuda_stream = 0

    def __init__(self, mode: _Mode):
        self._mode, self.device = mode, OnGPU.device

    def _nothing(self, *_: Any) -> "_Stream":
        return self

    wait_stream = wait_event = wait = record = record_event = _nothing

    def synchronize(self) -> None:
        self._mode.arrive()


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, index: int = 0) -> Iterator[None]:
    """Inside, torch finds a GPU of compute capability 9.0, which has the compiled operators if the CPU has them.

    index: that of this rank's GPU, the last one.
    """
    import torch._dynamo  # noqa: F401  as long as torch knows that there is no GPU

    from engine import torch_compat
    from engine.ops import library
    from modelcenter.layers import packed_attention

    mode = _Mode()

    def debug(how: str) -> None:
        mode.strict = how == "error"

    monkeypatch.setattr(OnGPU, "device", torch.device("cuda", index))
    stream = _Stream(mode)
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": index + 1,
        "current_device": index,
        "set_device": None, "current_stream": stream, "stream": nullcontext(),
        "get_device_capability": (9, 0), "get_device_properties": SimpleNamespace(major=9), "manual_seed": None,
        "get_device_name": "a GPU that is not there",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        # Exchanging the data of a parameter would not exchange its values, which are a Python attribute.
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        patch.setattr(torch.cuda, "set_sync_debug_mode", debug)
        patch.setattr(torch.cuda, "synchronize", lambda *_: mode.arrive())
        patch.setattr(torch.accelerator, "current_stream", lambda *_: stream)
        patch.setattr(torch_compat, "_raw_stream", None)  # torch built for GPUs would ask its driver
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
        patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        for made in ("Stream", "Event"):  # classes, since annotations in later imports may name them
            patch.setattr(torch.cuda, made, type(made, (), {"__new__": lambda *_, **__: stream}))
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
        status = library.Status(library.cpu().loaded, "pretended")
        patch.setattr(library, "cuda", lambda: status)
        patch.setattr(packed_attention, "_has_flash", lambda *_: False)  # there is no such kernel for CPUs
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # so that the mode sees torch.tensor(..., device="cuda")
        library.serves.cache_clear()
        try:
            with mode, _Indexed():
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
            library.serves.cache_clear()

"""Finds and loads the compiled operators, once, and says why if there are none."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.ops import build
from engine.torch_compat import current_stream, in_function_transform

_CPU = torch.device("cpu")
PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of ordinary tensors: no DTensor or other subclass
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # that compiled operators take
_OLDEST = (7, 5)  # compute capability that the CUDA library is compiled for
# cudaError_t: no function, no image for the device; the driver is older than the runtime, or than the PTX.
_NO_CODE, _OLD_DRIVER = (98, 209), (35, 222)


@dataclass(frozen=True)
class Status:
    """Whether a library is loaded.

    what: its file and, for the CPU, the instruction set; or why it is not loaded. isa: that set alone. rounds: whether
    the CPU library can multiply numbers rounded to bf16 on this CPU.
    """

    loaded: bool
    what: str
    isa: str = ""
    rounds: bool = False


#: The instruction set of the CPU library, and the device types whose operators are in use, once these are known. Code
#: inside torch.compile cannot ask for them; graphs that were compiled before a change are compiled anew.
loaded_isa = ""
in_use: tuple[str, ...] = ()


@functools.cache
def cpu() -> Status:
    """The CPU library, loaded if possible. MODELCENTER_FUSED=0 disables it."""
    global loaded_isa
    if os.environ.get("MODELCENTER_FUSED") == "0":
        return Status(False, "MODELCENTER_FUSED=0")
    path = build.find("cpu")
    if path is None:
        return Status(False, _why_not_found("cpu"))
    try:
        torch.ops.load_library(str(path))
        here = ctypes.CDLL(str(path))
        isa, rounds = here.modelcenter_isa, here.modelcenter_rounds
    except (OSError, RuntimeError, AttributeError) as error:
        return Status(False, f"{path} does not load on torch {torch.__version__}: {str(error).splitlines()[0]}")
    isa.restype = ctypes.c_char_p
    loaded_isa = isa().decode()
    return Status(True, f"{path} ({loaded_isa})", loaded_isa, bool(rounds()))


@functools.cache
def cuda() -> Status:
    """The CUDA library, loaded if possible. Needs the CPU library, which declares the operators."""
    if not cpu().loaded:
        return Status(False, "it needs the CPU library")
    if not torch.cuda.is_available():
        return Status(False, "torch finds no GPU")
    path = build.find("cuda")
    if path is None:
        return Status(False, _why_not_found("cuda"))
    return load_cuda(str(path))


def load_cuda(path: str) -> Status:
    """Load this CUDA library. Works without a GPU, so that loading can be tested."""
    global _failure
    try:
        torch.ops.load_library(path)
        _failure = ctypes.CDLL(path).modelcenter_failure
    except (OSError, RuntimeError, AttributeError) as error:
        return Status(False, f"{path} does not load on torch {torch.__version__}: {str(error).splitlines()[0]}")
    _failure.restype = ctypes.c_char_p
    return Status(True, path)


def on(device: torch.device) -> Status:
    """The library for tensors on this device. On a GPU a kernel is launched to see whether it runs."""
    if device.type == "cpu":
        return cpu()
    if device.type != "cuda":
        return Status(False, f"there are none for {device.type}")
    if not (status := cuda()).loaded:
        return status
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return Status(False, f"{torch.cuda.get_device_name(device)} is older than compute capability 7.5")
    one = torch.ones(1, device=device)
    try:
        operator("cast_scale_copy_")([torch.empty_like(one)], [one], None, stream(device))
    except RuntimeError as error:
        if (why := _why_not_launched(str(error), status.what, capability)) is None:
            raise
        return Status(False, why)
    return status


@functools.cache
def serves(device: torch.device) -> bool:
    """Whether the compiled operators take tensors on this device. Warns once, in one line, if they do not."""
    global in_use
    if device.type not in ("cpu", "cuda"):
        return False
    status = on(device)
    if status.loaded and device.type not in in_use:
        in_use = *in_use, device.type
    if not status.loaded and os.environ.get("MODELCENTER_FUSED") != "0" and os.environ.get("LOCAL_RANK", "0") == "0":
        name = device.type.upper()
        warnings.warn(f"the fused {name} operators are not in use, torch's are: {status.what}", stacklevel=2)
    return status.loaded


def plain_fp32(*tensors: torch.Tensor | None) -> bool:
    """Whether all are ordinary CPU tensors (no DTensor or other subclass), fp32 and not empty, outside of function
    transforms (torch.func)."""
    for t in tensors:  # called by every operator of every layer: a loop takes half the time of all()
        if t is None:
            continue
        if type(t) not in PLAIN or t.dtype is not torch.float32 or not t.is_cpu or not t.numel():
            return False
    return torch.compiler.is_compiling() or not in_function_transform()


def takes_fp32(*tensors: torch.Tensor | None) -> bool:
    """Whether the compiled CPU operators take these: `plain_fp32` tensors, outside torch.compile."""
    return not torch.compiler.is_compiling() and plain_fp32(*tensors) and serves(_CPU)


def plain_cuda(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the compiled CUDA operators are loaded and take these: ordinary CUDA tensors (no DTensor or other
    subclass) of one dtype, fp32, bf16 or fp16, outside of function transforms (torch.func), of torch.compile, and of
    autocast, which has its own dtypes for norms and products."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    return same_rows(x, *others) and not in_function_transform() and serves(x.device)


def same_rows(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether these are ordinary CUDA tensors of one dtype that the operators on rows take, outside autocast."""
    dtype = x.dtype
    if type(x) not in PLAIN or dtype not in FLOATS or torch.is_autocast_enabled("cuda"):
        return False
    for t in others:
        if t is not None and (type(t) not in PLAIN or t.dtype is not dtype or not t.is_cuda):
            return False
    return True


def _no_failure() -> bytes | None:
    return None


_failure: Any = _no_failure  # the CUDA library's: returns why this thread's last call failed, or None


@functools.cache
def operator(name: str) -> Callable[..., Any]:
    """A compiled operator for CPU and GPU that raises RuntimeError if it fails; the CUDA library must be asked whether
    it did. Looked up once, because torch goes through several attributes and then chooses an overload."""
    compiled = getattr(torch.ops.modelcenter, name).default

    def call(*arguments: Any) -> Any:
        found = compiled(*arguments)
        if (said := _failure()) is not None:
            raise RuntimeError(said.decode(errors="replace"))
        return found

    return call


def stream(device: torch.device) -> int:
    """The CUDA stream on which a compiled operator runs; 0 on a CPU."""
    return current_stream(device) if device.type == "cuda" else 0


def _why_not_launched(said: str, path: str, capability: tuple[int, int]) -> str | None:
    """What is wrong with the library, if that is why a launch failed; else None."""
    found = re.search(r"kernel was not launched: error (\d+)", said)  # from csrc/cuda/bind.cpp
    error = int(found[1]) if found else 0
    if error in _NO_CODE:
        wanted = ".".join(map(str, capability))
        return (
            f"{path} has no code for this GPU (compute capability {wanted}); rebuild it with TORCH_CUDA_ARCH_LIST "
            f"unset or {wanted}: python -m engine.ops --build"
        )
    if error in _OLD_DRIVER:
        return (
            f"the GPU's driver is older than the CUDA toolkit that {path} was built with; update it, or rebuild with "
            "an older toolkit (CUDA_HOME): python -m engine.ops --build"
        )
    return None


def _why_not_found(kind: str) -> str:
    others = sorted(path for folder in build.folders() for path in folder.glob(f"fused-{kind}-*.so"))
    here = f"-{platform.machine()}-"
    if foreign := next((path for path in others if here not in path.name), None):
        return f"{foreign} was built for another CPU; build one for this CPU: python -m engine.ops --build"
    if others:
        return f"{others[-1]} was built from other sources; rebuild it: python -m engine.ops --build"
    return "not built; python -m engine.ops --build builds it"

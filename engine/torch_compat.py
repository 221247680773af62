"""Differences between the supported versions of torch (2.11 and later), detected by feature and not by version number.
CONTRIBUTING.md lists which were tested.

Private names of torch are used here, in ``engine.tensors`` (DTensor's) and in ``engine.parallel.fsdp`` (FSDP's), so
that a new torch breaks only these files. The exceptions are operators (``torch._foreach_mul_``,
``torch._fused_adamw_`` and the like), attributes of modules and tensors (``_parameters``, ``_version``),
``torch.utils._pytree`` in pipelines, and the fake process group of ``engine.testing``. This file imports neither
DTensor nor FSDP, which take as long to import as half of torch.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist

from engine.tensors import as_bytes

_Kind = TypeVar("_Kind", bound=torch.nn.Module)
_has_any_global_hook = torch.nn.modules.module._has_any_global_hook


def all_gather_flat(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` (ranks * n elements, contiguous) with the ``tensor`` (n) of every rank; of any shape or dtype."""
    if not tensor.numel():
        return
    # torch 2.13 renamed it and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(as_bytes(output), as_bytes(tensor.contiguous()), group=group)


def reduce_scatter_flat(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``output`` (n) with this rank's part of the sum of the ``tensor`` (ranks * n) of every rank."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, tensor, group=group)


def assert_on_device(true: torch.Tensor, message: str) -> None:
    """Assert a 0-d bool on its device, without waiting for it."""
    torch._assert_async(true, message)


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread, perhaps one that recomputes a forward."""
    return running_backward() != -1


def saved_tensors_hooks() -> Any:
    """The innermost ``torch.autograd.graph.saved_tensors_hooks`` of this thread; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def running_backward() -> int:
    """The number of the backward pass that autograd is running on this thread; -1: none."""
    return torch._C._current_graph_task_id()


def run_after_backward(call: Callable[[], None]) -> None:
    """In a backward pass: call ``call`` at its end, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def will_accumulate(leaf: torch.Tensor) -> bool:
    """In a backward pass: whether it will add to the ``grad`` of a leaf. ``autograd.grad`` only returns gradients."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad was asked for this leaf's gradient
        return False


def can_go_backward(node: torch.autograd.function.FunctionCtx) -> bool:
    """Whether a node of the graph still has its saved tensors: a backward pass without retain_graph frees them."""
    try:
        _ = node._raw_saved_tensors  # type: ignore[attr-defined]  # raw, since unpacking them may recompute them
    except RuntimeError:
        return False
    return True


def in_function_transform() -> bool:
    """Whether a ``torch.func`` transform (``grad``, ``vmap``) or forward-mode differentiation is active, which the
    engine's autograd functions do not support."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def unflattened(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Consecutive parts of ``flat`` with the shapes of ``like``, as views, by one call."""
    parts: Sequence[torch.Tensor] = torch._utils._unflatten_dense_tensors(flat, like)
    return parts


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The current CUDA stream of this device, as a number: torch's own call creates an object, which takes as long as a
    kernel launch."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def run_scripts_as_written() -> None:
    """Stop TorchScript, from now on and in the whole process, from optimising further functions.

    It optimises a function at its second call, which may come between a forward and its recomputation. Autograd would
    then save other tensors, or in another order. Functions that are optimised already stay so.
    """
    set_mode = getattr(torch._C, "_jit_set_profiling_mode", None)  # gone when TorchScript, which is deprecated, goes
    if set_mode is not None and not torch.compiler.is_compiling():
        set_mode(False)  # of all threads; torch.jit.optimized_execution is of one


def compile_often(function: Callable[..., Any], most: int, **options: Any) -> Callable[..., Any]:
    """``torch.compile`` with up to ``most`` graphs (or more, if the user's limit is higher) before it leaves a function
    to Python."""
    limits = torch._dynamo.config
    most = max(most, limits.recompile_limit)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # torch 2.13; its settings are of a thread
        options["recompile_limit"] = most
    else:
        limits.recompile_limit = most
    compiled: Callable[..., Any] = torch.compile(**options)(function)
    return compiled


def may_round_products() -> bool:
    """Whether CPU products of fp32 matrices may round their operands to bf16, which
    ``torch.set_float32_matmul_precision("medium")`` allows."""
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of all collectives of ``group`` that start from now on."""
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        if hasattr(backend, "_set_default_timeout"):  # fake groups have none
            backend._set_default_timeout(datetime.timedelta(seconds=seconds))


def forget_meshes() -> None:
    """Clear DTensor's cache of operators on meshes.

    DTensor takes the mesh of a result from this cache. Without this, results on a new mesh would be placed on an equal
    mesh of an earlier process group, whose groups no longer exist.
    """
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def default_store() -> dist.Store:
    """The key-value store at which the ranks met."""
    return dist.distributed_c10d._get_default_store()


def is_just(module: torch.nn.Module, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether calling the module does exactly what ``kind.forward`` does: there are no hooks on it or on all modules,
    and neither it nor its class overrides ``forward``."""
    own = module.__dict__  # asked for several modules of each layer, so attributes are read without calls
    if type(module) is not kind and (not isinstance(module, kind) or type(module).forward is not kind.forward):
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    return "forward" not in own and not _has_any_global_hook()

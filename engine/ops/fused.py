"""Fused operators on lists of local tensors: compiled (csrc/) if the library is available, else their torch reference.

They take contiguous fp32, bf16 or fp16 tensors of any size (also empty) and alignment, on one device; each list has one
dtype. The compiled operators do not wait for a GPU; the reference does, to read `found_inf` and the steps. Pass the
local tensor of a DTensor.

The optimizer steps share these arguments:

    p, g: parameters and gradients. m, v: moments, fp32 or bf16. step: for each parameter, on its device, its number of
        steps so far, one fp32 number, which is incremented.
    aux, mode: where the fp32 value of a parameter is kept, so that small updates are not lost:
        "plain": p is fp32; aux is empty.
        "master": aux holds fp32 copies, which are rounded into p (fp32, bf16 or fp16).
        "remainder": p is bf16 and aux holds the missing 16 bits (int16): the same values as "master" in 2 bytes less; p
            is rounded to nearest with ties away from zero.
        "random": p is bf16 and nothing else is kept: updates are rounded stochastically, exact in expectation. `places`
            gives (key, inner, stride, base) of each parameter: element i is element base + i // inner * stride +
            i % inner of the whole tensor, so that every mesh rounds alike.
    gscale: one fp32 number that gradients are multiplied by (unscaling and clipping). found_inf: one fp32 number; if it
        is not 0, nothing changes and no step is counted.

All CPUs and GPUs compute the same bits. So does the reference, except that it keeps denormals, which the compiled
operators flush to zero.

Every function raises ValueError for lists that differ in length, tensors that differ in size or device, dtypes that it
does not take, and tensors that are not contiguous or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.ops import library, reference
from engine.ops.reference import Mode, StepArguments

Tensors = Sequence[Tensor]

_MODES = {mode.name.lower(): mode.value for mode in Mode}
_WITH_AUX = (Mode.MASTER, Mode.REMAINDER)


def adamw_(
    p: Tensors,
    g: Tensors,
    m: Tensors,
    v: Tensors,
    step: Tensors,
    aux: Tensors = (),
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mode: str = "plain",
    gscale: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Sequence[int] = (),
) -> None:
    """One step of AdamW (decoupled weight decay), in place. See the module for the arguments."""
    arguments = StepArguments(p, g, m, v, aux, step, gscale, found_inf, _mode(mode), places)
    numbers = (lr, betas[0], betas[1], eps, weight_decay)
    if not _ran("adamw_", p, lambda: _check(arguments), p, g, m, v, aux, step, gscale, found_inf,
                *numbers, arguments.mode, places):  # fmt: skip
        reference.step(reference.adamw(*numbers), arguments)


def adamw8_(
    p: Tensors,
    g: Tensors,
    m: Tensors,
    v: Tensors,
    m_scale: Tensors,
    v_scale: Tensors,
    step: Tensors,
    aux: Tensors = (),
    *,
    widths: Sequence[int],
    places: Sequence[int],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mode: str = "plain",
    gscale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """`adamw_` with 8-bit moments (csrc/core/quantize.h): a byte each, and an fp32 scale for each block.

    Args:
        m, v: uint8, with the sizes of p. m_scale, v_scale: fp32, (rows, ceil(width / 128)). All start as zeros.
        widths: for each parameter, the length of its rows; blocks do not cross the end of a row.
        places: as for mode "random", but in every mode: second moments are rounded stochastically.
    """
    scales = (m_scale, v_scale, widths)
    arguments = StepArguments(p, g, m, v, aux, step, gscale, found_inf, _mode(mode), places, scales)
    numbers = (lr, betas[0], betas[1], eps, weight_decay)
    if not _ran("adamw8_", p, lambda: _check(arguments), p, g, m, v, m_scale, v_scale, aux, step, gscale, found_inf,
                *numbers, widths, arguments.mode, places):  # fmt: skip
        reference.step(reference.adamw(*numbers), arguments)


def lion_(
    p: Tensors,
    g: Tensors,
    m: Tensors,
    step: Tensors,
    aux: Tensors = (),
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    mode: str = "plain",
    gscale: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Sequence[int] = (),
) -> None:
    """One step of Lion (Chen et al. 2023) with decoupled weight decay, in place. See the module for the arguments."""
    arguments = StepArguments(p, g, m, None, aux, step, gscale, found_inf, _mode(mode), places)
    numbers = (lr, betas[0], betas[1], weight_decay)
    if not _ran("lion_", p, lambda: _check(arguments), p, g, m, aux, step, gscale, found_inf,
                *numbers, arguments.mode, places):  # fmt: skip
        reference.step(reference.lion(*numbers), arguments)


def sgdm_(
    p: Tensors,
    g: Tensors,
    m: Tensors,
    step: Tensors,
    aux: Tensors = (),
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    mode: str = "plain",
    gscale: Tensor | None = None,
    found_inf: Tensor | None = None,
    places: Sequence[int] = (),
) -> None:
    """One step of torch.optim.SGD with momentum, in place; weight decay is added to the gradient. See the module."""
    arguments = StepArguments(p, g, m, None, aux, step, gscale, found_inf, _mode(mode), places)
    numbers = (lr, momentum, weight_decay, nesterov)
    if not _ran("sgdm_", p, lambda: _check(arguments), p, g, m, aux, step, gscale, found_inf,
                *numbers, arguments.mode, places):  # fmt: skip
        reference.step(reference.sgdm(*numbers), arguments)


def grad_norm_sq(g: Tensors, out: Tensor) -> None:
    """Write the sum of squares of all gradients into `out` (one fp64 number).

    The order of summation depends only on the sizes, so the result has the same bits with any number of threads. It is
    finite if and only if all gradients are.
    """

    def check() -> None:
        _one("out", out, torch.float64, out.device)
        _floats("g", g, out.device)

    if not _ran("grad_norm_sq", [out], check, g, out):
        reference.grad_norm_sq(g, out)


def clip_coef_(
    norm_sq: Tensor,
    max_norm: float,
    norm: Tensor,
    gscale: Tensor,
    found_inf: Tensor,
    *,
    loss_scale: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """What a step needs to know from the sum of squares (one fp64 number) of gradients multiplied by `loss_scale`.

    Writes one fp32 number each: `norm`, without the loss scale; `gscale`, the factor for the gradients, min(1, max_norm
    / (norm + eps)) / loss_scale; `found_inf`, 1 if the norm is not finite, else 0.
    """

    def check() -> None:
        _one("norm_sq", norm_sq, torch.float64, norm_sq.device)
        for name, tensor in (("norm", norm), ("gscale", gscale), ("found_inf", found_inf), ("loss_scale", loss_scale)):
            if tensor is not None:
                _one(name, tensor, torch.float32, norm_sq.device)

    if not _ran("clip_coef_", [norm_sq], check, norm_sq, loss_scale, max_norm, eps, norm, gscale, found_inf):
        reference.clip_coef(norm_sq, loss_scale, max_norm, eps, norm, gscale, found_inf)


def cast_scale_copy_(out: Tensors, input: Tensors, scale: Tensor | None = None) -> None:
    """out = input * scale, rounded to the dtype of `out`. scale: one fp32 number; None: 1."""

    def check() -> None:
        _pairs(out, input, "out", "input")
        if out:
            _floats("out", out, out[0].device)
            _floats("input", input, out[0].device)
            if scale is not None:
                _one("scale", scale, torch.float32, out[0].device)
        _overlap(out, input)

    if _ran("cast_scale_copy_", out, check, out, input, scale):
        return
    for target, source in zip(out, input, strict=True):
        values = source.float().view(-1)
        target.view(-1).copy_(values if scale is None else values * scale)


def split_master_(master: Tensors, p: Tensors, remainder: Tensors) -> None:
    """Split fp32 numbers without loss into rounded bf16 numbers `p` and the missing 16 bits, `remainder` (int16)."""
    if _ran("split_master_", p, lambda: _check_split(master, p, remainder), master, p, remainder):
        return
    for whole, high, low in zip(master, p, remainder, strict=True):
        reference.split_into(whole.view(-1), high.view(-1), low.view(-1))


def merge_master_(p: Tensors, remainder: Tensors, master: Tensors) -> None:
    """The inverse of `split_master_`, bit for bit, except that every NaN becomes the standard one."""
    if _ran("merge_master_", p, lambda: _check_split(master, p, remainder), p, remainder, master):
        return
    for whole, high, low in zip(master, p, remainder, strict=True):
        whole.view(-1).copy_(reference.merged(high.view(-1), low.view(-1)))


def _ran(operator: str, tensors: Tensors, check: Callable[[], None], *arguments: object) -> bool:
    """Run a compiled operator if it serves the device of `tensors`. Returns whether it did; if not, the arguments are
    checked for the reference.

    Args:
        check: raises ValueError if the arguments are wrong. The compiled operator's own messages are terse: when it
            raises, this gives the full one.
        arguments: those of the operator, except the stream.
    """
    if not len(tensors) or not library.serves(tensors[0].device):
        check()
        return False
    try:
        library.operator(operator)(*arguments, library.stream(tensors[0].device))
    except RuntimeError:
        check()
        raise  # the arguments are right: out of memory, or a failure of the GPU, perhaps in an earlier kernel
    return True


def _mode(mode: str) -> int:
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(_MODES)}")
    return _MODES[mode]


def _check(a: StepArguments) -> None:
    """Raise ValueError for arguments that a step cannot take."""
    _check_lengths(a)
    if not len(a.p):
        return
    device = a.p[0].device
    _check_dtypes(a, device)
    for name, tensors in _lists(a).items():
        _pairs(tensors, a.p, name, "p")
    for one in a.step:
        _one("step", one, torch.float32, device)
    for name, tensor in (("gscale", a.gscale), ("found_inf", a.found_inf)):
        if tensor is not None:
            _one(name, tensor, torch.float32, device)
    scales = (*a.scales[0], *a.scales[1]) if a.scales else ()
    _overlap([*a.p, *a.m, *(a.v or ()), *a.aux, *a.step, *scales], a.g)


def _check_dtypes(a: StepArguments, device: torch.device) -> None:
    for name, tensors in (("p", a.p), ("g", a.g), ("m", a.m)):
        if name != "m" or a.scales is None:
            _floats(name, tensors, device)
        if len({t.dtype for t in tensors}) > 1:
            raise ValueError(f"{name} holds several dtypes: call once for each")
    wanted = {Mode.PLAIN: (torch.float32,), Mode.MASTER: library.FLOATS}.get(Mode(a.mode), (torch.bfloat16,))
    _dtypes("p", a.p, wanted)
    _dtypes("m", a.m, (torch.float32, torch.bfloat16) if a.scales is None else (torch.uint8,))
    if a.scales is not None:
        _check_scales(a.p, *a.scales)
    elif a.v is not None:
        _floats("v", a.v, device)
    if a.v is not None:
        _dtypes("v", a.v, (a.m[0].dtype,))
    if a.mode in _WITH_AUX:
        _dtypes("aux", a.aux, (torch.float32 if a.mode == Mode.MASTER else torch.int16,))


def _lists(a: StepArguments) -> dict[str, Tensors]:
    """The lists of a step with one tensor per parameter, of its size, by name."""
    lists = {"p": a.p, "g": a.g, "m": a.m}
    if a.v is not None:
        lists["v"] = a.v
    if a.mode in _WITH_AUX:
        lists["aux"] = a.aux
    return lists


def _check_lengths(a: StepArguments) -> None:
    if a.mode not in _WITH_AUX and len(a.aux):
        raise ValueError(f"aux has {len(a.aux)} tensors, expected none in this mode")
    for name, tensors in {**_lists(a), "step": a.step}.items():
        if len(tensors) != len(a.p):
            raise ValueError(f"the lists differ in length: {name} has {len(tensors)} tensors, p has {len(a.p)}")
    if len(a.places) != (4 * len(a.p) if a.mode == Mode.RANDOM or a.scales else 0):
        raise ValueError(f"places has {len(a.places)} numbers, expected 4 for each parameter in mode random, else none")
    if any(inner < 1 and tensor.numel() for inner, tensor in zip(a.places[1::4], a.p, strict=False)):
        raise ValueError(f"places has an inner size below 1: {list(a.places[1::4])}")
    if a.scales is not None and {len(scales) for scales in a.scales} != {len(a.p)}:
        raise ValueError(f"the lists differ in length: {[len(x) for x in a.scales]} scales and widths, {len(a.p)} in p")


def _check_scales(p: Tensors, m_scale: Tensors, v_scale: Tensors, widths: Sequence[int]) -> None:
    for index, (parameter, width) in enumerate(zip(p, widths, strict=True)):
        if width < 1 or parameter.numel() % width:
            raise ValueError(f"widths[{index}] is {width}, which does not divide the {parameter.numel()} elements of p")
        wanted = parameter.numel() // width * -(-width // reference.BLOCK)
        for name, scale in (("m_scale", m_scale[index]), ("v_scale", v_scale[index])):
            if scale.numel() != wanted or scale.dtype != torch.float32 or scale.device != parameter.device:
                raise ValueError(
                    f"{name}[{index}] has {scale.numel()} elements, {scale.dtype}, on {scale.device}: expected "
                    f"{wanted}, one for each block, torch.float32, {parameter.device}"
                )
            if not scale.is_contiguous():
                raise _not_contiguous(f"{name}[{index}]", scale)


def _check_split(master: Tensors, p: Tensors, remainder: Tensors) -> None:
    for name, tensors, dtype in (
        ("master", master, torch.float32), ("p", p, torch.bfloat16), ("remainder", remainder, torch.int16)
    ):  # fmt: skip
        _pairs(tensors, p, name, "p")
        _dtypes(name, tensors, (dtype,))
    _overlap([*master, *p, *remainder], ())


def _floats(name: str, tensors: Tensors, device: torch.device) -> None:
    _dtypes(name, tensors, library.FLOATS)
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"{name}[{index}] is on {tensor.device}, expected {device}")
        if not tensor.is_contiguous():
            raise _not_contiguous(f"{name}[{index}]", tensor)


def _not_contiguous(name: str, tensor: Tensor) -> ValueError:
    return ValueError(f"{name} is not contiguous (strides {tuple(tensor.stride())}): pass .contiguous()")


def _dtypes(name: str, tensors: Tensors, wanted: tuple[torch.dtype, ...]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in wanted:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
            raise ValueError(f"{name}[{index}] is {str(tensor.dtype).removeprefix('torch.')}, expected {names}")


def _pairs(a: Tensors, b: Tensors, name_a: str, name_b: str) -> None:
    if len(a) != len(b):
        raise ValueError(f"the lists differ in length: {name_a} has {len(a)} tensors, {name_b} has {len(b)}")
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        if one.numel() != other.numel():
            raise ValueError(f"{name_a}[{index}] has {one.numel()} elements, {name_b}[{index}] has {other.numel()}")
        if one.device != other.device:
            raise ValueError(f"{name_a}[{index}] is on {one.device}, {name_b}[{index}] on {other.device}")
        if not one.is_contiguous():
            raise _not_contiguous(f"{name_a}[{index}]", one)


def _one(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.numel() != 1 or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} has {tensor.numel()} elements, {tensor.dtype}, on {tensor.device}: expected one, {dtype}, {device}"
        )


def _overlap(written: Tensors, read: Tensors) -> None:
    """Raise ValueError if written memory also belongs to another tensor."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), writes)
        for tensors, writes in ((written, True), (read, False))
        for t in tensors
        if t.numel()
    )
    end_written = end_any = 0
    for begin, end, writes in spans:
        if begin < end_written or (writes and begin < end_any):
            raise ValueError("two of the tensors overlap in memory")
        end_any = max(end_any, end)
        end_written = max(end_written, end) if writes else end_written

"""Dropout whose mask is a function of (seed, step, site, token, channel): recomputed in backward, never stored.

A token has the same mask however a batch is cut into ranks, microbatches and packed rows, so a run with dropout has the
same losses on any number of ranks. For this, a training loop sets the step (`dropout_key`) and the rows of the data in
a batch (`dropout_rows`), and the model numbers its tokens by row and position (`Draws`). Without them each call takes a
key from torch's generator: `torch.manual_seed` and a saved generator state reproduce the masks.

The generator is Philox4x32-10 (`engine.ops.philox`). 16 bits decide an element, so the keep probability is exact to
2^-16. The compiled operator, the Triton kernel for GPUs without it, and the reference give the same bits, on CPUs and
GPUs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import library, remade
from engine.ops.autograd import Function
from engine.ops.compilation import host_number
from engine.ops.philox import random_bits, scale_of

_MASK64 = (1 << 64) - 1
# Elements that the reference processes at a time. On a GPU each chunk launches some 140 kernels.
_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 22

_triton_works = True  # until it fails
_key: ContextVar[int | None] = ContextVar("engine.ops.dropout_key", default=None)
_rows: ContextVar[Tensor | None] = ContextVar("engine.ops.dropout_rows", default=None)


@contextmanager
def dropout_key(seed: int, step: int) -> Iterator[None]:
    """Inside, models draw the masks of this step of a run with this seed. Takes effect together with `dropout_rows`."""
    token = _key.set(_signed(_splitmix(_splitmix(seed & _MASK64) + step)))
    try:
        yield
    finally:
        _key.reset(token)


def has_dropout_key() -> bool:
    """Whether the code runs inside `dropout_key`."""
    return _key.get() is not None


@contextmanager
def dropout_rows(rows: Tensor | None) -> Iterator[None]:
    """Inside, batches hold these rows of the data: int64, one per sequence (or per group of equally many sequences)."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


@dataclass(eq=False)
class Draws:
    """The random numbers that the dropouts of one forward use.

    Attributes:
        key: derived from (seed, step). sequences: (n,) int64, the number of each sequence: its row of the data * 2^32.
        tokens: (T,) int64, the number of each token of this rank: that of its sequence plus its position.
        parts: subsets of the tokens, as sequence parallelism has them; selected by their size.
        every: the numbers of all tokens of the batch, if several ranks share them; None: `tokens`.
        graph_key: the key as () int64 on the host for compiled graphs, in which an int would be a constant.
    """

    key: int
    sequences: Tensor
    tokens: Tensor
    parts: tuple[Tensor, ...] = ()
    every: Tensor | None = None
    graph_key: Tensor | None = None

    def __post_init__(self) -> None:
        if self.graph_key is None:  # already set when fully_shard copies the batch for a unit
            self.graph_key = host_number(self.key)

    @property
    def whole(self) -> Tensor:
        """The numbers of all tokens of the batch."""
        return self.tokens if self.every is None else self.every

    def of_run(self, number: int) -> Draws:
        """The draws of one of several runs of the same modules in a forward: each needs its own key, because the sites
        are the same."""
        return replace(self, key=_signed(_splitmix((self.key & _MASK64) + 1 + number)), graph_key=None)

    def of(self, count: int) -> Tensor:
        """The token numbers of an activation with `count` tokens."""
        for tokens in (self.tokens, *self.parts):
            if tokens.numel() == count:
                return tokens
        raise ValueError(f"dropout of {count} tokens, but the batch has {self.tokens.numel()} on this rank")


def draws_of(cu_seqlens: Tensor, tokens: int) -> Draws | None:
    """The draws of a batch of `tokens` tokens with these offsets; None without `dropout_key` and `dropout_rows`.

    Raises:
        ValueError: the number of sequences is not a multiple of the number of rows.
    """
    key, rows = _key.get(), _rows.get()
    if key is None or rows is None:
        return None
    n, device = cu_seqlens.numel() - 1, cu_seqlens.device
    rows = rows.to(device, torch.int64)
    if rows.numel() != n:
        if not rows.numel() or n % rows.numel():
            raise ValueError(f"dropout_rows: got {rows.numel()} rows for a batch of {n} sequences; give one for each")
        each = n // rows.numel()  # the choices of an example
        rows = (rows[:, None] * each + torch.arange(each, device=device)).flatten()
    sequences = rows << 32
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    first = torch.repeat_interleave(sequences - cu_seqlens[:-1].long(), lengths, output_size=tokens)
    return Draws(key, sequences, first + torch.arange(tokens, device=device))


def fresh_key() -> int:
    """A key from torch's generator."""
    return int(_fresh())


def drawn_key() -> int | Tensor:
    """A key from torch's generator; under torch.compile a tensor that the graph draws."""
    return _fresh() if torch.compiler.is_compiling() else fresh_key()


def _fresh() -> Tensor:
    return torch.randint(2**62, (), dtype=torch.int64, device="cpu")


def dropout(
    x: Tensor,
    p: float,
    training: bool = True,
    *,
    key: int | Tensor | None = None,
    site: int | Tensor = 0,
    tokens: Tensor | None = None,
    first_channel: int = 0,
) -> Tensor:
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Args:
        x: (..., channels), any floating-point dtype. key: derived from (seed, step); None: one from torch's generator.
        site: a number below 2^32 that identifies the place in the model. Key and site may be tensors, () int64 on the
            host, so that they are not constants of a compiled graph. tokens: int64, one for each row of x; None: 0, 1,
            2, ...
        first_channel: the channel of x[..., 0], if x has a part of the channels.

    Raises:
        ValueError: p is not a probability, or tokens does not fit x.
    """
    return _drop(x, None, p, training, key, site, tokens, first_channel)


def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    training: bool = True,
    *,
    key: int | Tensor | None = None,
    site: int | Tensor = 0,
    tokens: Tensor | None = None,
    first_channel: int = 0,
) -> Tensor:
    """residual + dropout(x, p), in one pass. residual: like x. Other arguments: see `dropout`."""
    if not training or p == 0.0 or x.numel() == 0:
        return residual + x
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return residual + _drop(x, None, p, training, key, site, tokens, first_channel)
    return _drop(x, residual, p, training, key, site, tokens, first_channel)


def threshold_of(p: float) -> int:
    """The number below which 16 random bits drop an element. Raises ValueError if p is not a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p is {p}, expected a probability, 0 <= p <= 1")
    return round(p * 65536)


def check_tokens(x: Tensor, tokens: Tensor | None) -> None:
    """Raise ValueError unless `tokens` is None or has one number for each row of x."""
    if tokens is not None and tokens.numel() * x.shape[-1] != x.numel():
        raise ValueError(
            f"tokens has {tokens.numel()} numbers for an x of shape {tuple(x.shape)}: give one for each row"
        )


def numbers_of(x: Tensor, tokens: Tensor | None) -> Tensor | None:
    """`tokens` in the form that the compiled operators take."""
    # Mostly no change is needed: a view that backward keeps costs the host half as much as an operator.
    if tokens is None or (tokens.dim() == 1 and tokens.device == x.device and tokens.is_contiguous()):
        return tokens
    return tokens.to(x.device).reshape(-1).contiguous()


def _drop(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    training: bool,
    key: int | Tensor | None,
    site: int | Tensor,
    tokens: Tensor | None,
    first_channel: int,
) -> Tensor:
    threshold = threshold_of(p)
    if not training or p == 0.0 or x.numel() == 0:
        return x
    check_tokens(x, tokens)
    # On a GPU, a key drawn on the host would be a constant of a CUDA graph.
    if threshold == 65536 or hasattr(x, "placements") or (key is None and x.device.type != "cpu"):
        out = F.dropout(x, p)
        return out if residual is None else residual + out
    key = drawn_key() if key is None else key
    if torch.compiler.is_compiling():
        key, site = host_number(key), host_number(site)
        return torch.ops.modelcenter_graph.dropout(x, residual, tokens, threshold, key, site, first_channel)
    settings = threshold, int(key), int(site), first_channel
    found: Tensor = Dropout.apply(x, residual, tokens, *settings)
    if residual is not None:
        return found
    return remade.note(found, lambda x, tokens: run(x, None, tokens, *settings), x, tokens)


class Dropout(Function):
    """key, site: ints, or tensors in a compiled graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        tokens: Tensor | None,
        threshold: int,
        key: int | Tensor,
        site: int | Tensor,
        first_channel: int,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.settings = threshold, key, site, first_channel
        return _run(x, residual, tokens, *ctx.settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_residual = ctx.needs_input_grad[:2]
        (tokens,) = ctx.saved_tensors
        x = None
        if need_x:
            # Dropout is linear: its derivative is a dropout, which is differentiable in turn.
            again = Dropout.apply if torch.is_grad_enabled() else _run
            x = again(grad, None, tokens, *ctx.settings)
        return x, grad if need_residual else None, None, None, None, None, None


def _run(x: Tensor, residual: Tensor | None, tokens: Tensor | None, *settings: Any) -> Tensor:
    _, key, *_ = settings
    call = torch.ops.modelcenter_graph.dropout_part if isinstance(key, Tensor) else run
    out: Tensor = call(x, residual, tokens, *settings)
    return out


def run(
    x: Tensor, residual: Tensor | None, tokens: Tensor | None, threshold: int, key: int, site: int, first_channel: int
) -> Tensor:
    """Dropout without autograd. residual: with the shape and dtype of x."""
    # x mostly has two dimensions. Views cost time on the host, which GPU steps wait for, and a view as the output of a
    # unit would make FSDP warn.
    rows = x.contiguous() if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1).contiguous()
    add = None if residual is None else residual.reshape(rows.shape).contiguous()
    numbers = numbers_of(x, tokens)
    out = torch.empty_like(rows)
    if x.dtype in library.FLOATS and library.serves(x.device):
        library.operator("dropout_")(
            out, rows, add, numbers, 0, first_channel, key, site, threshold, library.stream(x.device)
        )
    elif not _by_triton(out, rows, add, numbers, first_channel, key, site, threshold):
        _reference(out, rows, add, numbers, first_channel, key, site, threshold)
    return out if x.dim() == 2 else out.view(x.shape)


def _by_triton(out: Tensor, x: Tensor, *more: Any) -> bool:
    """Run dropout by Triton, on GPUs where this works; returns whether it did. Warns once if Triton fails.

    Raises RuntimeError if the GPU is out of memory, or if an earlier kernel has failed.
    """
    global _triton_works
    if not _triton_works or x.device.type != "cuda" or x.dtype not in library.FLOATS:
        return False
    try:
        from engine.ops import triton_dropout

        with torch.cuda.device(x.device):
            triton_dropout.drop_(out, x, *more)
    except Exception as error:  # Triton is not installed, finds no C compiler, does not know the GPU, ...
        if "out of memory" in str(error):
            raise
        torch.cuda.synchronize(x.device)  # raises an earlier kernel's error, which Triton reports as its own
        _triton_works = False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"dropout runs about 400 kernels of torch, because Triton fails: {reason}", stacklevel=2)
        return False
    return True


def _reference(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    tokens: Tensor | None,
    first_channel: int,
    key: int,
    site: int,
    threshold: int,
) -> None:
    scale = scale_of(threshold)
    work = torch.promote_types(x.dtype, torch.float32)
    count, channels = x.shape
    numbers = torch.arange(count, device=x.device) if tokens is None else tokens
    chunk = _CHUNK if x.device.type == "cpu" else _GPU_CHUNK
    width = min(channels, chunk)
    height = max(1, chunk // width)
    for top in range(0, count, height):
        for left in range(0, channels, width):
            part = slice(top, top + height), slice(left, left + width)
            bits = random_bits(numbers[part[0]], first_channel + left, min(width, channels - left), key, site)
            y = torch.where(bits >= threshold, x[part].to(work) * scale, 0.0)
            out[part] = y if residual is None else residual[part].to(work) + y


def _splitmix(x: int) -> int:
    """A bijection of 64-bit numbers that mixes all bits (Steele et al. 2014)."""
    x = x + 0x9E3779B97F4A7C15 & _MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x

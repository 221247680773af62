"""The part of Triton that `engine.ops.triton_dropout` uses, on NumPy: kernels run program by program.

It tests neither speed nor Triton's compiler, and has NumPy's dtypes, fp32 and fp16.
"""

import itertools
import types

import numpy as np


class Array(np.ndarray):
    """A tensor of a program."""

    def to(self, dtype):
        return self.astype(dtype).view(Array)


class Pointer:
    """A pointer to elements: an array and places in it."""

    def __init__(self, memory, places=0):
        self.memory, self.places = memory, places
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, places):
        return Pointer(self.memory, self.places + np.asarray(places))


class Kernel:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*args, enable_fp_fusion=True, **kwargs):
            assert not enable_fp_fusion  # NumPy rounds products and sums separately
            args = [Pointer(a.reshape(-1).numpy()) if hasattr(a, "numpy") else a for a in args]
            for place in itertools.product(*map(range, grid)):
                language.program_id = lambda axis, place=place: array(place[axis])
                self.function(*args, **kwargs)

        return launch


def array(value, dtype=None):
    return np.asarray(value, dtype).view(Array)


def load(pointer, mask, other):
    places = np.where(mask, pointer.places, 0)
    assert places.min() >= 0 and places.max() < pointer.memory.size, "outside the memory"
    return array(np.where(mask, pointer.memory[places], other), pointer.memory.dtype)


def store(pointer, value, mask):
    places = pointer.places[mask]
    assert places.min(initial=0) >= 0 and places.max(initial=0) < pointer.memory.size, "outside the memory"
    pointer.memory[places] = value[mask]


def philox(seed, a, b, c, d):
    """Philox4x32-10 (Salmon et al. 2011), with 64-bit products."""
    a, b, c, d = (np.asarray(x).astype(np.uint64) for x in (a, b, c, d))
    lower = np.uint64(0xFFFFFFFF)
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = y >> np.uint64(32) ^ b ^ np.uint64(low), y & lower
        c, d = x >> np.uint64(32) ^ d ^ np.uint64(high), x & lower
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return tuple(array(x, np.uint32) for x in (a, b, c, d))


language = types.ModuleType("triton.language")
language.__dict__.update(
    constexpr=object, float32=np.float32, int64=np.int64, uint32=np.uint32, philox=philox, load=load, store=store,
    arange=lambda first, last: array(np.arange(first, last)), zeros=lambda shape, dtype: array(np.zeros(shape, dtype)),
    full=lambda shape, value, dtype: array(np.full(shape, value, dtype)), static_range=range,
    where=lambda seen, x, y: array(np.where(seen, x, np.asarray(x).dtype.type(y))),
)  # fmt: skip
triton = types.ModuleType("triton")
triton.__dict__.update(language=language, jit=lambda **_: Kernel, cdiv=lambda a, b: -(-a // b))

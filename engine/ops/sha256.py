"""SHA-256 of two streams of bytes at the same time.

A processor's SHA instructions each wait for the one before, so two interleaved streams take no longer than one
(csrc/cpu/bytes.h). Processors without them use hashlib.
"""

import functools
import hashlib
import struct

import torch

from engine.ops import library

_BLOCK = 64  # bytes
# FIPS 180-4, 5.3.3
_START = struct.pack(
    "=8I", 0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19
)
_NOTHING = torch.empty(0, dtype=torch.uint8)


@functools.cache
def two_at_once() -> bool:
    """Whether the compiled operator is available on this CPU."""
    return library.cpu().loaded and _advance(_state(), _NOTHING)


def _advance(state: torch.Tensor, x: torch.Tensor) -> bool:
    return bool(torch.ops.modelcenter.sha256_(state, x, _state(), _NOTHING))


def _state() -> torch.Tensor:
    return torch.frombuffer(bytearray(_START), dtype=torch.int32)


class Sha256:
    """The hash of bytes that `update` adds in pieces."""

    def __init__(self) -> None:
        self.plain, self.state = hashlib.sha256(), _state()  # without the compiled operator; with it
        self._kept, self._size = b"", 0

    def hexdigest(self) -> str:
        """The hash of all pieces. No pieces may be added afterwards."""
        if not two_at_once():
            return self.plain.hexdigest()
        bits, padding = struct.pack(">Q", 8 * self._size), -(len(self._kept) + 9) % _BLOCK
        self._alone(self._kept + b"\x80" + bytes(padding) + bits)
        return self.state.numpy().astype(">i4").tobytes().hex()

    def blocks(self, data: torch.Tensor) -> torch.Tensor:
        """The whole blocks of the next piece, for `update` to hash; the other bytes are hashed or kept here."""
        self._size += len(data)
        if self._kept:
            missing = _BLOCK - len(self._kept)
            self._kept += data[:missing].numpy().tobytes()
            data = data[missing:]
            if len(self._kept) < _BLOCK:
                return data
            self._alone(self._kept)
        whole = len(data) - len(data) % _BLOCK
        self._kept = data[whole:].numpy().tobytes()
        return data[:whole]

    def _alone(self, data: bytes) -> None:
        _advance(self.state, torch.frombuffer(bytearray(data), dtype=torch.uint8))


def update(*pieces: tuple[Sha256, torch.Tensor]) -> None:
    """Add the next piece to one or two hashes, in the time of the longer one. Pieces: contiguous uint8 CPU tensors."""
    if not two_at_once():
        for hashed, data in pieces:
            hashed.plain.update(data.numpy().data)
        return
    if len(pieces) == 1:
        ((hashed, data),) = pieces
        _advance(hashed.state, hashed.blocks(data))
        return
    (first, x), (second, y) = pieces
    torch.ops.modelcenter.sha256_(first.state, first.blocks(x), second.state, second.blocks(y))

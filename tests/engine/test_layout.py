"""Transposes and checksums, compiled and without a compiler, against torch, zlib and hashlib."""

import hashlib
import random
import zlib
from pathlib import Path

import pytest
import torch

from engine.ops import library
from engine.ops.layout import crc32, transpose_
from engine.ops.sha256 import Sha256, two_at_once, update

SIZES = [(1, 1), (3, 5), (8, 64), (33, 31), (64, 97), (100, 40), (300, 1024)]
CPU_FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(library, "cpu", lambda: library.Status(False, "not built"))
    elif not library.cpu().loaded:
        pytest.skip("the operators are not compiled")
    return request.param


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.float64, torch.complex128])
def test_transpose_of_a_part_into_a_part(dtype, way):
    """Also of numbers of a width that has no operator; what lies around is untouched."""
    for rows, columns in SIZES:
        values = torch.randint(0, 99, (rows, columns + 9)).to(dtype)[:, 5 : 5 + columns]
        for left in (0, 3, 32):  # 32: as aligned as writing past the caches wants
            out = torch.full((columns, left + rows + 29), 7).to(dtype)
            transpose_(out[:, left : left + rows], values)
            assert torch.equal(out[:, left : left + rows], values.t())
            assert (out[:, :left] == 7).all() and (out[:, left + rows :] == 7).all()


def test_transpose_past_the_caches(way):
    values = torch.randint(0, 2**15, (4100, 2080), dtype=torch.int16)
    out = torch.zeros(2080, 4128, dtype=torch.int16)
    transpose_(out[:, :4100], values)
    assert torch.equal(out[:, :4100], values.t()) and not out[:, 4100:].any()


def test_transpose_of_rows_that_push_each_other_out_of_the_cache(way):
    """They lie at multiples of 2048 bytes; of several tiles, the last ones in part."""
    values = torch.randint(0, 2**15, (300, 1024), dtype=torch.int16)
    out = torch.full((700, 310), 7, dtype=torch.int16)
    transpose_(out[:, 3:303], values[:, 5:705])
    assert torch.equal(out[:, 3:303], values[:, 5:705].t())
    assert (out[:, :3] == 7).all() and (out[:, 303:] == 7).all()


def test_checksum(way):
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for size in (0, 1, 15, 63, 64, 65, 127, 128, 200, 4096, 5000):
        for start in (0, zlib.crc32(b"before")):
            assert crc32(data[:size], start) == zlib.crc32(data[:size].numpy().tobytes(), start)


def test_operands_that_do_not_fit_are_refused():
    if not library.cpu().loaded:
        pytest.skip("the operators are not compiled")
    operator, a = torch.ops.modelcenter.transpose_, torch.zeros(4, 6)
    for out, values, said in (
        (torch.zeros(4, 6), a, "size of the transpose"),
        (torch.zeros(6, 4).double(), a, "one dtype"),
        (torch.zeros(4, 6).t(), a, "not contiguous"),
        (a.view(6, 4), a, "overlap"),
    ):
        with pytest.raises(RuntimeError, match=said):
            operator(out, values, False)
    state, x = torch.zeros(8, dtype=torch.int32), torch.zeros(64, dtype=torch.uint8)
    for first, bytes_, said in (
        (state[:7], x, "8 contiguous"),
        (state, x[:63], "multiple of 64"),
        (x[:32].view(torch.int32), x, "overlap"),
    ):
        with pytest.raises(RuntimeError, match=said):
            torch.ops.modelcenter.sha256_(first, bytes_, state.clone(), x.clone())


def test_sha256_of_two_streams(way):
    """Pieces of any length, alone or two at a time, against hashlib."""
    two_at_once.cache_clear()
    assert two_at_once() == (way == "compiled" and library.cpu().isa != "plain" and "sha_ni" in CPU_FLAGS)
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    draw = random.Random(0)
    for pieces in range(60):
        both, peers = (Sha256(), Sha256()), (hashlib.sha256(), hashlib.sha256())
        for _ in range(pieces % 7):
            # 55, 56: what follows the bytes fits into their last block, or does not.
            sizes = [draw.choice((0, 1, 9, 55, 56, 63, 64, 65, 128, 4000)) for _ in both]
            given = [(i, data[draw.randrange(1000) :][:size]) for i, size in enumerate(sizes)]
            given = given[draw.randrange(2) :]
            update(*((both[i], piece) for i, piece in given))
            for i, piece in given:
                peers[i].update(piece.numpy().data)
        assert [h.hexdigest() for h in both] == [h.hexdigest() for h in peers]
    two_at_once.cache_clear()

"""Pieces on synthetic layouts: the restriction to any box equals a slice of the whole; the proof finds every hole."""

import random
from dataclasses import replace

import pytest
import torch

from modelcenter.convert.pieces import (
    HUB,
    NATIVE,
    Axis,
    CoverageError,
    Piece,
    bounds,
    export_box,
    full_box,
    is_plain_copy,
    prove,
    restrict,
    view,
)

HEADS, DIM, WIDTH = 5, 3, 7
# GPT-NeoX: rows of the fused tensor go by (head, q/k/v, d); one native tensor for each of q, k and v.
INTERLEAVED = [
    Piece(
        ("fused", name),
        (Axis(HEADS, (0, 0), (3 * DIM, DIM)), Axis(DIM, (0, 0)), Axis(WIDTH, (1, 1))),
        ((j * DIM, 0), (0, 0)),
    )
    for j, name in enumerate("qkv")
]
SHAPES = ({"fused": (3 * HEADS * DIM, WIDTH)}, dict.fromkeys("qkv", (HEADS * DIM, WIDTH)))


def random_box(shape: tuple[int, ...], rng: random.Random) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(rng.sample(range(n + 1), 2)) for n in shape)  # type: ignore[misc]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=["widest first", "widest last"])
@pytest.mark.parametrize("side", [HUB, NATIVE])
def test_restriction_is_exact(side, order):
    """In any box, the restricted pieces hold just the elements of the piece there, each once."""
    rng = random.Random(0)
    for _ in range(200):
        for piece in INTERLEAVED:
            piece = replace(piece, axes=tuple(piece.axes[k] for k in order))
            shape = SHAPES[side][piece.names[side]]
            box = random_box(shape, rng)
            everywhere = torch.zeros(shape, dtype=torch.int)
            view(everywhere, piece, side).add_(1)
            expected = torch.zeros_like(everywhere)
            inside = tuple(slice(low, high) for low, high in box)
            expected[inside] = everywhere[inside]
            got = torch.zeros_like(everywhere)
            for part in restrict(piece, side, box):
                view(got, part, side).add_(1)
                assert all(a <= c and d <= b for (a, b), (c, d) in zip(box, bounds(part, side), strict=True))
            assert torch.equal(got, expected), box


def test_restriction_keeps_the_correspondence():
    """A restricted piece still pairs the same elements: copying through it equals slicing after a whole copy."""
    rng = random.Random(1)
    source = torch.randn(SHAPES[HUB]["fused"])
    for piece in INTERLEAVED:
        target = torch.full(SHAPES[NATIVE]["q"], torch.nan)
        view(target, piece, NATIVE).copy_(view(source, piece, HUB))
        for _ in range(50):
            box = random_box(tuple(target.shape), rng)
            out = torch.full([high - low for low, high in box], torch.nan)
            for part in restrict(piece, NATIVE, box):
                where = bounds(part, HUB)
                read = source[tuple(slice(low, high) for low, high in where)].clone()
                values = view(read, part, HUB, [low for low, _ in where])
                view(out, part, NATIVE, [low for low, _ in box]).copy_(values)
            assert torch.equal(out, target[tuple(slice(low, high) for low, high in box)])


def test_number_of_parts_stays_small():
    """A box cuts a mixed-radix dimension of two axes into at most three parts."""
    assert len(restrict(INTERLEAVED[0], NATIVE, ((1, 14), (0, WIDTH)))) == 3
    assert restrict(INTERLEAVED[0], NATIVE, full_box((HEADS * DIM, WIDTH))) == [INTERLEAVED[0]]
    assert restrict(INTERLEAVED[0], HUB, ((DIM, 3 * DIM), (0, WIDTH))) == []  # the rows of k and v alone


def test_export_of_a_box():
    native = {name: torch.randn(HEADS * DIM, WIDTH) for name in "qkv"}
    every = export_box(INTERLEAVED, full_box((45, 7)), native.__getitem__, torch.empty(45, 7))
    expected = torch.stack([native[n].view(HEADS, DIM, WIDTH) for n in "qkv"], 1).reshape(45, 7)
    assert torch.equal(every, expected)
    box = ((4, 23), (2, 5))
    assert torch.equal(export_box(INTERLEAVED, box, native.__getitem__, torch.empty(19, 3)), expected[4:23, 2:5])


def test_plain_copies_are_recognised():
    rows = Piece(("h", "n"), (Axis(4, (0, 0)), Axis(6, (1, 1))), ((0, 0), (0, 0)))
    assert is_plain_copy(rows, torch.empty(4, 6), (0, 0))
    assert not is_plain_copy(rows, torch.empty(6, 4).t(), (0, 0))
    crossed = Piece(("h", "n"), (Axis(4, (1, 0)), Axis(6, (0, 1))), ((0, 0), (0, 0)))
    assert not is_plain_copy(crossed, torch.empty(4, 6), (0, 0))
    assert not is_plain_copy(INTERLEAVED[0], torch.empty(15, 7), (0, 0))


def test_proof_of_an_interleave():
    prove(INTERLEAVED, *SHAPES)


def test_proof_needs_no_memory():
    """A tensor of a terabyte is proved on a few cells."""
    size = 1 << 20
    halves = [
        Piece((name, "n"), (Axis(size // 2, (0, 0)), Axis(size, (1, 1))), ((0, 0), (i * size // 2, 0)))
        for i, name in enumerate("ab")
    ]
    prove(halves, dict.fromkeys("ab", (size // 2, size)), {"n": (size, size)})
    with pytest.raises(CoverageError, match="index .524287, 0. is covered 0 times"):
        short = replace(halves[0], axes=(Axis(size // 2 - 1, (0, 0)), halves[0].axes[1]))
        prove([short, halves[1]], dict.fromkeys("ab", (size // 2, size)), {"n": (size, size)})


def test_proof_of_scalars_and_pads():
    scalar = Piece(("h", "n"), (), ((), ()))
    prove([scalar], {"h": ()}, {"n": ()})
    rows = Piece(("h", "n"), (Axis(5, (0, 0)), Axis(2, (1, 1))), ((0, 0), (0, 0)))
    prove([rows], {"h": (5, 2)}, {"n": (8, 2)}, pads={"n": [((5, 8), (0, 2))]})
    with pytest.raises(CoverageError, match="covered 0 times"):
        prove([rows], {"h": (5, 2)}, {"n": (8, 2)})
    with pytest.raises(CoverageError, match="covered 2 times"):
        prove([rows], {"h": (5, 2)}, {"n": (8, 2)}, pads={"n": [((4, 8), (0, 2))]})


def test_proof_rejects_an_element_that_goes_to_two_places():
    twice = Piece(("h", "n"), (Axis(3, (0, 0), (0, 2)), Axis(2, (0, 0))), ((0,), (0,)))
    with pytest.raises(CoverageError, match="covers an index of dimension 0 twice"):
        prove([twice], {"h": (2,)}, {"n": (6,)})


def shifted(piece: Piece, side: int, dim: int, by: int) -> Piece:
    offsets = [list(o) for o in piece.offsets]
    offsets[side][dim] += by
    return replace(piece, offsets=(tuple(offsets[0]), tuple(offsets[1])))


@pytest.mark.parametrize(
    "pieces",
    [
        INTERLEAVED[:2],  # a rule dropped
        [*INTERLEAVED, INTERLEAVED[1]],  # a rule twice
        [INTERLEAVED[0], INTERLEAVED[1], replace(INTERLEAVED[1], names=("fused", "v"))],  # v read from k's rows
        [shifted(INTERLEAVED[0], HUB, 0, 1), *INTERLEAVED[1:]],
        [shifted(INTERLEAVED[0], NATIVE, 1, 1), *INTERLEAVED[1:]],  # out of bounds
        [*INTERLEAVED[:2], shifted(INTERLEAVED[2], NATIVE, 0, -1)],  # below them: -1 would count as the last row
        [replace(INTERLEAVED[0], names=("fused", "w")), *INTERLEAVED[1:]],  # an unknown tensor
        [replace(INTERLEAVED[0], axes=(Axis(HEADS, (0, 0), (3 * DIM, 1)), *INTERLEAVED[0].axes[1:])), *INTERLEAVED[1:]],
    ],
)
def test_proof_finds_mistakes(pieces):
    with pytest.raises(CoverageError):
        prove(pieces, *SHAPES)

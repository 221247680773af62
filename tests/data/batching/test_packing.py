"""Best fit, against the loop that tries every part; and cutting."""

import numpy as np
import pytest

from modelcenter.data.batching.packing import BestFit, cut, pack_rows


@pytest.mark.parametrize("most", [None, 3])
def test_best_fit_is_the_fullest_part_that_takes_the_row(most):
    random = np.random.default_rng(0)
    lengths = random.integers(0, 21, 60).tolist()
    fit, rooms = BestFit(20, most), []
    for length in lengths:
        (part,) = fit.place([length])
        fitting = sorted(room for room in rooms if room >= length and room > 0)
        if part == -1:
            assert not fitting and len(rooms) == most
            continue
        if part == len(rooms):
            assert not fitting
            rooms.append(20)
        else:
            assert rooms[part] == fitting[0]
        rooms[part] -= length
    assert fit.parts == len(rooms)
    assert fit.room == (most is None or any(rooms))


def test_parts_hold_every_row_once():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    order, ends = pack_rows(lengths, 128)
    assert sorted(order) == list(range(1000))
    parts = np.split(order, ends[:-1])
    assert all(0 < lengths[part].sum() <= 128 for part in parts)
    assert len(parts) <= 1.02 * lengths.sum() / 128
    assert np.array_equal(np.concatenate(([0], ends))[1:], np.cumsum([len(p) for p in parts]))


def test_cut_makes_the_fewest_runs():
    assert cut(np.array([3, 3, 4, 10, 0, 1]), 10).tolist() == [3, 5, 6]
    assert cut(np.zeros(0, np.int64), 10).tolist() == []
    assert cut(np.array([0, 0]), 5).tolist() == [2]
    with pytest.raises(ValueError, match="a row has 11 tokens, but a microbatch has at most 10"):
        cut(np.array([11]), 10)

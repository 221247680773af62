"""Batches: every row once, alike on any number of ranks, of similar lengths."""

import numpy as np
import pytest

from modelcenter.data.sampling import EpochBatches, deal, evaluation_batches

LENGTHS = np.random.default_rng(0).lognormal(3, 0.6, 1003).astype(np.int64) + 3


@pytest.mark.parametrize("size", [1, 7, 32, 1003, 2000])
def test_every_row_once_and_the_rest_last(size):
    plan = EpochBatches(LENGTHS, size, seed=1)
    batches = plan.epoch(0)
    assert len(batches) == plan.steps == -(-1003 // size)
    assert sorted(np.concatenate(batches)) == list(range(1003))
    assert [len(b) for b in batches[:-1]] == [size] * (plan.steps - 1)
    assert len(batches[-1]) == 1003 - size * (plan.steps - 1)


def test_a_pure_function_of_seed_and_epoch():
    def epoch(seed, number):
        return [b.tolist() for b in EpochBatches(LENGTHS, 32, seed).epoch(number)]

    assert epoch(1, 3) == epoch(1, 3)
    assert epoch(1, 3) != epoch(1, 4) and epoch(1, 3) != epoch(2, 3)
    first = {tuple(sorted(b)) for b in epoch(1, 0)}
    assert len(first & {tuple(sorted(b)) for b in epoch(1, 1)}) == 0  # other company, not only another order


def test_lengths_are_alike_within_a_batch_and_not_over_time():
    batches = EpochBatches(LENGTHS, 16, seed=0).epoch(0)
    slots = sum(len(b) * LENGTHS[b].max() for b in batches)
    assert 1 - LENGTHS.sum() / slots < 0.1
    means = np.array([LENGTHS[b].mean() for b in batches[:-1]])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    assert all((np.diff(LENGTHS[b]) <= 0).all() for b in batches)


def test_windows_limit_what_is_sorted_together():
    lengths = np.arange(64 * 100)
    batches = EpochBatches(lengths, 2, seed=0).epoch(0)
    # Were the whole epoch sorted, batches would hold neighbours.
    assert np.mean([abs(int(lengths[b][0]) - int(lengths[b][1])) for b in batches]) > 10


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 4, 30, 31])
def test_deal_loses_and_doubles_nothing(ranks, parts, rows):
    batch = np.argsort(-LENGTHS[:rows])
    dealt = deal(batch, ranks, parts)
    assert len(dealt) == ranks and all(len(mine) == parts for mine in dealt)
    pieces = [part for mine in dealt for part in mine]
    assert sorted(np.concatenate(pieces)) == sorted(batch)
    sizes = [len(p) for p in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(LENGTHS[p]) <= 0).all() for p in pieces)


def test_deal_balances_tokens():
    rows = np.argsort(-LENGTHS)[:256]
    tokens = [LENGTHS[part].sum() for mine in deal(rows, 4, 2) for part in mine]
    assert max(tokens) / min(tokens) < 1.05


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 17, 64])
def test_evaluation_covers_every_row_once(ranks, rows):
    dealt = evaluation_batches(LENGTHS[:rows], 8, ranks)
    pieces = [b for mine in dealt for b in mine]
    assert len(dealt) == ranks and all(0 < len(b) <= 8 for b in pieces)
    assert sorted(np.concatenate([*pieces, np.zeros(0, int)])) == list(range(rows))
    counts = [len(mine) for mine in dealt]
    assert max(counts) - min(counts) <= 1

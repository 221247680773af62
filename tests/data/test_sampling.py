"""Batches: every row once, alike on any number of ranks, random samples."""

import tracemalloc

import numpy as np
import pytest

from modelcenter.data.sampling import EpochBatches, TokenBatches, deal, evaluation_batches

LENGTHS = np.random.default_rng(0).lognormal(3, 0.6, 1003).astype(np.int64) + 3


@pytest.mark.parametrize("size", [1, 7, 32, 1003, 2000])
def test_every_row_once_and_the_rest_last(size):
    plan = EpochBatches(LENGTHS, size, seed=1)
    batches = plan.epoch(0)
    assert len(batches) == plan.steps == -(-1003 // size)
    assert sorted(np.concatenate(batches)) == list(range(1003))
    assert [len(b) for b in batches[:-1]] == [size] * (plan.steps - 1)
    assert len(batches[-1]) == 1003 - size * (plan.steps - 1)


@pytest.mark.parametrize("make", [EpochBatches, TokenBatches])
def test_an_epoch_of_many_steps_takes_a_few_integers_for_each(make):
    plan = make(np.full(100_000, 5), 1 if make is EpochBatches else 5, 0)
    tracemalloc.start()
    batches = plan.epoch(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(batches) == plan.steps == 100_000
    assert peak / plan.steps < 100  # an array of its own takes more than that


def test_a_pure_function_of_seed_and_epoch():
    def epoch(seed, number):
        return [b.tolist() for b in EpochBatches(LENGTHS, 32, seed).epoch(number)]

    assert epoch(1, 3) == epoch(1, 3)
    assert epoch(1, 3) != epoch(1, 4) and epoch(1, 3) != epoch(2, 3)
    first = {tuple(sorted(b)) for b in epoch(1, 0)}
    assert len(first & {tuple(sorted(b)) for b in epoch(1, 1)}) == 0  # other company, not only another order


def test_batches_are_random_samples_of_the_lengths():
    """Their mean lengths spread as those of random draws do: were rows of like length together, far more."""
    batches = EpochBatches(LENGTHS, 16, seed=0).epoch(0)
    means = np.array([LENGTHS[b].mean() for b in batches[:-1]])
    assert 0.7 < means.std() / (LENGTHS.std() / 16**0.5) < 1.3
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    assert all((np.diff(LENGTHS[b]) <= 0).all() for b in batches)


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


def test_a_short_batch_is_dealt_over_all_ranks():
    assert [[len(part) for part in mine] for mine in deal(np.arange(3), 3, 2)] == [[1, 0]] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 17, 64])
def test_evaluation_covers_every_row_once(ranks, rows):
    dealt = evaluation_batches(LENGTHS[:rows], 8, ranks)
    pieces = [b for mine in dealt for b in mine]
    assert len(dealt) == ranks and all(0 < len(b) <= 8 for b in pieces)
    assert sorted(np.concatenate([*pieces, np.zeros(0, int)])) == list(range(rows))
    counts = [len(mine) for mine in dealt]
    assert max(counts) - min(counts) <= 1


LONG = np.clip(np.random.default_rng(1).lognormal(4, 0.7, 3000), 2, 512).astype(np.int64)  # mean about 70
CASES = [(LENGTHS, 160), (LENGTHS, 1024), (LONG, 512), (LONG, 4096), (np.array([5, 0, 3, 3]), 5), (np.array([9]), 9)]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("lengths", "part"), CASES)
def test_token_batches_hold_every_row_once_within_the_budget(lengths, part, parts):
    plan = TokenBatches(lengths, part * parts, 1, part)
    for epoch in range(3):
        batches = plan.epoch(epoch)
        assert len(batches) == plan.steps and all(len(rows) for rows in batches)
        assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
        assert max(lengths[rows].sum() for rows in batches) <= part * parts


def test_token_batches_are_full():
    for lengths, part in CASES[2:4]:
        for parts in (1, 8):
            plan = TokenBatches(lengths, part * parts, 1, part)
            batches = plan.epoch(0)
            tokens = [int(lengths[rows].sum()) for rows in batches[:-1]]
            assert np.mean(tokens) / plan.budget >= 0.98
            # The least that any packing could need.
            assert plan.steps <= -(-int(lengths.sum()) // plan.budget) + 2


def test_the_emptiest_part_is_the_last():
    """The batch of what is left over is small anyway; and of an epoch with too many parts those left out are emptier
    than all others."""
    plan = TokenBatches(LONG, 512, 1)
    for epoch in range(3):
        tokens = [int(LONG[rows].sum()) for rows in plan.epoch(epoch)]
        assert tokens[-1] == min(tokens) < 512 * 0.9

    def draw(epoch):  # that of epoch 1 is one part longer
        return np.arange(40 if epoch == 0 else 41)

    lengths = np.array([8] * 40 + [3])
    rows = np.concatenate(TokenBatches(lengths, 8, 0, draw=draw).epoch(1))
    assert sorted(rows) == list(range(40))


def test_token_batches_are_a_pure_function_of_seed_and_epoch():
    def epoch(seed, number):
        return [rows.tolist() for rows in TokenBatches(LONG, 2048, seed, 512).epoch(number)]

    assert epoch(1, 3) == epoch(1, 3)
    assert epoch(1, 3) != epoch(1, 4) and epoch(1, 3) != epoch(2, 3)
    first = {tuple(sorted(rows)) for rows in epoch(1, 0)}
    assert not first & {tuple(sorted(rows)) for rows in epoch(1, 1)}  # other company, not only another order


def test_short_rows_keep_random_company():
    """Rows far shorter than a part are not sorted by length, which would make the batches differ in kind."""
    batches = TokenBatches(np.tile(LENGTHS, 5), 1024, 0).epoch(0)[:-1]
    means = [np.tile(LENGTHS, 5)[rows].mean() for rows in batches]
    assert np.std(means) < 2 * LENGTHS.std() / np.sqrt(1024 / LENGTHS.mean())


@pytest.mark.parametrize(("lengths", "part"), CASES[:4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 8), (2, 4), (4, 2), (8, 1), (2, 2), (1, 1)])
def test_token_batches_are_dealt_within_the_microbatch(lengths, part, ranks, microbatches):
    plan = TokenBatches(lengths, 8 * part, 3, part)
    for rows in plan.epoch(0):
        dealt = plan.deal(rows, ranks, microbatches)
        assert len(dealt) == ranks and {len(mine) for mine in dealt} == {microbatches}
        pieces = [piece for mine in dealt for piece in mine]
        assert sorted(np.concatenate(pieces)) == sorted(rows)
        assert max(lengths[p].sum() for p in pieces) <= plan.budget // (ranks * microbatches)


def test_smaller_microbatches_than_planned_are_more_of_them():
    plan = TokenBatches(LONG, 8192, 3, 4096)
    rows = plan.epoch(0)[0]
    dealt = plan.deal(rows, 2, 8)  # of 512 tokens: rows do not divide so
    pieces = [piece for mine in dealt for piece in mine]
    assert sorted(np.concatenate(pieces)) == sorted(rows) and max(LONG[p].sum() for p in pieces) <= 512
    assert len({len(mine) for mine in dealt}) == 1
    with pytest.raises(ValueError, match="batch_tokens: a row has .* tokens, but a microbatch has at most 128"):
        plan.deal(np.array([LONG.argmax()]), 8, 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((LONG, 100, 0), r"row \d+ of 3000 has 512 tokens, but a microbatch has at most 100; raise .* to 512"),
        ((LONG, 1000, 0, 2000), "a microbatch of 2000 tokens and a global batch of 1000"),
        ((LONG, 0, 0), "a microbatch of 0 tokens"),
        ((LONG[:0], 10, 0), "there are no rows"),
    ],
)
def test_token_batches_that_cannot_be(arguments, says):
    with pytest.raises(ValueError, match=says):
        TokenBatches(*arguments)


@pytest.mark.parametrize("parts", [1, 3])
def test_batches_of_drawn_rows(parts):
    def draw(epoch):
        return np.random.default_rng(epoch).integers(0, len(LONG), 500)

    by_rows, by_tokens = EpochBatches(LONG, 32, 0, draw), TokenBatches(LONG, 512 * parts, 0, 512, draw)
    for epoch in range(4):
        assert sorted(np.concatenate(by_rows.epoch(epoch))) == sorted(draw(epoch))
        assert len(by_rows.epoch(epoch)) == by_rows.steps == 16
        batches = by_tokens.epoch(epoch)
        assert len(batches) == by_tokens.steps and all(len(rows) for rows in batches)
        assert max(LONG[rows].sum() for rows in batches) <= 512 * parts
        rows = np.concatenate(batches)
        assert set(rows) <= set(draw(epoch)) and abs(len(rows) - 500) <= 60
    assert sorted(np.concatenate(by_tokens.epoch(0))) == sorted(draw(0))

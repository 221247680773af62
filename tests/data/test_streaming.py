"""Batches of a stream: every row once per epoch, and the same whatever the ranks, workers and where a run stopped."""

import json
from itertools import islice

import numpy as np
import pytest
from toydata import write_jsonl

from modelcenter.data.streaming import StreamBatches
from modelcenter.data.streams import FileRows

LENGTHS = np.clip(np.random.default_rng(0).lognormal(2, 0.8, 230), 1, 40).astype(int).tolist()
BY = {
    "rows": {"global_batch_size": 16},
    "tokens": {"budget": 160, "part": 40},
    "tokens in one part": {"budget": 64},
    "tokens, few windows": {"budget": 160, "part": 40, "window": 500},
}


def tokenise(rows):
    return [None if row["n"] % 50 == 7 else {"n": row["n"], "input_ids": [0] * row["length"]} for row in rows]


@pytest.fixture
def files(tmp_path):
    rows = [{"n": i, "length": n} for i, n in enumerate(LENGTHS)]
    paths = [write_jsonl(tmp_path / "a.jsonl", rows[:100]), write_jsonl(tmp_path / "b.jsonl", rows[100:])]
    paths[1].write_text(paths[1].read_text().replace("\n", "\n\n", 20))  # empty rows
    return paths


def batches(files, seed=0, by="rows", **options):
    return StreamBatches(FileRows(files), tokenise, seed=seed, **{"window": 32, **BY[by], **options})


def show(found):
    return [([row["n"] for row in batch.rows], batch.epoch, batch.state) for batch in found]


@pytest.mark.parametrize("by", BY)
def test_every_row_once_per_epoch(files, by):
    expected = [i for i in range(230) if i % 50 != 7]
    epochs = {}
    for batch in islice(batches(files, by=by).at(), 120):
        assert batch.rows
        if "budget" in BY[by]:
            assert batch.lengths.sum() <= BY[by]["budget"]
        epochs.setdefault(batch.epoch, []).append([row["n"] for row in batch.rows])
        skipped = batch.state["skipped"]
    assert list(epochs) == list(range(len(epochs)))
    full = [sum(found, []) for found in list(epochs.values())[:-1]]
    assert len(full) >= 2 and all(sorted(rows) == expected for rows in full)
    assert full[0] != full[1] and full[0] != expected
    assert skipped >= 25 * len(full)  # 20 empty rows and 5 that tokenise drops
    if by == "rows":
        assert all(len(rows) == 16 for rows in epochs[0][:-1]) and len(epochs[0]) == -(-225 // 16)


def test_parts_of_a_token_batch_are_full(files):
    found = [b for b in islice(batches(files, by="tokens, few windows").at(), 60) if b.epoch == 0]
    assert np.mean([b.lengths.sum() / 160 for b in found[:-2]]) >= 0.98


@pytest.mark.parametrize("by", BY)
def test_it_goes_on_from_every_state_as_if_it_had_not_stopped(files, by):
    whole = list(islice(batches(files, by=by).at(), 60))
    assert any(batch.state["held"] for batch in whole) == ("budget" in BY[by])
    for i in range(0, 50, 1 if by == "rows" else 3):
        state = json.loads(json.dumps(whole[i].state))
        again = list(islice(batches(files, by=by).at(state), 6))
        assert show(again) == show(whole[i + 1 : i + 7]), i


@pytest.mark.parametrize("by", BY)
def test_workers_change_nothing(files, by):
    assert show(islice(batches(files, by=by, workers=3).at(), 30)) == show(islice(batches(files, by=by).at(), 30))


def test_the_seed_and_the_window_change_the_order(files):
    shown = [show(islice(batches(files, **options).at(), 3)) for options in ({}, {"seed": 1}, {"window": 64})]
    assert len({str(rows) for rows in shown}) == 3
    first = next(batches(files, window=16).at())
    assert max(row["n"] for row in first.rows) < 32  # nothing from beyond the windows it needed


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("ranks", "parts"), [(1, 4), (2, 2), (4, 1), (1, 1)])
def test_ranks_share_every_batch(files, by, ranks, parts):
    for batch in islice(batches(files, by=by).at(), 20):
        if "budget" in BY[by] and BY[by]["budget"] // (ranks * parts) < max(batch.lengths):
            with pytest.raises(ValueError, match="batch_tokens: a row has"):
                batch.rank_batches(0, ranks, parts)
            continue
        dealt = [batch.rank_batches(rank, ranks, parts) for rank in range(ranks)]
        assert len({len(mine) for mine in dealt}) == 1
        rows = [row["n"] for mine in dealt for part in mine for row in part]
        assert sorted(rows) == sorted(row["n"] for row in batch.rows)
        if by == "tokens":
            limit = 160 // (ranks * parts)
            assert all(sum(len(row["input_ids"]) for row in part) <= limit for mine in dealt for part in mine)


def test_rows_know_their_place(files):
    for batch in islice(batches(files, by="tokens").at(), 12):
        for row, place in zip(batch.rows, batch.places, strict=True):
            path, line = place.split(", line ")
            with open(path) as file:
                assert json.loads(file.read().split("\n")[int(line) - 1])["n"] == row["n"]


def test_what_cannot_be(files, tmp_path):
    for options, says in [
        ({}, "give either global_batch_size .* or budget"),
        ({"global_batch_size": 2, "budget": 3}, "give either"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"budget": 10, "part": 20}, "a part of 20 tokens does not fit the budget of 10"),
        ({"global_batch_size": 2, "window": 0}, "window is 0"),
    ]:
        with pytest.raises(ValueError, match=says):
            StreamBatches(FileRows(files), tokenise, seed=0, **options)
    with pytest.raises(ValueError, match=r"jsonl, line \d+: the row has \d+ tokens, but a microbatch has at most 20"):
        list(islice(StreamBatches(FileRows(files), tokenise, seed=0, budget=20).at(), 50))
    (tmp_path / "c.jsonl").write_text('{"n": 7, "length": 3}\n\n')
    with pytest.raises(ValueError, match="c.jsonl: an epoch has no rows"):
        next(batches([tmp_path / "c.jsonl"]).at())


def test_each_window_has_an_order_of_its_own(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"n": 100 + i, "length": 1} for i in range(40)])
    keep = lambda rows: [{"n": row["n"] - 100, "input_ids": [0]} for row in rows]  # noqa: E731
    found = StreamBatches(FileRows([path]), keep, seed=0, global_batch_size=20, window=20).at()
    first, second = ([row["n"] % 20 for row in next(found).rows] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


@pytest.mark.parametrize("by", BY)
def test_long_rows_in_pieces_go_on_anywhere(files, by):
    """Each row becomes none to four pieces; from the state after any batch the same batches follow."""

    def pieces(rows):
        return [[{"input_ids": [row["n"]] * (1 + row["n"] % 3)}] * (row["n"] % 5) for row in rows]

    sizes = {"window": 16, "seed": 3, "several": True, **BY[by]}

    def batches_from(state=None):
        return StreamBatches(FileRows(files), pieces, **sizes).at(state)

    whole = []
    for batch in batches_from():
        whole.append(batch)
        if batch.epoch > 0 and len(whole) > 24:
            break
    first = [batch for batch in whole if batch.epoch == 0]
    keys = [key for batch in first for key in batch.keys]
    assert len(set(keys)) == len(keys) and whole[-1].epoch > 0
    rows = [row["input_ids"][0] for batch in first for row in batch.rows]
    assert all(rows.count(n) == rows.count(n) // (n % 5) * (n % 5) for n in set(rows))
    for i in range(0, len(whole) - 1, 3):
        again = list(islice(batches_from(json.loads(json.dumps(whole[i].state))), 4))
        for one, other in zip(again, whole[i + 1 :], strict=False):
            assert (one.rows, one.keys, one.epoch, one.state) == (other.rows, other.keys, other.epoch, other.state)

"""Mixtures: shares, epochs that go on from each other, and batches that are those of the parts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modelcenter.data.batching.collate import merge, pack
from modelcenter.data.batching.mixture import (
    Mixture,
    draw_of,
    epoch_frequencies,
    mixed,
    parse_weight,
    parse_weights,
    weights_by_size,
)
from modelcenter.data.sampling import EpochBatches, TokenBatches
from modelcenter.data.table import Origin, Table
from modelcenter.data.tokenization.tokenize import Tokens


class Toy:
    """Row i holds the tokens base + i, as many as its length, and its number as label."""

    def __init__(self, base, lengths):
        self.name = f"from {base}"
        self.base, self.lengths = base, np.array(lengths, dtype=np.int64)
        ids = np.repeat(np.arange(base, base + len(lengths)), self.lengths).astype(np.int32)
        self.tokens = Tokens(ids, np.concatenate(([0], np.cumsum(self.lengths))), None, 0)

    def __len__(self):
        return len(self.lengths)

    def batch(self, rows, epoch):
        return pack(self.tokens, rows, np.arange(self.base, self.base + len(self) + 1))

    def where(self, row):
        return f"{self.base}:{row}"

    def fingerprint(self):
        return self.base


A, B = Toy(100, [2, 3, 4, 5, 6, 7, 8, 9]), Toy(200, [1, 2, 3])


def test_how_often_rows_are_drawn():
    tables = [Table({"text": [""] * n}, [Origin(f"{n}.csv", n, "")]) for n in (6, 2)]
    table = mixed(tables, [1, 3]).take(np.array([0, 1, 2, 3, 7]))  # some rows were left out
    draw = draw_of(SimpleNamespace(table=table), 0)
    epochs = 400
    drawn = np.bincount(np.concatenate([draw(epoch) for epoch in range(epochs)]), minlength=5) / epochs
    np.testing.assert_allclose(drawn, [0.25, 0.25, 0.25, 0.25, 4])  # one of five rows, and four of the last
    np.testing.assert_allclose(epoch_frequencies(table), [1.25 / 4] * 4 + [3.75])  # counts of an epoch are rounded
    assert epoch_frequencies(tables[0]) is None


def test_shares_of_an_epoch():
    mixture = Mixture([(A, 1), (B, 3)], seed=0, rows=20)
    assert mixture.counts == [5, 15] and len(mixture) == 11 and mixture.lengths.tolist() == [*A.lengths, *B.lengths]
    rows = mixture.draw(0)
    assert np.bincount(rows >= 8).tolist() == [5, 15]
    assert np.bincount(rows[rows >= 8] - 8).tolist() == [5, 5, 5]
    assert Mixture([(A, 0.2), (B, 0.6)], 0, 20).draw(3).tolist() == mixture.draw(3).tolist()
    assert Mixture([(A, 1), (B, 3)], 1, 20).draw(0).tolist() != rows.tolist()
    assert Mixture([(A, 1), (B, 1), (A, 1)], 0, 10).counts == [4, 3, 3]


def test_a_part_comes_whole_before_any_row_comes_again():
    mixture = Mixture([(A, 3), (B, 2)], seed=5, rows=5)
    drawn = [mixture.draw(epoch) for epoch in range(24)]
    for low, high in ((0, 8), (8, 11)):
        stream = [row for rows in drawn for row in rows.tolist() if low <= row < high]
        turns = [stream[i : i + high - low] for i in range(0, len(stream), high - low)]
        assert all(sorted(turn) == list(range(low, high)) for turn in turns if len(turn) == high - low)
        assert len({tuple(turn) for turn in turns}) > 3


def test_by_size_it_is_one_data_set():
    mixture = Mixture([(A, w) for w in weights_by_size([8])] + [(B, 3)], seed=0)
    assert mixture.rows == 11 and sorted(mixture.draw(7)) == list(range(11))
    assert weights_by_size([100, 1], 2) == [10, 1]
    assert Mixture([(A, 8), (B, 3)], 0).counts == [8, 3]


def test_batches_are_those_of_the_parts():
    mixture = Mixture([(A, 1), (B, 1)], seed=0)
    batch = mixture.batch(np.array([9, 0, 8, 9, 3]), epoch=0)
    assert batch["labels"].tolist() == [100, 103, 201, 200, 201]
    assert batch["input_ids"].tolist() == [[100] * 2 + [103] * 5 + [201] * 2 + [200] + [201] * 2]
    assert batch["cu_seqlens"].tolist() == [0, 2, 7, 9, 10, 12] and batch["max_seqlen"] == 5
    assert batch["cu_seqlens"].dtype == torch.int32
    assert mixture.batch(np.array([10]), 0)["labels"].tolist() == [202]
    assert mixture.batch(np.zeros(0, np.int64), 0)["input_ids"].shape == (1, 0)
    assert [mixture.where(i) for i in (0, 7, 8, 10)] == ["100:0", "100:7", "200:0", "200:2"]


def test_each_part_makes_its_rows_for_the_epoch_asked():
    parts = Toy(100, [2, 3]), Toy(200, [1])
    asked = []
    for part in parts:
        part.batch = lambda rows, epoch, batch=part.batch: asked.append(epoch) or batch(rows, epoch)
    mixture = Mixture([(part, 1) for part in parts], seed=0)
    mixture.batch(np.arange(3), epoch=5)
    mixture.batch(np.arange(3))
    assert asked == [5, 5, 0, 0]


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_with_batches(by):
    mixture = Mixture([(A, 1), (B, 3)], seed=0, rows=40)
    plan = (
        EpochBatches(mixture.lengths, 4, 0, mixture.draw)
        if by == "rows"
        else TokenBatches(mixture.lengths, 40, 0, 20, mixture.draw)
    )
    for epoch in range(3):
        rows = np.concatenate(plan.epoch(epoch))
        assert len(plan.epoch(epoch)) == plan.steps and abs(len(rows) - 40) <= 5
        assert abs(np.mean(rows >= 8) - 0.75) < 0.12


def test_fingerprint_tells_weights_apart():
    prints = [Mixture([(A, 1), (B, w)], 0, rows).fingerprint() for w, rows in ((1, None), (2, None), (1, 12))]
    assert len({str(p) for p in prints}) == 3


def test_parts_and_weights_that_cannot_be_mixed_are_named():
    for parts, options, says in [
        ([], {}, "nothing to mix"),
        ([(A, 1), (B, 0)], {}, "weight of from 200 is 0.0, expected a positive"),
        ([(A, float("nan"))], {}, "weight of from 100 is nan"),
        ([(A, float("inf"))], {}, "weight of from 100 is inf"),
        ([(A, 1), (Toy(0, []), 1)], {}, "from 0 has no rows"),
        ([(A, 1), (B, 1e-6)], {}, "from 200 with .* gets no row"),
    ]:
        with pytest.raises(ValueError, match=says):
            Mixture(parts, 0, **options)
    with pytest.raises(ValueError, match="temperature: got 0"):
        weights_by_size([1], 0)


def test_weights_on_the_command_line():
    assert parse_weight("data/a.jsonl@0.5") == ("data/a.jsonl", 0.5)
    assert parse_weight("a@b@2") == ("a@b", 2.0)
    for plain in ("a.jsonl", "me@home/a.jsonl", "@3", "owner/set"):
        assert parse_weight(plain) == (plain, None)
    with pytest.raises(ValueError, match="the weight after @ is -1, expected a positive number"):
        parse_weight("a@-1")
    assert parse_weights(["a@1", "b@2"]) == [("a", 1), ("b", 2)] and parse_weights(["a", "b"]) is None
    with pytest.raises(
        ValueError, match=r"train_data: got '0\.3'; a weight is written after its entry, as in PATH@0\.3"
    ):
        parse_weights(["0.3", "a", "0.7", "b"])


def test_a_file_may_have_an_at_in_its_name(tmp_path):
    file = tmp_path / "rows@2"
    assert parse_weight(str(file)) == (str(tmp_path / "rows"), 2.0)
    file.touch()
    assert parse_weight(str(file)) == (str(file), None)
    assert parse_weight(f"{file}@3") == (str(file), 3.0)


def test_merging_both_sides_and_labels_by_token():
    def batch(tokens, other):
        decoder = torch.tensor([other])
        return {
            "input_ids": torch.tensor([tokens]), "cu_seqlens": torch.tensor([0, len(tokens)], dtype=torch.int32),
            "max_seqlen": len(tokens), "decoder_input_ids": decoder, "labels": decoder,
            "decoder_cu_seqlens": torch.tensor([0, 1, len(other)], dtype=torch.int32), "decoder_max_seqlen": 7,
            "scores": torch.tensor([[0.5, 0.25, 0.1]]), "pairs": torch.ones(2, 2),
        }  # fmt: skip

    found = merge([batch([1, 2], [3, 4, 5, 6]), batch([7], [8, 9])])
    assert found["labels"].tolist() == found["decoder_input_ids"].tolist() == [[3, 4, 5, 6, 8, 9]]
    assert found["decoder_cu_seqlens"].tolist() == [0, 1, 4, 5, 6] and found["cu_seqlens"].tolist() == [0, 2, 3]
    assert found["scores"].shape == (2, 3) and found["pairs"].shape == (4, 2)  # of rows, though a side has 2 tokens
    with pytest.raises(ValueError, match="not all have extra"):
        merge([batch([1], [2]), {**batch([1], [2]), "extra": 0}])


def test_parts_without_a_column_in_common():
    parts = [Table({"text": ["a"], "label": ["x"]}, [Origin("a.csv", 1, "0")]),
             Table({"0": ["y"], "1": ["b"]}, [Origin("b.tsv", 1, "0")])]  # fmt: skip
    with pytest.raises(ValueError, match="train_data: a.csv has 'text', 'label' and b.tsv has '0', '1'; give the col"):
        mixed(parts, [1, 1])

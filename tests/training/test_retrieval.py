"""How well texts are found: the measures by hand, and which texts are looked for among which."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modelcenter.training.metrics import Retrieval
from modelcenter.training.tasks.related_examples import text_ids
from modelcenter.training.tasks.text_search import find_documents


def test_measures_by_hand():
    metrics = Retrieval()
    found = torch.zeros(3, 10, dtype=torch.bool)
    found[0, [0, 2]] = True  # two of three, at ranks 1 and 3
    found[1, 9] = True  # the only one, at rank 10; none of the third's twelve
    metrics.update(found, [3, 1, 12])
    best = 1 + 1 / math.log2(3) + 1 / 2
    assert metrics.result() == {
        "ndcg@10": pytest.approx(((1 + 1 / 2) / best + 1 / math.log2(11) + 0) / 3),
        "mrr@10": pytest.approx((1 + 1 / 10 + 0) / 3),
        "recall@10": pytest.approx((2 / 3 + 1 + 0) / 3),
        "accuracy@1": pytest.approx(1 / 3),
    }
    few = Retrieval()  # of fewer texts than ten
    few.update(torch.tensor([[False, True]]), [1])
    assert few.result()["ndcg@10"] == pytest.approx(1 / math.log2(3)) and few.result()["recall@10"] == 1
    assert Retrieval().result() == dict.fromkeys(("ndcg@10", "mrr@10", "recall@10", "accuracy@1"), 0)


@pytest.mark.parametrize("elements", [1 << 24, 8], ids=["at once", "in parts"])
def test_what_is_found(monkeypatch, elements):
    """A text is not found by itself, unless it says that it belongs to itself; equal texts count once."""
    monkeypatch.setattr("modelcenter.training.tasks.text_search._ELEMENTS", elements)
    anchors, positives, negatives = ["a", "b", "a", "c"], ["x", "a", "y", "c"], ["z", "x"]
    texts = [*anchors, *positives, *negatives]
    # Along one direction: "a" is nearest to "a", then to x, z, c and y.
    place = {"a": 0.0, "x": 0.1, "z": 0.2, "c": 0.35, "y": 0.5, "b": 0.02}
    angles = torch.tensor([place[text] for text in texts])
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    first = np.arange(4, 9)
    examples = SimpleNamespace(text_ids=text_ids(texts), first_positive=first)
    seen = []

    class Seen(Retrieval):
        def update(self, found, relevant):
            seen.extend(zip(found.tolist(), relevant, strict=True))

    find_documents(embeddings, _Sized(examples, 4), Seen())
    by_anchor = dict(zip(sorted({*anchors}, key=lambda text: int(text_ids([text])[0])), seen, strict=True))
    # Documents: x, a, y, c, z. Of "a": x, z, c, y (itself hidden, so last); x and y belong to it.
    assert by_anchor["a"] == ([True, False, False, True, False], 2)
    # Of "b": a first, which belongs to it.
    assert by_anchor["b"] == ([True, False, False, False, False], 1)
    # "c" belongs to itself, and is found.
    assert by_anchor["c"] == ([True, False, False, False, False], 1)


class _Sized:
    def __init__(self, fields, rows):
        self.__dict__.update(vars(fields))
        self.rows = rows

    def __len__(self):
        return self.rows


def test_numbers_of_texts():
    ids = text_ids(["a", "b", "a", "", "\ud800 lone"])
    assert ids[0] == ids[2] and len(set(ids.tolist())) == 4
    assert ids.dtype == np.int64 and 0 <= ids.min() and ids.max() < 2**48

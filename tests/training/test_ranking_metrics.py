"""Metrics of rerankers against their definitions, written out query by query."""

import math
import random

import pytest
import torch

from modelcenter.training.metrics import PairLabels, Ranking


def ranked(scores, relevance):
    """(ndcg@10, mrr@10, average precision) of the texts of a query; of equal scores the less relevant first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], relevance[i]))
    gains = [relevance[i] for i in order]

    def dcg(values):
        return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(values[:10]))

    ranks = [rank + 1 for rank, gain in enumerate(gains) if gain > 0]
    precisions = [(number + 1) / rank for number, rank in enumerate(ranks)]
    first = 1 / ranks[0] if ranks[0] <= 10 else 0.0
    return dcg(gains) / dcg(sorted(gains, reverse=True)), first, sum(precisions) / len(precisions)


def padded(rows, fill):
    most = max(map(len, rows))
    return torch.tensor([[*map(float, row), *[fill] * (most - len(row))] for row in rows])


@pytest.mark.parametrize("labels", [(0, 0, 1), (0, 0, 0.5, 1, 3)], ids=["binary", "graded"])
def test_rankings(labels):
    rng = random.Random(3)
    sizes = [rng.randint(2, 15) for _ in range(60)]
    relevance = [rng.choices(labels, k=size) for size in sizes]
    scores = [[rng.choice([-2.0, -1.0, 0.5, 0.75, rng.gauss(0, 1)]) for _ in range(size)] for size in sizes]
    relevance[1:4] = [
        [label] * len(row) for label, row in zip((0, labels[-1], labels[-2]), relevance[1:4], strict=True)
    ]
    relevance[0] = [0] * 11 + [1] + [0] * (max(sizes) - 12)  # found at rank 12, which only map sees
    scores[0] = list(range(len(relevance[0]), 0, -1))
    there = padded([[1] * len(row) for row in relevance], 0) > 0
    metrics = Ranking()
    for part in (slice(0, 7), slice(7, 7), slice(7, 60)):
        metrics.update(padded(scores, 9.0)[part], padded(relevance, 5.0)[part], there[part])
    pairs = zip(scores, relevance, strict=True)
    expected = [ranked(*pair) for pair in pairs if len(set(pair[1])) > 1]
    assert 40 < len(expected) < 60  # others have texts that are all as relevant
    found = metrics.result()
    for number, name in enumerate(("ndcg@10", "mrr@10", "map")):
        assert found[name] == pytest.approx(sum(row[number] for row in expected) / len(expected)), name


def test_a_model_that_tells_nothing_apart_gains_nothing():
    metrics, there = Ranking(), torch.ones(1, 12, dtype=torch.bool)
    metrics.update(torch.zeros(1, 12), torch.tensor([[1.0] + [0.0] * 11]), there)
    assert metrics.result() == pytest.approx({"ndcg@10": 0.0, "mrr@10": 0.0, "map": 1 / 12})
    nothing = Ranking()
    nothing.update(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert nothing.result() == {"ndcg@10": None, "mrr@10": None, "map": None}


def test_pairs():
    rng = random.Random(5)
    scores = [rng.choice([-1.0, 0.25, 2.0, rng.gauss(0, 1)]) for _ in range(40)]
    labels = [rng.randint(0, 1) for _ in range(40)]
    metrics = PairLabels()
    for part in (slice(0, 13), slice(13, 40)):
        metrics.update(torch.tensor(scores[part]), torch.tensor(labels[part]))
    expected, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):  # scikit-learn's average_precision_score
        above = [label for score, label in zip(scores, labels, strict=True) if score >= threshold]
        expected += (sum(above) / sum(labels) - recall) * sum(above) / len(above)
        recall = sum(above) / sum(labels)
    right = sum((score > 0) == (label == 1) for score, label in zip(scores, labels, strict=True))
    assert metrics.result() == pytest.approx({"average_precision": expected, "accuracy": right / 40})
    assert PairLabels().result() == {"average_precision": None, "accuracy": 0.0}

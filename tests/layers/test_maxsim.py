"""Scores by the greatest products, their places and gradients, against all products."""

import pytest
import torch
from torch import nn

from modelcenter.layers import maxsim as module
from modelcenter.layers.maxsim import Documents, maxsim

QUERIES, DOCUMENTS, WIDTH = [3, 1, 4], [5, 1, 40, 2, 9, 17], 6


def vectors(lengths, seed):
    torch.manual_seed(seed)
    return nn.functional.normalize(torch.randn(sum(lengths), WIDTH), dim=-1)


def whose(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def by_all_products(queries, documents):
    parts = [
        [torch.stack([(q @ d.T).amax(1).sum() for d in documents.split(DOCUMENTS)])] for q in queries.split(QUERIES)
    ]
    return torch.stack([part for (part,) in parts])


def in_rectangles(lengths):
    """As a GPU has them."""
    return Documents(lengths, module._rectangles(lengths, torch.device("cpu")))


@pytest.mark.parametrize("held", [1 << 24, 64])
@pytest.mark.parametrize("arranged", [lambda lengths: Documents.of(lengths, torch.device("cpu")), in_rectangles])
def test_scores_and_gradients_are_those_of_all_products(arranged, held, monkeypatch):
    monkeypatch.setattr(module, "_PRODUCTS", held)
    queries, documents = vectors(QUERIES, 0).requires_grad_(), vectors(DOCUMENTS, 1).requires_grad_()
    wanted = by_all_products(queries, documents)
    found = maxsim(queries, whose(QUERIES), len(QUERIES), documents, arranged(DOCUMENTS))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(wanted.shape)
    grads = [torch.autograd.grad((scores * weights).sum(), (queries, documents)) for scores in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_rectangles_hold_each_document_once_and_repeat_only_its_own_vectors():
    starts = torch.tensor([0, *DOCUMENTS]).cumsum(0)
    seen = []
    for numbers, places in in_rectangles(DOCUMENTS).rectangles:
        seen += numbers.tolist()
        for number, row in zip(numbers.tolist(), places, strict=True):
            assert set(row.tolist()) == set(range(starts[number], starts[number + 1]))
            assert places.shape[1] <= max(DOCUMENTS[number] + 16, DOCUMENTS[number] * 5 // 4)
    assert sorted(seen) == list(range(len(DOCUMENTS)))


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_is_needed_has_a_gradient(frozen):
    sides = [vectors(QUERIES, 0), vectors(DOCUMENTS, 1)]
    sides[1 - frozen].requires_grad_()
    maxsim(sides[0], whose(QUERIES), 3, sides[1], in_rectangles(DOCUMENTS)).sum().backward()
    assert sides[frozen].grad is None and sides[1 - frozen].grad.abs().sum() > 0


def test_no_document_has_no_score_and_no_gradient():
    queries, none = vectors(QUERIES, 0).requires_grad_(), torch.zeros(0, WIDTH).requires_grad_()
    scores = maxsim(queries, whose(QUERIES), 3, none, in_rectangles([]))
    assert scores.shape == (3, 0)
    scores.sum().backward()
    assert not queries.grad.any()


def test_of_equal_products_the_first_counts():
    """So that the places, and with them the gradients, do not depend on how the documents are arranged."""
    query, same = torch.ones(1, WIDTH), torch.ones(3, WIDTH)
    for documents in (Documents([3]), in_rectangles([3])):
        assert module.best(query, same, documents)[1].tolist() == [[0]]

"""Which texts a row of embeddings takes part with in an epoch, and how many tokens that is, against lists in Python."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelcenter.training.contrastive import ANCHOR, NEGATIVE, POSITIVE
from modelcenter.training.tasks.related_examples import RelatedExamples

ROWS = 9


@pytest.fixture(params=[None, 1, 2], ids="max_negatives={}".format)
def drawn(request: pytest.FixtureRequest) -> tuple[RelatedExamples, list[range], list[range]]:
    """(examples, the numbers of each row's positives, of its negatives, of which some rows have none)."""
    draw = np.random.default_rng(0)
    positives, first = ranges(ROWS, draw.integers(1, 4, ROWS))
    negatives, last = ranges(int(first[-1]), draw.integers(0, 5, ROWS))
    tokens: Any = SimpleNamespace(lengths=draw.integers(1, 60, last[-1]))
    table: Any = None
    return (
        RelatedExamples(table, tokens, None, first, last, np.arange(last[-1]), None, request.param),
        positives,
        negatives,
    )


def ranges(start: int, counts: np.ndarray) -> tuple[list[range], np.ndarray]:
    first = start + np.concatenate(([0], np.cumsum(counts)))
    return [range(a, b) for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)], first


def test_epochs_take_positives_and_negatives_in_turn(drawn):
    examples, positives, negatives = drawn
    for epoch in range(5):
        rows = np.random.default_rng(epoch).permutation(ROWS)[:6]
        texts, roles = [], []
        for row in rows.tolist():
            count = min(len(negatives[row]), examples.max_negatives or ROWS)
            taken = [negatives[row][(epoch * count + i) % len(negatives[row])] for i in range(count)]
            texts += [row, positives[row][epoch % len(positives[row])], *taken]
            roles += [ANCHOR, POSITIVE, *[NEGATIVE] * count]
        found, found_roles = examples.numbers(rows, epoch)
        assert found.tolist() == texts and found_roles.tolist() == roles


def test_no_rows_have_no_texts(drawn):
    texts, roles = drawn[0].numbers(np.array([], np.int64), 3)
    assert texts.tolist() == roles.tolist() == []


def test_a_row_is_as_long_as_its_longest_texts(drawn):
    examples, positives, negatives = drawn
    lengths = examples.tokens.lengths
    expected = [
        lengths[row]
        + max(lengths[positives[row]])
        + sum(sorted(lengths[negatives[row]])[::-1][: examples.max_negatives])
        for row in range(ROWS)
    ]
    assert examples.lengths.tolist() == expected

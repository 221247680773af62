"""Span corruption against the published recipe."""

import numpy as np
import pytest
from text_toys import make_decoder_tokenizer, make_t5_tokenizer

from modelcenter.data.pretraining.span_corruption import SpanCorruption, sentinels_of

MARKS = np.arange(1000, 900, -1)


def put_back(inputs: np.ndarray, targets: np.ndarray) -> list[int]:
    """The text, from its two halves."""
    spans, last = {}, None
    for token in targets[:-1].tolist():
        if token in MARKS:
            last = spans.setdefault(token, [])
        else:
            last.append(token)
    return [t for token in inputs[:-1].tolist() for t in spans.get(token, [token])]


@pytest.mark.parametrize(
    ("inputs", "density", "span", "room", "targets"),
    # The first is T5's own; the others by the recipe's formula, worked out by hand.
    [(512, 0.15, 3.0, 568, 114), (114, 0.15, 3.0, 126, 26), (64, 0.5, 3.0, 95, 65), (24, 0.15, 3.0, 26, 6)],
)
def test_lengths_of_the_recipe(inputs, density, span, room, targets):
    made = SpanCorruption(MARKS, inputs, 1, density, span)
    assert made.room == room
    (fits, above), (asked, _) = made.lengths(np.array([room, room + 1]))
    assert fits <= inputs < above and asked == targets


@pytest.mark.parametrize("size", [2, 3, 7, 26, 100, 568])
def test_nothing_is_lost(size):
    made = SpanCorruption(MARKS, 512, 1)
    for seed in range(20):
        ids = np.random.default_rng([9, seed]).integers(2, 800, size)
        inputs, targets = made.apply(ids, np.random.default_rng([seed]))
        assert put_back(inputs, targets) == ids.tolist()
        assert (len(inputs), len(targets)) == tuple(int(n[0]) for n in made.lengths(np.array([size])))
        marks = [token for token in inputs.tolist() if token in MARKS]
        assert marks == [token for token in targets.tolist() if token in MARKS] == MARKS[: len(marks)].tolist()
        assert inputs[-1] == targets[-1] == 1


def test_noise_and_spans():
    made = SpanCorruption(MARKS, 512, None)
    hidden, spans = np.zeros(568), []
    for seed in range(400):
        _, targets = made.apply(np.arange(2, 570), np.random.default_rng([seed]))
        noise = targets[targets < 800]
        assert len(noise) == round(568 * 0.15)
        hidden[noise - 2] += 1
        spans.append(len(targets) - len(noise))
    assert set(spans) == {28}
    inner = hidden[50:-50] / 400
    assert inner.mean() == pytest.approx(0.15, abs=0.01) and inner.max() < 0.25 and inner.min() > 0.06


def test_a_sequence_of_noise_has_as_many_spans_as_kept_tokens():
    made = SpanCorruption(MARKS, 64, 1, density=0.9, span=1.0)
    assert [n.tolist() for n in made.counts(np.array([2, 10, 30]))] == [[1, 9, 27], [1, 1, 3]]
    inputs, targets = made.apply(np.arange(2, 32), np.random.default_rng(0))
    assert put_back(inputs, targets) == list(range(2, 32)) and (len(inputs), len(targets)) == (3 + 3 + 1, 27 + 3 + 1)


def test_a_single_token_has_no_corrupted_form():
    assert [n.tolist() for n in SpanCorruption(MARKS, 64, 1).lengths(np.array([0, 1, 2]))] == [[0, 0, 3], [0, 0, 3]]


def test_sentinels():
    tokenizer = make_t5_tokenizer()
    found = sentinels_of(tokenizer)
    assert tokenizer.convert_ids_to_tokens(found) == [f"<extra_id_{i}>" for i in range(20)]
    with pytest.raises(ValueError, match="tokenizer: it has no sentinels"):
        sentinels_of(make_decoder_tokenizer())
    with pytest.raises(ValueError, match="rows of 512 tokens have 28 spans, but the tokenizer has 20 senti"):
        SpanCorruption(found, 512, 1)
    for wrong, message in (
        ({"density": 0.0}, "noise_density"),
        ({"density": 1.0}, "noise_density: got 1.0"),
        ({"span": 0.5}, "mean_span: got 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            SpanCorruption(found, 64, 1, **wrong)
    with pytest.raises(ValueError, match="max_length: got 2, too few"):
        SpanCorruption(found, 2, 1)

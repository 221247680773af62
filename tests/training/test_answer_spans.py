"""The best answers, against a search of everything written out."""

import itertools

import numpy as np
import pytest
import torch

from modelcenter.training.tasks.answer_spans import WindowSpans, best_answer, best_spans
from modelcenter.training.tasks.windows import rank_window_batches


def test_the_best_spans_of_a_window():
    draw = torch.Generator().manual_seed(0)
    for n, longest in itertools.product((1, 2, 7), (1, 3, 30)):
        start, end = torch.randn(2, n + 5, generator=draw, dtype=torch.float64).float()
        chars = np.stack([np.arange(n) * 4, np.arange(n) * 4 + 3], 1)
        chars[n // 2] = 0 if n == 7 else chars[n // 2]  # a token that stands for no character
        found = best_spans(start, end, chars, 3, 5, longest)
        every = sorted(
            (
                (float(start[3 + i] + end[3 + j]), int(chars[i, 0]), int(chars[j, 1]))
                for i in range(n)
                for j in range(i, min(i + longest, n))
            ),
            reverse=True,
        )[:5]
        every = [span for span in every if span[2] > span[1]]
        assert [span[1:] for span in found.spans] == [span[1:] for span in every]
        assert [span[0] for span in found.spans] == pytest.approx([span[0] for span in every], abs=1e-6)
        assert found.null == pytest.approx(float(start[0] + end[0]))


WINDOWS = [WindowSpans([(2.0, 4, 8), (1.0, 0, 3)], 0.5), WindowSpans([(3.0, 0, 3), (2.5, 3, 8)], 2.75)]


def test_the_best_answer_of_several_windows():
    found = best_answer("the  red car", WINDOWS, 20, None)
    # (0, 3) by the second window; (4, 8) and (3, 8) are " red" both, the better of them counts.
    chances = np.exp([3.0, 2.5]) / np.exp([3.0, 2.5]).sum()
    assert (found.text, found.start, found.end) == ("the", 0, 3) and found.score == pytest.approx(chances[0])
    assert found.null == 0.5 - 3.0  # the lowest of the windows: one of them does see an answer
    assert best_answer("the  red car", WINDOWS, 1, None).score == 1.0
    assert best_answer("the  red car", WINDOWS[::-1], 20, None) == found


def test_of_answers_with_equal_scores_the_first_is_given():
    """And of those that begin together the shortest, in whatever order windows have them."""
    for spans, text in (([(4, 7), (0, 7), (0, 3)], "the"), ([(4, 7), (0, 7)], "the red")):
        for order in itertools.permutations(spans):
            windows = [WindowSpans([(1.0, *span)], 0.0) for span in order]
            assert best_answer("the red car", windows, 20, None).text == text


@pytest.mark.parametrize(("threshold", "text"), [(-2.4, "the"), (-2.6, ""), (0.0, "the")])
def test_no_answer(threshold, text):
    found = best_answer("the  red car", WINDOWS, 20, threshold)
    chances = np.exp([3.0, 2.5, 0.5]) / np.exp([3.0, 2.5, 0.5]).sum()
    assert found.text == text and found.best_text == "the"
    assert (found.start, found.end) == ((0, 3) if text else (-1, -1))
    assert found.score == pytest.approx(chances[0] if text else chances[-1])


def test_nothing_to_answer_with():
    found = best_answer("   ", [WindowSpans([(1.0, 0, 2)], 0.0)], 20, None)
    assert (found.text, found.score, found.start) == ("", 1.0, -1)


def test_windows_of_a_row_come_one_after_another():
    owner = np.array([0, 0, 0, 2, 3, 3, 5])
    batches = rank_window_batches(owner, np.array([9, 9, 2, 30, 5, 1, 4]), 2)
    flat = np.concatenate(batches).tolist()
    assert max(map(len, batches)) == 2 and sorted(flat) == list(range(7))
    assert flat == [3, 0, 1, 2, 4, 5, 6]  # the longest row first, its windows in order
    assert rank_window_batches(owner[:0], owner[:0], 2) == []

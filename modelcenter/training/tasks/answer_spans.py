"""Answers from start and end logits: the best spans of a window, and the best answer over all windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Span = tuple[float, int, int]  # score, first character, character after the last


@dataclass(frozen=True)
class WindowSpans:
    """The best spans of a window of a context, best first, and the score of "no answer here"."""

    spans: list[Span]
    null: float


def best_spans(start: Tensor, end: Tensor, chars: np.ndarray, first: int, n_best: int, longest: int) -> WindowSpans:
    """The spans of a window with the highest sums of start and end scores.

    Args:
        start, end: (tokens,) scores of a window's tokens, including special ones. chars: int (n, 2), the characters of
            the context's tokens. first: index of the first of these in the window. longest: maximum tokens of a span.
    """
    null = float(start[0] + end[0])
    a, b = (scores[first : first + len(chars)].float().cpu() for scores in (start, end))
    longest = min(longest, len(chars))
    lowest = float("-inf")
    # sums[i, j]: the score of the span from token i to token i + j.
    end_scores = torch.nn.functional.pad(b, (0, longest - 1), value=lowest).unfold(0, longest, 1)
    sums = (a[:, None] + end_scores).flatten()
    values, places = sums.topk(min(n_best, len(sums)))
    spans: list[Span] = []
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        i, j = divmod(place, longest)
        if value > lowest and chars[i + j, 1] > chars[i, 0]:
            spans.append((value, int(chars[i, 0]), int(chars[i + j, 1])))
    return WindowSpans(spans, null)


@dataclass(frozen=True)
class Answer:
    """text: "" for no answer. score: its probability among the n best. start, end: characters of the context, -1 for
    no answer. null: the score of "no answer" minus that of the best text."""

    text: str
    score: float
    start: int
    end: int
    null: float
    best_text: str  # the best text, whatever the score of "no answer"


def best_answer(context: str, windows: Sequence[WindowSpans], n_best: int, null_threshold: float | None) -> Answer:
    """The answer to a question from all windows of its context, chosen as in SQuAD's scripts.

    Args:
        null_threshold: "no answer" is returned if its score exceeds that of the best text by more than this; None:
            never. Its score is the lowest of all windows, because it is high in each window without the answer.
    """
    best: dict[tuple[int, int], float] = {}
    for window in windows:
        for score, start, end in window.spans:
            start, end = _trimmed(context, start, end)
            if start < end and score > best.get((start, end), float("-inf")):
                best[start, end] = score
    ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    null = min((window.null for window in windows), default=0.0)
    if not ranked:
        return Answer("", 1.0, -1, -1, 0.0, "")
    scores = [score for _, score in ranked] + ([null] if null_threshold is not None else [])
    probabilities = np.exp(np.array(scores) - max(scores))
    probabilities /= probabilities.sum()
    (start, end), top = ranked[0]
    text, difference = context[start:end], null - top
    if null_threshold is not None and difference > null_threshold:
        return Answer("", float(probabilities[-1]), -1, -1, difference, text)
    return Answer(text, float(probabilities[0]), start, end, difference, text)


def _trimmed(context: str, start: int, end: int) -> tuple[int, int]:
    """The span without spaces at its ends, which some tokenizers include in tokens."""
    text = context[start:end]
    return start + len(text) - len(text.lstrip()), start + len(text.rstrip())

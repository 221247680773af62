"""Metrics of extractive question answering: exact match and F1, as in the scripts of SQuAD and CMRC 2018.

SQuAD (Rajpurkar et al. 2016, 2018): texts in lower case without punctuation and articles; F1 of the common words. CMRC
2018 (Cui et al. 2019): Chinese characters and words of other scripts, without punctuation; F1 of the longest common
run. With several true answers, the best match counts. An empty text means "no answer".
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import torch

from modelcenter.training.metrics.base import f1_score, ratio
from modelcenter.training.metrics.reduce import gather_rows, sums

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
STYLES = ("squad", "cmrc")


def squad_words(text: str) -> list[str]:
    """The words that SQuAD compares."""
    return _ARTICLES.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split()


def cmrc_units(text: str) -> list[str]:
    """The units that CMRC compares: Chinese characters, and words of other scripts."""
    spaced = "".join(
        " " if _is_punctuation(c) else f" {c} " if is_han(c) else c for c in unicodedata.normalize("NFC", text.lower())
    )
    return spaced.split()


def is_han(character: str) -> bool:
    """Whether a character counts as a unit, as Chinese ones do."""
    code = ord(character)
    return (
        0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x323AF or 0xF900 <= code <= 0xFAFF
    )


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def _squad_f1(predicted: list[str], actual: list[str]) -> float:
    if not predicted or not actual:
        return float(predicted == actual)
    return f1_score((Counter(predicted) & Counter(actual)).total(), len(predicted), len(actual))


def _cmrc_f1(predicted: list[str], actual: list[str]) -> float:
    if not predicted or not actual:
        return float(predicted == actual)
    return f1_score(_longest_common_run(predicted, actual), len(predicted), len(actual))


def _longest_common_run(one: list[str], other: list[str]) -> int:
    """Its length."""
    longest, row = 0, [0] * (len(other) + 1)
    for unit in one:
        above = 0
        for j, candidate in enumerate(other, 1):
            above, row[j] = row[j], above + 1 if unit == candidate else 0
            longest = max(longest, row[j])
    return longest


class ExtractiveAnswers:
    """exact_match and f1. If some questions have no answer, also for both kinds separately (has_answer_*, no_answer_*)
    and, given scores for "no answer", best_exact_match, best_f1 and the thresholds at which they are reached.

    Keeps five numbers per question.

    Args:
        style: "squad" or "cmrc".
    """

    main = "f1"

    def __init__(self, style: str = "squad"):
        if style not in STYLES:
            raise ValueError(f"style: got {style!r}, expected {' or '.join(STYLES)}")
        self.units, self.score = (squad_words, _squad_f1) if style == "squad" else (cmrc_units, _cmrc_f1)
        self.rows: list[tuple[float, float, float, float, float]] = []
        self.scored: bool | None = None

    def update(
        self,
        predictions: Sequence[str],
        answers: Sequence[Sequence[str]],
        no_answer_scores: Sequence[float] | None = None,
    ) -> None:
        """
        Args:
            predictions: a text per question; "": no answer.
            answers: the true answers of each question; an empty list: there is none.
            no_answer_scores: the higher, the less likely an answer. If given, predictions are the best texts, and ""
                only if there is none.

        Raises:
            ValueError: the lists differ in length; only some updates have scores.
        """
        scores = [0.0] * len(predictions) if no_answer_scores is None else list(no_answer_scores)
        if not len(predictions) == len(answers) == len(scores):
            raise ValueError(
                f"predictions, answers: got {len(predictions)}, {len(answers)} and {len(scores)} scores; expected one "
                "each for every question"
            )
        given = no_answer_scores is not None
        if self.scored not in (None, given):
            raise ValueError("no_answer_scores: pass them in every update, or in none")
        self.scored = given
        for prediction, true, score in zip(predictions, answers, scores, strict=True):
            units = self.units(prediction)
            real = [answer for answer in map(self.units, true) if answer]
            choices = real or [[]]
            exact = float(any(units == choice for choice in choices))
            f1 = max(self.score(units, choice) for choice in choices)
            has_answer = any(answer.strip() for answer in true)  # "A" is an answer, though it has no word to compare
            self.rows.append((exact, f1, score, float(has_answer), float(bool(prediction))))

    def result(self) -> dict[str, float | None]:
        own = torch.tensor(self.rows, dtype=torch.float64).view(-1, 5)
        rows, scored = gather_rows(own), any(sums([self.scored is True]))  # unknown on ranks without rows
        exact, f1, score, answered, text = rows.unbind(1)
        has = answered.bool()
        scores: dict[str, float | None] = {"exact_match": _mean(exact), "f1": _mean(f1)}
        if len(rows) and not bool(has.all()):
            scores["has_answer_exact_match"], scores["has_answer_f1"] = _mean(exact[has]), _mean(f1[has])
            scores["no_answer_exact_match"], scores["no_answer_f1"] = _mean(exact[~has]), _mean(f1[~has])
        if len(rows) and scored:
            for name, value in (("exact_match", exact), ("f1", f1)):
                scores[f"best_{name}"], scores[f"best_{name}_threshold"] = _best(value, score, has, text.bool())
        return scores


def _mean(values: torch.Tensor) -> float:
    return ratio(values.sum().item(), len(values))


def _best(value: torch.Tensor, score: torch.Tensor, has: torch.Tensor, text: torch.Tensor) -> tuple[float, float]:
    """(best mean, threshold): "no answer" is predicted for questions whose score is above the threshold."""
    order = torch.argsort(score, stable=True)
    # Answering one more question adds its value, or loses a correct "no answer".
    change = torch.where(has, value, -text.to(value.dtype))[order]
    total = (~has).sum() + change.cumsum(0)
    # A threshold includes all questions with an equal score.
    sorted_score = score[order]
    last = torch.ones(len(order), dtype=torch.bool)
    last[:-1] = sorted_score[1:] != sorted_score[:-1]
    none, best = float((~has).sum()), total[last].max().item()
    if none >= best:
        return ratio(none, len(order)), float(sorted_score[0]) - 1.0
    at = int((total == best).logical_and(last).nonzero()[0])
    return best / len(order), float(sorted_score[at])

"""Metrics of generated texts: ROUGE, BLEU and chrF against references, and accuracy if the texts are label words.

ROUGE (Lin 2004) is computed here as by the package rouge-score without stemming. BLEU and chrF are sacrebleu's.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from modelcenter.training.config.seq2seq import GENERATION_METRICS, LANGUAGES, check_metrics
from modelcenter.training.metrics.base import f1_of_classes, f1_score, ratio
from modelcenter.training.metrics.qa import ExtractiveAnswers, is_han
from modelcenter.training.metrics.reduce import gather_lists, sums

_WORDS = re.compile(r"[a-z0-9]+")


def rouge_tokens(text: str, language: str = "other") -> list[str]:
    """Words of letters a to z and digits, in lower case. "zh": also Chinese characters, each as a word."""
    text = text.lower()
    if language == "zh":
        text = "".join(f" {c} " if is_han(c) else c for c in text)
        return [word for part in text.split() for word in ([part] if is_han(part[0]) else _WORDS.findall(part))]
    return _WORDS.findall(text)


def _n_grams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def _longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Its length."""
    row = [0] * (len(other) + 1)
    for token in one:
        above = 0
        for j, candidate in enumerate(other, 1):
            above, row[j] = row[j], above + 1 if token == candidate else max(row[j], row[j - 1])
    return row[-1]


def rouge(prediction: str, references: Sequence[str], language: str = "other") -> tuple[float, float, float]:
    """F1 of words, word pairs and the longest common subsequence, each with the best reference."""
    tokens = rouge_tokens(prediction, language)
    best = [0.0, 0.0, 0.0]
    for reference in references:
        truth = rouge_tokens(reference, language)
        for i, n in enumerate((1, 2)):
            a, b = _n_grams(tokens, n), _n_grams(truth, n)
            best[i] = max(best[i], f1_score((a & b).total(), a.total(), b.total()))
        best[2] = max(best[2], f1_score(_longest_common_subsequence(tokens, truth), len(tokens), len(truth)))
    return best[0], best[1], best[2]


def import_sacrebleu() -> Any:
    """The package sacrebleu.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import sacrebleu
    except ImportError as error:
        raise ValueError(
            f"BLEU and chrF need the package sacrebleu ({error}): pip install 'modelcenter[metrics]'"
        ) from error
    return sacrebleu


class Generation:
    """rouge1, rouge2 and rougeL (means over the texts), bleu and chrf (of all texts together, 0 to 100); accuracy, f1
    and exact_match for texts that are label words.

    BLEU and ROUGE keep sums; chrF and accuracy keep the texts, which the ranks exchange at the end. f1 is as in
    classification: with two words that of the last in sorted order, with more the mean; a text that is no reference is
    wrong. exact_match, if rows have groups: the share of groups with all texts right.

    Args:
        metrics: some of "rouge", "bleu", "chrf", "accuracy" and "squad"; runs are compared by the first.
        language: "zh": Chinese characters are words.

    Raises:
        ValueError: a metric or the language is unknown; accuracy is combined with squad; sacrebleu is not installed.
    """

    def __init__(self, metrics: Sequence[str] = GENERATION_METRICS[:3], language: str = "other"):
        check_metrics(metrics)
        if language not in LANGUAGES:
            raise ValueError(f"language: got {language!r}, expected {' or '.join(LANGUAGES)}")
        self.metrics, self.language = tuple(metrics), language
        self.main = {"rouge": "rougeL", "squad": "f1"}.get(metrics[0], metrics[0])
        self.rouge = torch.zeros(4, dtype=torch.float64)  # number of texts, and sums of three scores
        self.counts = [0] * 10  # lengths of texts and references, matches and n-grams of 1 to 4 words
        self.texts: list[tuple[str, list[str]]] = []
        self.words: list[tuple[str, str, Any]] = []  # text, reference, group
        self._answers = ExtractiveAnswers("cmrc" if language == "zh" else "squad") if "squad" in metrics else None
        tokens = "zh" if language == "zh" else "13a"
        self._bleu = import_sacrebleu().BLEU(tokenize=tokens) if "bleu" in metrics else None
        self._chrf = import_sacrebleu().CHRF() if "chrf" in metrics else None

    def update(
        self,
        predictions: Sequence[str],
        references: Sequence[str | Sequence[str]],
        groups: Sequence[Any] | None = None,
    ) -> None:
        """
        Args:
            predictions: a text per row. references: one or several texts per row; accuracy uses the first.
            groups: the group of each row, whose rows are judged together.

        Raises:
            ValueError: the lists differ in length, or a row has no reference.
        """
        if len(predictions) != len(references):
            raise ValueError(
                f"predictions, references: got {len(predictions)} and {len(references)}, expected equal numbers"
            )
        truths = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
        if empty := [i for i, truth in enumerate(truths) if not truth]:
            raise ValueError(f"references: row {empty[0]} of the batch has none, expected at least one text")
        if not truths:
            return
        if "rouge" in self.metrics:
            for prediction, truth in zip(predictions, truths, strict=True):
                self.rouge += torch.tensor([1.0, *rouge(prediction, truth, self.language)], dtype=torch.float64)
        if self._bleu is not None:
            bleu = self._bleu.corpus_score(list(predictions), _reference_streams(truths))
            numbers = [bleu.sys_len, bleu.ref_len, *bleu.counts, *bleu.totals]
            self.counts = [a + int(b) for a, b in zip(self.counts, numbers, strict=True)]
        if self._chrf is not None:
            self.texts += zip(predictions, truths, strict=True)
        if self._answers is not None:
            self._answers.update(predictions, truths)
        if "accuracy" in self.metrics:
            firsts = [truth[0] for truth in truths]
            self.words += zip(predictions, firsts, groups or [None] * len(firsts), strict=True)

    def result(self) -> dict[str, float | None]:
        scores: dict[str, float | None] = {}
        if "rouge" in self.metrics:
            rows, *totals = sums(self.rouge.tolist(), torch.float64)
            scores |= {f"rouge{n}": ratio(total, rows) for n, total in zip("12L", totals, strict=True)}
        if self._bleu is not None:
            text_length, reference_length, *n_grams = sums(self.counts)
            # Smoothed as in corpus_score, so that texts without a matching 4-gram still differ.
            how = {name: getattr(self._bleu, name) for name in ("smooth_method", "smooth_value", "effective_order")}
            bleu = self._bleu.compute_bleu(
                correct=n_grams[:4], total=n_grams[4:], sys_len=text_length, ref_len=reference_length, **how
            )
            scores["bleu"] = bleu.score
        if self._chrf is not None:
            pairs = gather_lists(self.texts)
            texts, truths = [text for text, _ in pairs], [truth for _, truth in pairs]
            scores["chrf"] = self._chrf.corpus_score(texts, _reference_streams(truths)).score if pairs else 0.0
        if self._answers is not None:
            scores |= self._answers.result()
        if "accuracy" in self.metrics:
            scores |= _label_scores(gather_lists(self.words))
        return scores


def _label_scores(rows: Sequence[tuple[str, str, Any]]) -> dict[str, float | None]:
    """accuracy, f1 and exact_match of (text, reference, group)."""
    classes = sorted({truth for _, truth, _ in rows})
    predicted, actual = Counter(text for text, _, _ in rows), Counter(truth for _, truth, _ in rows)
    hits = Counter(truth for text, truth, _ in rows if text == truth)
    scores: dict[str, float | None] = {
        "accuracy": ratio(hits.total(), len(rows)),
        "f1": f1_of_classes(*([counts[word] for word in classes] for counts in (hits, predicted, actual))),
    }
    wrong = {group for text, truth, group in rows if text != truth}
    groups = {group for _, _, group in rows}
    if not groups or None in groups:
        return scores
    return {**scores, "exact_match": ratio(len(groups - wrong), len(groups))}


def _reference_streams(truths: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """References in sacrebleu's form: the first of all rows, the second of all rows, ..."""
    most = max(len(truth) for truth in truths)
    return [[truth[i] if i < len(truth) else None for truth in truths] for i in range(most)]

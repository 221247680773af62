"""Changes to the scores of the next token, in transformers' order: penalties, then the truncation before sampling."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelcenter.generation.prompts import Texts
from modelcenter.generation.settings import Settings


def penalised(scores: Tensor, texts: Texts, s: Settings) -> Tensor:
    """Scores (n, vocab_size) of the tokens after `texts`, after repetition_penalty, no_repeat_ngram_size and
    min_new_tokens."""
    if s.tokens.eos:
        young = [count < s.min_new_tokens for count in texts.counts]
        scores = _where(young, lambda: _without(scores, s.tokens.eos), scores)
    n = s.no_repeat_ngram_size
    if s.repetition_penalty == 1.0 and not n:
        return scores
    tokens, ends = texts.tokens[:, : texts.used], texts.ends()[:, None]
    if s.repetition_penalty != 1.0:
        # Fill the empty positions with a token that has occurred anyway: the last one.
        came = torch.where(tokens < 0, tokens.gather(1, ends - 1), tokens)
        seen = scores.gather(1, came)
        seen = torch.where(seen < 0, seen * s.repetition_penalty, seen / s.repetition_penalty)
        scores = scores.scatter(1, came, seen)
    if n and tokens.shape[1] >= n:
        padded = torch.nn.functional.pad(tokens, (n - 1, 0), value=-1)
        newest = padded.gather(1, ends + torch.arange(n - 1, device=ends.device))
        grams = tokens.unfold(1, n, 1)
        again = (grams[:, :, :-1] == newest[:, None]).all(-1) & (grams[:, :, -1] >= 0)
        row, place = again.nonzero(as_tuple=True)
        scores = scores.index_put((row, grams[row, place, -1]), scores.new_tensor(-torch.inf))
    return scores


def next_scores(scores: Tensor, texts: Texts, s: Settings, limits: Sequence[int]) -> Tensor:
    """`penalised`, without banned tokens, and only forced tokens where a text must begin or end with one.

    limits: the maximum of new tokens of each text.
    """
    scores = penalised(scores, texts, s)
    if s.tokens.banned:
        scores = _without(scores, s.tokens.banned)
    if (first := s.tokens.first) is not None:
        single = [a + b == 1 for a, b in zip(texts.lengths, texts.counts, strict=True)]
        scores = _where(single, lambda: _forced(scores, (first,)), scores)
    if s.tokens.last:
        last = [count == limit - 1 for count, limit in zip(texts.counts, limits, strict=True)]
        scores = _where(last, lambda: _forced(scores, s.tokens.last), scores)
    return scores


def _without(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Scores of which those of the tokens are -inf."""
    return scores.index_fill(1, torch.tensor(tokens, device=scores.device), -torch.inf)


def _forced(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Scores that leave only the tokens."""
    return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor(tokens, device=scores.device), 0.0)


def _where(rows: Sequence[bool], changed: Callable[[], Tensor], scores: Tensor) -> Tensor:
    """(n, vocab_size) `changed()` in the rows where `rows` (n,) is True, `scores` in the others."""
    if not any(rows):
        return scores
    if all(rows):
        return changed()
    return torch.where(torch.tensor(rows, device=scores.device)[:, None], changed(), scores)


def narrowed(scores: Tensor, s: Settings, keep: int = 1) -> Tensor:
    """Scores after temperature, top_k and top_p, which leave at least `keep` tokens."""
    if s.temperature != 1.0:
        scores = scores / s.temperature
    if s.top_k:
        k = min(max(s.top_k, keep), scores.shape[1])
        scores = scores.masked_fill(scores < scores.topk(k).values[:, -1:], -torch.inf)
    if s.top_p < 1.0:
        ordered, index = scores.sort(dim=1)
        cut = ordered.softmax(-1).cumsum(-1) <= 1 - s.top_p
        cut[:, -keep:] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(1, index, cut), -torch.inf)
    return scores

"""Changes to the scores of the next token, in transformers' order: penalties and bans, then the truncation before
sampling. And the check that a token can be chosen by them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from modelcenter.generation.prompts import Texts
from modelcenter.generation.settings import Settings

_TOP_H_TOKENS = 100  # top_h looks at no more tokens, as in transformers


# Copied to a GPU once, not at each token: a copy waits for the device.
@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...] | tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)


def penalised(scores: Tensor, texts: Texts, s: Settings) -> Tensor:
    """Scores (n, vocab_size) of the tokens after `texts`, after repetition_penalty, no_repeat_ngram_size and
    min_new_tokens."""
    if s.tokens.eos:
        young = [count < s.min_new_tokens for count in texts.counts]
        scores = _where(young, lambda: _without_tokens(scores, s.tokens.eos), scores)
    n = s.no_repeat_ngram_size
    if s.repetition_penalty == 1.0 and not n:
        return scores
    tokens = texts.tokens[:, : texts.used]
    if s.repetition_penalty != 1.0:
        # Fill the empty positions with a token that has occurred anyway: the last one.
        came = torch.where(tokens < 0, texts.newest(1), tokens)
        seen = scores.gather(1, came)
        seen = torch.where(seen < 0, seen * s.repetition_penalty, seen / s.repetition_penalty)
        scores = scores.scatter(1, came, seen)
    if n and tokens.shape[1] >= n:
        grams = tokens.unfold(1, n, 1)
        again = (grams[:, :, :-1] == texts.newest(n - 1)[:, None]).all(-1) & (grams[:, :, -1] >= 0)
        row, place = again.nonzero(as_tuple=True)
        scores = scores.index_put((row, grams[row, place, -1]), scores.new_tensor(-torch.inf))
    return scores


def _where(rows: Sequence[bool], changed: Callable[[], Tensor], scores: Tensor) -> Tensor:
    """(n, vocab_size) `changed()` in the rows where `rows` (n,) is True, `scores` in the others."""
    if not any(rows):
        return scores
    if all(rows):
        return changed()
    return torch.where(torch.tensor(rows, device=scores.device)[:, None], changed(), scores)


def _without_tokens(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    return scores.index_fill(1, _on_device(tokens, scores.device), -torch.inf)


def _only_tokens(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    return torch.full_like(scores, -torch.inf).index_fill_(1, _on_device(tokens, scores.device), 0.0)


@functools.lru_cache(maxsize=16)
def _by_length(words: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """(all but the last tokens, the last token) of the words of each length, so that one comparison finds them."""
    lengths = sorted({len(word) for word in words})
    groups = [[word for word in words if len(word) == length] for length in lengths]
    return [(tuple(word[:-1] for word in group), tuple(word[-1] for word in group)) for group in groups]


def _without_bad_words(scores: Tensor, texts: Texts, words: tuple[tuple[int, ...], ...]) -> Tensor:
    """Scores without the tokens that would complete one of the words."""
    for starts, ends in _by_length(words):
        length = len(starts[0])
        if not length:
            scores = _without_tokens(scores, ends)
        elif length <= texts.used:
            written = (texts.newest(length)[:, None] == _on_device(starts, scores.device)).all(-1)
            added = torch.where(written, -torch.inf, 0.0).to(scores.dtype)
            scores = scores.index_add(1, _on_device(ends, scores.device), added)
    return scores


def next_scores(scores: Tensor, texts: Texts, s: Settings, limits: Sequence[int]) -> Tensor:
    """`penalised`, without bad words, only forced tokens where a text must begin or end with one, and without
    suppressed tokens. limits: the maximum of new tokens of each text."""
    scores = penalised(scores, texts, s)
    if s.tokens.bad_words:
        scores = _without_bad_words(scores, texts, s.tokens.bad_words)
    # A forced first token follows a single one.
    begins = [s.tokens.first is not None and length == 1 for length in texts.lengths]
    if (first := s.tokens.first) is not None:
        single = [begun and not count for begun, count in zip(begins, texts.counts, strict=True)]
        scores = _where(single, lambda: _only_tokens(scores, (first,)), scores)
    if s.tokens.last:
        last = [count == limit - 1 for count, limit in zip(texts.counts, limits, strict=True)]
        scores = _where(last, lambda: _only_tokens(scores, s.tokens.last), scores)
    if s.tokens.suppressed:
        scores = _without_tokens(scores, s.tokens.suppressed)
    if s.tokens.suppressed_first:  # that is chosen
        chosen = [count == begun for count, begun in zip(texts.counts, begins, strict=True)]
        scores = _where(chosen, lambda: _without_tokens(scores, s.tokens.suppressed_first), scores)
    return _renormalised(scores, s) if not s.do_sample else scores  # else it follows the truncation


def _renormalised(scores: Tensor, s: Settings) -> Tensor:
    return scores.log_softmax(-1) if s.renormalize_logits else scores


def narrowed(scores: Tensor, s: Settings, keep: int = 1) -> Tensor:
    """Scores after temperature and the truncation before sampling, in transformers' order. All but top_h leave at least
    `keep` tokens."""
    if s.temperature != 1.0:
        scores = scores / s.temperature
    if s.top_h is not None:
        scores = _without(scores, _beyond_top_h(scores, s.top_h))
    if s.top_k:
        scores = _without(scores, _below_best(scores, max(s.top_k, keep)))
    if s.top_p < 1.0:
        scores = _without(scores, _beyond_top_p(scores, s.top_p, keep))
    if s.min_p > 0.0:
        scores = _without(scores, _below_min_p(scores, s.min_p, keep))
    if s.typical_p < 1.0:
        scores = _without(scores, _untypical(scores, s.typical_p, keep))
    if s.epsilon_cutoff > 0.0:
        scores = _without(scores, (scores.softmax(-1) < s.epsilon_cutoff) & _below_best(scores, keep))
    if s.eta_cutoff > 0.0:
        scores = _without(scores, _below_eta(scores, s.eta_cutoff) & _below_best(scores, keep))
    return _renormalised(scores, s)


# Each of these returns (rows, vocab_size), True at the tokens to drop.


def _without(scores: Tensor, dropped: Tensor) -> Tensor:
    return scores.masked_fill(dropped, -torch.inf)


def _below_best(scores: Tensor, count: int) -> Tensor:
    """Below the best `count` tokens."""
    return scores < scores.topk(min(count, scores.shape[1])).values[:, -1:]


def _entropy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(entropy (rows, 1), probabilities), rounded as in torch.distributions.Categorical, which transformers uses."""
    logits = scores - scores.logsumexp(-1, keepdim=True)
    probs = logits.softmax(-1)
    return -(logits.clamp(min=torch.finfo(logits.dtype).min) * probs).sum(-1, keepdim=True), probs


def _beyond_top_h(scores: Tensor, share: float) -> Tensor:
    """Top-H sampling, arXiv:2509.02510, as transformers' TopHLogitsWarper."""
    best, index = scores.topk(min(_TOP_H_TOKENS, scores.shape[1]))
    entropy, probs = _entropy(best)
    kept = (-probs * probs.log()).cumsum(-1) <= entropy * share
    kept[:, 0] = True
    return torch.ones_like(scores, dtype=torch.bool).scatter(1, index, ~kept)


def _beyond_top_p(scores: Tensor, mass: float, keep: int) -> Tensor:
    """Nucleus sampling, arXiv:1904.09751."""
    ordered, index = scores.sort(dim=1)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - mass
    dropped[:, -keep:] = False
    return torch.zeros_like(dropped).scatter(1, index, dropped)


def _below_min_p(scores: Tensor, share: float, keep: int) -> Tensor:
    """Min-p sampling, arXiv:2407.01082."""
    probs = scores.softmax(-1)
    dropped = probs < share * probs.amax(-1, keepdim=True)
    return dropped.scatter(1, probs.topk(min(keep, scores.shape[1])).indices, False)


def _untypical(scores: Tensor, mass: float, keep: int) -> Tensor:
    """Locally typical sampling, arXiv:2202.00666."""
    log_probs = scores.log_softmax(-1)
    entropy = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)
    ordered, index = (-log_probs - entropy).abs().sort(dim=-1)
    total = scores.gather(-1, index).softmax(-1).cumsum(-1)
    last = (total < mass).sum(1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    dropped = ordered > ordered.gather(1, last)
    dropped[:, :keep] = False
    return torch.zeros_like(dropped).scatter(1, index, dropped)


def _below_eta(scores: Tensor, cutoff: float) -> Tensor:
    """Eta sampling, arXiv:2210.15191."""
    entropy, _ = _entropy(scores)
    epsilon = torch.full((), cutoff, device=scores.device)
    return scores.softmax(-1) < torch.min(epsilon, epsilon.sqrt() * torch.exp(-entropy))


def drawn(scores: Tensor, count: int, rng: torch.Generator | None) -> Tensor:
    """(rows, count) different tokens of each row, with probabilities that follow the scores.

    As torch.multinomial, which would look for values that are not finite with a wait for the device, or with an
    assertion there after which a process can compute nothing more; best_so_far finds them.
    """
    probs = scores.softmax(-1)
    waits = torch.empty_like(probs).exponential_(generator=rng)  # the exponential races of torch.multinomial
    return (probs / waits).topk(count).indices if count > 1 else (probs / waits).argmax(-1, keepdim=True)


def best_so_far(values: Tensor, best: Tensor, ended: Tensor) -> Tensor:
    """The best scores of tokens, kept on the device until the search waits for it anyway, to find texts without a token
    to choose: finite, or the first one that was not.

    values: those before; best: of the present token; ended: True where the text ended before it; all of one shape.
    """
    return torch.where(values.isfinite() & ~ended, best, values)


def refuse(row: int, best: float) -> NoReturn:
    """Raise ValueError: in `row`, a token had the best score `best`, which is not finite."""
    if best == -math.inf:
        raise ValueError(
            f"generate: row {row} has no token left to choose from; allow more (banned, bad_words_ids, "
            "suppress_tokens, no_repeat_ngram_size, min_new_tokens)"
        )
    raise ValueError(
        f"generate: the model's scores for row {row} are NaN or infinite, so no token can be chosen; look for "
        "such values in its weights, compute in bfloat16 or float32 instead of float16, or raise the temperature "
        "if it is near 0"
    )

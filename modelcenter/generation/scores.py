"""Changes to the scores of the next token, in transformers' order: penalties, then the truncation before sampling."""

import torch
from torch import Tensor

from modelcenter.generation.settings import Settings


def penalised(scores: Tensor, prompts: Tensor, new: Tensor, s: Settings) -> Tensor:
    """Scores (rows, vocab_size) after repetition_penalty, no_repeat_ngram_size and min_new_tokens.

    prompts: (rows, longest), right-aligned, -1 before each; new: (rows, n), the tokens after them.
    """
    if new.shape[1] < s.min_new_tokens:
        ends = torch.tensor(s.tokens.eos, dtype=torch.long, device=scores.device)
        scores = scores.index_fill(1, ends, -torch.inf)
    n = s.no_repeat_ngram_size
    if s.repetition_penalty == 1.0 and not n:
        return scores
    tokens = torch.cat((prompts, new), 1)
    if s.repetition_penalty != 1.0:
        # Fill the empty positions with a token that has occurred anyway: the last one.
        came = torch.where(tokens < 0, tokens[:, -1:], tokens)
        seen = scores.gather(1, came)
        seen = torch.where(seen < 0, seen * s.repetition_penalty, seen / s.repetition_penalty)
        scores = scores.scatter(1, came, seen)
    if n and tokens.shape[1] >= n:
        grams = tokens.unfold(1, n, 1)
        again = (grams[:, :, :-1] == tokens[:, None, tokens.shape[1] - n + 1 :]).all(-1) & (grams[:, :, -1] >= 0)
        row, place = again.nonzero(as_tuple=True)
        scores = scores.index_put((row, grams[row, place, -1]), scores.new_tensor(-torch.inf))
    return scores


def next_scores(scores: Tensor, prompts: Tensor, new: Tensor, s: Settings) -> Tensor:
    """`penalised`, without banned tokens, and only forced tokens where a text must begin or end with one."""
    scores = penalised(scores, prompts, new, s)
    if s.tokens.banned:
        scores = scores.index_fill(1, torch.tensor(s.tokens.banned, device=scores.device), -torch.inf)
    forced: tuple[int, ...] = ()
    if s.tokens.first is not None and prompts.shape[1] + new.shape[1] == 1:
        forced = (s.tokens.first,)
    if s.tokens.last and new.shape[1] == s.max_new_tokens - 1:
        forced = s.tokens.last
    if not forced:
        return scores
    index = torch.tensor(forced, device=scores.device)
    return torch.full_like(scores, -torch.inf).index_fill_(1, index, 0.0)


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

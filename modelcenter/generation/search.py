"""Greedy search, sampling and beam search."""

from typing import Any

import torch
from torch import Tensor

from modelcenter.generation.scores import narrowed, next_scores
from modelcenter.generation.settings import Settings
from modelcenter.generation.state import State
from modelcenter.generation.stopping import StopStrings

_NEVER = -1e9  # below the score of any sequence


def _drawn(scores: Tensor, count: int, rng: torch.Generator | None) -> Tensor:
    return torch.multinomial(scores.softmax(-1), count, generator=rng)


def _ends_text(tokens: Tensor, s: Settings) -> Tensor:
    """Which tokens end a sequence."""
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for end in s.tokens.eos:
        ended |= tokens == end
    return ended


def extend(state: State, s: Settings, stop: StopStrings, streamer: Any, rng: torch.Generator | None) -> Tensor:
    """Greedy search or sampling: (rows * num_return_sequences, length) tokens, `pad` after each end."""
    state.repeat(s.num_return_sequences)
    start, tokens = state.tokens.shape[1], state.tokens
    done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    can_end = bool(s.tokens.eos or stop.strings)
    while True:
        scores = next_scores(state.logits, state.written, tokens[:, start:], s)
        new = _drawn(narrowed(scores, s), 1, rng)[:, 0] if s.do_sample else scores.argmax(-1)
        if can_end:
            new = new.masked_fill(done, s.tokens.pad)
        tokens = torch.cat((tokens, new[:, None]), 1)
        if streamer is not None:
            streamer.put(new.cpu())
        if s.tokens.eos:
            done |= _ends_text(new, s)
        if stop.strings:
            done |= torch.tensor(stop.found(tokens[:, start - 1 :]), device=done.device)
        full = tokens.shape[1] - start == s.max_new_tokens
        if full or (can_end and bool(done.all())):
            break
        state.all_done(False)
        state.step(new)
    return tokens


def _num_candidates(s: Settings) -> int:
    """The number of candidates with which num_beams continue even if the others end."""
    return max(2, 1 + len(s.tokens.eos)) * s.num_beams


def _beam_candidates(
    state: State, running: Tensor, scores: Tensor, s: Settings, rng: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The best, or sampled, continuations of each row's beams: scores, beams, next tokens, each (rows, count)."""
    start = state.tokens.shape[1]
    log_probs = next_scores(state.logits.log_softmax(-1), state.written, running[:, :, start:].flatten(0, 1), s)
    if s.do_sample:
        log_probs = narrowed(log_probs, s, len(s.tokens.eos) + 1 if s.tokens.eos else 2)
    rows, beams, vocab = *scores.shape, log_probs.shape[1]
    total = (log_probs.view(rows, beams, vocab) + scores[:, :, None]).flatten(1)
    count = _num_candidates(s)
    if s.do_sample:
        index = _drawn(total, count, rng)
        best, order = total.gather(1, index).sort(descending=True)
        index = index.gather(1, order)
    else:
        best, index = total.topk(count)
    return best, index // vocab, index % vocab


class _EndedBeams:
    """The best num_beams ended texts of each row; only the prompt in the slots of missing ones.

    Attributes:
        tokens: (rows, num_beams, longest). lengths: (rows, num_beams) of the texts.
        scores: (rows, num_beams). filled: (rows, num_beams), whether the slot has a text.
    """

    def __init__(self, running: Tensor, longest: int, s: Settings):
        """running: (rows, num_beams, length), the prompts."""
        size, device = running.shape[:2], running.device
        start = running.shape[2]
        self.settings = s
        self.tokens = torch.nn.functional.pad(running, (0, longest - start), value=s.tokens.pad)
        self.scores = torch.full(size, _NEVER, device=device)
        self.filled = torch.zeros(size, dtype=torch.bool, device=device)
        self.lengths = torch.full(size, start, device=device)
        self.open = torch.ones(size[0], 1, dtype=torch.bool, device=device)  # whether a better text is possible

    def add(self, texts: Tensor, scores: Tensor, new_length: int, ended: Tensor) -> None:
        """Add those of the texts (rows, count, length), with sums of log-probabilities `scores`, that `ended` now.

        new_length: their tokens after the prompt.
        """
        s, longest, length = self.settings, self.tokens.shape[2], texts.shape[2]
        final = scores / new_length**s.length_penalty
        full = self.filled.all(1, keepdim=True) & (s.early_stopping is True)
        final = final + (full | ~self.open | ~ended) * _NEVER
        padded = torch.nn.functional.pad(texts, (0, longest - length), value=s.tokens.pad)
        self.scores, chosen = torch.cat((self.scores, final), 1).topk(s.num_beams)
        self.tokens = torch.cat((self.tokens, padded), 1).gather(1, chosen[:, :, None].expand(-1, -1, longest))
        self.filled = torch.cat((self.filled, ended), 1).gather(1, chosen)
        lengths = torch.full(ended.shape, length, device=ended.device)
        self.lengths = torch.cat((self.lengths, lengths), 1).gather(1, chosen)

    def close(self, running: Tensor, new_length: int) -> None:
        """Close the rows whose worst text is at least as good as the best running one, of score `running` (rows, 1),
        can become at `new_length` tokens."""
        worst = torch.where(self.filled, self.scores.min(1, keepdim=True).values, _NEVER)
        possible = running / new_length**self.settings.length_penalty
        self.open = self.open & (possible > worst).any(1, keepdim=True)

    def best(self) -> Tensor:
        """(rows * num_return_sequences, length), cut after the longest."""
        count = self.settings.num_return_sequences
        return self.tokens[:, :count].flatten(0, 1)[:, : int(self.lengths[:, :count].max())]


def beam(state: State, s: Settings, stop: StopStrings, rng: torch.Generator | None) -> Tensor:
    """Beam search: the num_return_sequences best sequences of each row.

    As in transformers, a row keeps num_beams running sequences and its num_beams best ended ones, scored by the sum of
    log-probabilities over length ** length_penalty. It continues while the best running one, at its present length, has
    a higher score than the worst ended one. With early_stopping it stops when num_beams have ended; with "never" and a
    length_penalty above 0, the best running one is scored at the maximum length.
    """
    rows, beams, device, start = len(state.tokens), s.num_beams, state.tokens.device, state.tokens.shape[1]
    longest = start + s.max_new_tokens
    state.repeat(beams)
    running = state.tokens.view(rows, beams, start)
    scores = torch.zeros(rows, beams, device=device)
    scores[:, 1:] = _NEVER  # at first all beams of a row are the same
    ended = _EndedBeams(running, longest, s)
    offsets = torch.arange(rows, device=device)[:, None] * beams
    among_best = torch.arange(_num_candidates(s), device=device) < beams
    while True:
        best, origin, new = _beam_candidates(state, running, scores, s, rng)
        length = running.shape[2] + 1
        texts = torch.cat((running.gather(1, origin[:, :, None].expand(-1, -1, length - 1)), new[:, :, None]), 2)
        ends = _ends_text(new, s)
        if stop.strings:
            found = stop.found(texts[:, :, start - 1 :].flatten(0, 1))
            ends = ends | torch.tensor(found, device=device).view(ends.shape)
        if length == longest:
            ends = torch.ones_like(ends)
        scores, chosen = (best + ends * _NEVER).topk(beams)
        running = texts.gather(1, chosen[:, :, None].expand(-1, -1, length))
        order = (origin.gather(1, chosen) + offsets).flatten()
        ended.add(texts, best, length - start, ends & among_best)
        farthest = longest if s.early_stopping == "never" and s.length_penalty > 0 else length
        ended.close(scores[:, :1], farthest - start)
        if bool(ends.all()) or not bool(ended.open.any()) or (s.early_stopping is True and bool(ended.filled.all())):
            break
        state.all_done(False)
        state.step(running[:, :, -1].flatten(), order)
    return ended.best()

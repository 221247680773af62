"""Greedy search, sampling and beam search."""

from typing import Any

import torch
from torch import Tensor

from modelcenter.generation.scores import narrowed, penalised
from modelcenter.generation.settings import Settings
from modelcenter.generation.state import State
from modelcenter.generation.stopping import StopStrings

_NEVER = -1e9


def _drawn(scores: Tensor, count: int, rng: torch.Generator | None) -> Tensor:
    return torch.multinomial(scores.softmax(-1), count, generator=rng)


def _ended(tokens: Tensor, s: Settings) -> Tensor:
    """Which tokens end a sequence."""
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for end in s.eos:
        ended |= tokens == end
    return ended


def extend(state: State, s: Settings, stop: StopStrings, streamer: Any, rng: torch.Generator | None) -> Tensor:
    """Greedy search or sampling: (rows * num_return_sequences, length) tokens, `pad` after each end."""
    state.repeat(s.num_return_sequences)
    start, tokens = state.tokens.shape[1], state.tokens
    done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    can_end = bool(s.eos or stop.strings)
    while True:
        scores = penalised(state.logits, state.came, tokens[:, start:], s)
        new = _drawn(narrowed(scores, s), 1, rng)[:, 0] if s.do_sample else scores.argmax(-1)
        if can_end:
            new = new.masked_fill(done, s.pad)
        tokens = torch.cat((tokens, new[:, None]), 1)
        if streamer is not None:
            streamer.put(new.cpu())
        if s.eos:
            done |= _ended(new, s)
        if stop.strings:
            done |= torch.tensor(stop.found(tokens[:, start:]), device=done.device)
        full = tokens.shape[1] - start == s.max_new_tokens
        if full or (can_end and bool(done.all())):
            break
        state.all_done(False)
        state.step(new)
    return tokens


def beam(state: State, s: Settings, stop: StopStrings, rng: torch.Generator | None) -> Tensor:
    """Beam search: the num_return_sequences best of each row.

    As transformers: a row keeps num_beams running sequences and its num_beams best ended ones, scored by the sum of
    log-probabilities over length ** length_penalty; it goes on while the best running one, at its present length, beats
    the worst ended one. With early_stopping it ends when num_beams have ended; with "never" and a length_penalty above
    0 the best running one counts as if it had the greatest length.
    """
    rows, beams = len(state.tokens), s.num_beams
    device, start = state.tokens.device, state.tokens.shape[1]
    state.repeat(beams)
    keep = max(2, 1 + len(s.eos)) * beams  # so many that num_beams go on even if others end
    running = state.tokens.view(rows, beams, start)
    scores = torch.zeros(rows, beams, device=device)
    scores[:, 1:] = _NEVER  # all beams of a row are the same as yet
    longest = start + s.max_new_tokens
    ended = torch.full((rows, beams, longest), s.pad, device=device)
    ended_scores, has_ended = torch.full_like(scores, _NEVER), torch.zeros(rows, beams, dtype=torch.bool, device=device)
    ended_lengths = torch.zeros(rows, beams, dtype=torch.long, device=device)
    open_ = torch.ones(rows, 1, dtype=torch.bool, device=device)  # a better sequence may come
    first = torch.arange(keep, device=device) < beams
    offsets = torch.arange(rows, device=device)[:, None] * beams
    while True:
        length = running.shape[2]
        log_probs = penalised(state.logits.log_softmax(-1), state.came, running[:, :, start:].flatten(0, 1), s)
        if s.do_sample:
            log_probs = narrowed(log_probs, s, len(s.eos) + 1 if s.eos else 2)
        vocab = log_probs.shape[1]
        total = (log_probs.view(rows, beams, vocab) + scores[:, :, None]).flatten(1)
        if s.do_sample:
            index = _drawn(total, keep, rng)
            best = total.gather(1, index)
        else:
            best, index = total.topk(keep)
        origin, new = index // vocab, index % vocab
        longer = torch.cat((running.gather(1, origin[:, :, None].expand(-1, -1, length)), new[:, :, None]), 2)
        hits = _ended(new, s)
        if stop.strings:
            found = stop.found(longer[:, :, start:].flatten(0, 1))
            hits = hits | torch.tensor(found, device=device).view(hits.shape)
        if length + 1 == longest:
            hits = torch.ones_like(hits)
        # Those that go on.
        alive = best + hits * _NEVER
        scores, chosen = alive.topk(beams)
        running = longer.gather(1, chosen[:, :, None].expand(-1, -1, length + 1))
        order = (origin.gather(1, chosen) + offsets).flatten()
        # Those that ended now, beside those that had.
        counted = hits & first
        final = best / (length + 1 - start) ** s.length_penalty
        full = has_ended.all(1, keepdim=True) & (s.early_stopping is True)
        final = final + (full | ~open_ | ~counted) * _NEVER
        padded = torch.nn.functional.pad(longer, (0, longest - length - 1), value=s.pad)
        ended_scores, chosen = torch.cat((ended_scores, final), 1).topk(beams)
        ended = torch.cat((ended, padded), 1).gather(1, chosen[:, :, None].expand(-1, -1, longest))
        has_ended = torch.cat((has_ended, counted), 1).gather(1, chosen)
        lengths = torch.full_like(new, length + 1)
        ended_lengths = torch.cat((ended_lengths, lengths), 1).gather(1, chosen)
        # Whether anything better may come.
        worst = torch.where(has_ended, ended_scores.min(1, keepdim=True).values, _NEVER)
        farthest = longest if s.early_stopping == "never" and s.length_penalty > 0 else length + 1
        possible = scores[:, :1] / (farthest - start) ** s.length_penalty
        open_ = open_ & (possible > worst).any(1, keepdim=True)
        if bool(hits.all()) or not bool(open_.any()) or (s.early_stopping is True and bool(has_ended.all())):
            break
        state.all_done(False)
        state.step(running[:, :, -1].flatten(), order)
    best_ones = ended[:, : s.num_return_sequences].flatten(0, 1)
    return best_ones[:, : int(ended_lengths[:, : s.num_return_sequences].max())]

"""Greedy search, sampling and beam search."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelcenter.generation.scores import best_so_far, drawn, narrowed, next_scores, refuse
from modelcenter.generation.settings import Settings
from modelcenter.generation.state import State
from modelcenter.generation.stopping import StopStrings

_NEVER = -1e9  # below the score of any sequence


def _ends_text(tokens: Tensor, s: Settings) -> Tensor:
    """Which tokens end a sequence."""
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for end in s.tokens.eos:
        ended |= tokens == end
    return ended


def _contain(stop: StopStrings, texts: Tensor, counts: Sequence[int], slots: Sequence[int]) -> Tensor:
    """Which texts of the slots contain a stop string, (slots, n) bool.

    texts: (slots, n, 1 + longest), new tokens and the one before them. counts: new tokens in the texts of each slot.
    """
    found = torch.zeros(texts.shape[:2], dtype=torch.bool)
    for count in {counts[slot] for slot in slots}:
        alike = [slot for slot in slots if counts[slot] == count]
        rows = texts[torch.tensor(alike, device=texts.device), :, : 1 + count]
        found[alike] = torch.tensor(stop.found(rows.flatten(0, 1))).view(len(alike), -1)
    return found.to(texts.device)


def _over(state: State, active: Sequence[int], ended: Tensor) -> list[int]:
    """The slots whose texts `ended` (slots,) now, of the active ones. Waits for the device once.

    Raises ValueError if an active slot had no token to choose: see `best_so_far`.
    """
    best = state.of_slots["best"].view(len(ended), -1)
    over, finite = torch.stack((ended, best.isfinite().all(1))).tolist()
    for slot in active:
        if not finite[slot]:
            values = best[slot]
            refuse(state.rows[slot] or 0, float(values[~values.isfinite()][0]))
    return [slot for slot in active if over[slot]]


def extend(state: State, s: Settings, stop: StopStrings, streamer: Any, rng: torch.Generator | None) -> None:
    """Greedy search or sampling: num_return_sequences texts of each row, `pad` after each end."""
    copies, start, device = state.copies, state.texts.start, state.texts.tokens.device
    can_end = bool(s.tokens.eos or stop.strings)
    state.begin(done=torch.zeros(copies, dtype=torch.bool, device=device), best=torch.zeros(copies, device=device))
    while state.next():
        if not (active := state.active()):
            continue
        limits, done = state.limits, state.of_slots["done"]
        scores = next_scores(state.logits, state.texts, s, limits)
        if s.do_sample:
            scores = narrowed(scores, s)
        best, new = scores.max(-1)
        if s.do_sample:
            new = drawn(scores, 1, rng)[:, 0]
        state.of_slots["best"] = best_so_far(state.of_slots["best"], best.view(done.shape), done)
        if can_end:
            new = new.masked_fill(done.flatten(), s.tokens.pad)
        if streamer is not None:
            streamer.put(new.cpu())
        state.choose(new)
        counts = state.texts.counts[::copies]
        if s.tokens.eos:
            done |= _ends_text(new, s).view(done.shape)
        if stop.strings:
            texts = state.texts.tokens.view(len(counts), copies, -1)[:, :, start - 1 : state.texts.used]
            done |= _contain(stop, texts, counts, active)
        full = [slot for slot in active if counts[slot] == limits[slot * copies] or state.is_late(slot)]
        if not (can_end or full):
            continue
        if slots := sorted({*full, *_over(state, active, done.all(1))}):
            texts = state.texts.new([slot * copies + i for slot in slots for i in range(copies)])
            texts = texts.masked_fill(texts < 0, s.tokens.pad).view(len(slots), copies, -1)
            state.finish(slots, texts, texts.shape[2])


def _num_candidates(s: Settings) -> int:
    """The number of candidates with which num_beams continue even if the others end."""
    return max(2, 1 + len(s.tokens.eos)) * s.num_beams


def _beam_candidates(state: State, s: Settings, rng: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best score (slots,) of the continuations of each slot's beams, and the best, or sampled, of these: scores,
    beams, next tokens, each (slots, count)."""
    scores = state.of_slots["scores"]
    log_probs = next_scores(state.logits.log_softmax(-1), state.texts, s, state.limits)
    if s.do_sample:
        log_probs = narrowed(log_probs, s, len(s.tokens.eos) + 1 if s.tokens.eos else 2)
    slots, beams, vocab = *scores.shape, log_probs.shape[1]
    total = (log_probs.view(slots, beams, vocab) + scores[:, :, None]).flatten(1)
    count = _num_candidates(s)
    if s.do_sample:
        index = drawn(total, count, rng)
        best, order = total.gather(1, index).sort(descending=True)
        index, top = index.gather(1, order), total.amax(1)
    else:
        best, index = total.topk(count)
        top = best[:, 0]
    return top, best, index // vocab, index % vocab


def _candidate_texts(state: State, origin: Tensor, new: Tensor) -> Tensor:
    """The texts of candidates that continue the beams `origin` (slots, count) by the tokens `new` (slots, count): the
    token before the new ones, and these, (slots, count, 1 + longest), -1 after them."""
    texts, (slots, count) = state.texts, origin.shape
    running = texts.tokens.view(slots, -1, texts.tokens.shape[1])[:, :, texts.start - 1 : texts.used + 1]
    made = running.gather(1, origin[:, :, None].expand(-1, -1, running.shape[2]))
    places = (texts.ends().view(slots, -1)[:, 0] - texts.start + 1).clamp(max=made.shape[2] - 1)
    return made.scatter(2, places[:, None, None].expand(-1, count, 1), new[:, :, None])


class _EndedBeams:
    """The best num_beams ended texts of each slot.

    It keeps these tensors of the state's of_slots, of which `at_first` gives those of a slot without ended texts:
        ended: (slots, num_beams, room), new tokens, padding after them. lengths: (slots, num_beams), how many.
        ended_scores: (slots, num_beams). filled: (slots, num_beams), whether there is such a text.
        open: (slots, 1), whether a better text is possible.
    """

    def __init__(self, of_slots: dict[str, Tensor], s: Settings):
        self.settings, self._of = s, of_slots

    @staticmethod
    def at_first(s: Settings, room: int, device: torch.device) -> dict[str, Tensor]:
        return {
            "ended": torch.full((s.num_beams, room), s.tokens.pad, device=device),
            "lengths": torch.zeros(s.num_beams, dtype=torch.long, device=device),
            "ended_scores": torch.full((s.num_beams,), _NEVER, device=device),
            "filled": torch.zeros(s.num_beams, dtype=torch.bool, device=device),
            "open": torch.ones(1, dtype=torch.bool, device=device),
        }

    def add(self, texts: Tensor, scores: Tensor, counts: Sequence[int], ended: Tensor) -> None:
        """Add those of the texts (slots, n, longest), -1 after their ends, that `ended` (slots, n) now.

        scores: (slots, n) sums of log-probabilities. counts: new tokens in the texts of each slot.
        """
        s, of = self.settings, self._of
        final = scores / _norms(counts, s, scores)
        full = of["filled"].all(1, keepdim=True) & (s.early_stopping is True)
        final = final + (full | ~of["open"] | ~ended) * _NEVER
        of["ended_scores"], chosen = torch.cat((of["ended_scores"], final), 1).topk(s.num_beams)
        room = of["ended"].shape[2]
        texts = texts.masked_fill(texts < 0, s.tokens.pad)
        texts = torch.nn.functional.pad(texts, (0, room - texts.shape[2]), value=s.tokens.pad)
        of["ended"] = torch.cat((of["ended"], texts), 1).gather(1, chosen[:, :, None].expand(-1, -1, room))
        of["filled"] = torch.cat((of["filled"], ended), 1).gather(1, chosen)
        lengths = torch.tensor(counts, device=ended.device)[:, None].expand(ended.shape)
        of["lengths"] = torch.cat((of["lengths"], lengths), 1).gather(1, chosen)

    def close(self, running: Tensor, counts: Sequence[int]) -> None:
        """Close the slots whose worst text is at least as good as the best running one, of score `running` (slots, 1),
        can become at `counts` tokens."""
        of = self._of
        worst = torch.where(of["filled"], of["ended_scores"].min(1, keepdim=True).values, _NEVER)
        possible = running / _norms(counts, self.settings, running)
        of["open"] = of["open"] & (possible > worst).any(1, keepdim=True)

    def over(self) -> Tensor:
        """(slots,) bool: no further text would be kept."""
        closed = ~self._of["open"][:, 0]
        return closed | self._of["filled"].all(1) if self.settings.early_stopping is True else closed

    def best(self, slots: Sequence[int]) -> tuple[Tensor, int]:
        """(len(slots), num_return_sequences, room) the best texts of some slots, and the length of the longest."""
        index = torch.tensor(slots, device=self._of["ended"].device)
        count = self.settings.num_return_sequences
        texts, lengths = self._of["ended"][index, :count], self._of["lengths"][index, :count]
        return texts, int(lengths.max())


def _norms(counts: Sequence[int], s: Settings, like: Tensor) -> Tensor:
    """(slots, 1): what the scores of texts of as many new tokens are divided by."""
    return torch.tensor([count**s.length_penalty for count in counts], dtype=like.dtype, device=like.device)[:, None]


def beam(state: State, s: Settings, stop: StopStrings, rng: torch.Generator | None) -> None:
    """Beam search: the num_return_sequences best sequences of each row.

    As in transformers, a row keeps num_beams running sequences and its num_beams best ended ones, scored by the sum of
    log-probabilities over length ** length_penalty. It continues while the best running one, at its present length, has
    a higher score than the worst ended one. With early_stopping it stops when num_beams have ended; with "never" and a
    length_penalty above 0, the best running one is scored at the maximum length.
    """
    beams, device = s.num_beams, state.texts.tokens.device
    scores = torch.full((beams,), _NEVER, device=device)
    scores[0] = 0.0  # at first all beams of a row are the same
    state.begin(scores=scores, best=torch.zeros((), device=device), **_EndedBeams.at_first(s, state.texts.room, device))
    among_best = torch.arange(_num_candidates(s), device=device) < beams
    while state.next():
        if not (active := state.active()):
            continue
        top, best, origin, new = _beam_candidates(state, s, rng)
        closed = ~state.of_slots["open"][:, 0]
        state.of_slots["best"] = best_so_far(state.of_slots["best"], top, closed)
        limits = state.limits[::beams]
        counts = [min(count + 1, limit) for count, limit in zip(state.texts.counts[::beams], limits, strict=True)]
        texts, ends = _candidate_texts(state, origin, new), _ends_text(new, s)
        if stop.strings:
            ends = ends | _contain(stop, texts, counts, active)
        full = [counts[slot] == limits[slot] or state.is_late(slot) for slot in range(len(counts))]
        ends = ends | torch.tensor(full, device=device)[:, None]
        state.of_slots["scores"], chosen = (best + ends * _NEVER).topk(beams)
        ended = _EndedBeams(state.of_slots, s)
        ended.add(texts[:, :, 1:], best, counts, ends & among_best)
        at_most = s.early_stopping == "never" and s.length_penalty > 0
        ended.close(state.of_slots["scores"][:, :1], limits if at_most else counts)
        offsets = torch.arange(len(counts), device=device)[:, None] * beams
        state.choose(new.gather(1, chosen).flatten(), (origin.gather(1, chosen) + offsets).flatten())
        if slots := _over(state, active, ends.all(1) | ended.over()):
            state.finish(slots, *ended.best(slots))

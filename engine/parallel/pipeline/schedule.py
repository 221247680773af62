"""Pipeline schedules: in which order a stage works, and which units it has."""

from __future__ import annotations

Action = tuple[bool, int, int]  # forward, part of the model, microbatch


def stage_actions(rank: int, size: int, chunks: int, microbatches: int) -> list[Action]:
    """The actions of stage ``rank`` of ``size`` in order, where each stage has ``chunks`` parts of the model.

    One part: 1F1B (Narayanan et al. 2019, arXiv:1806.03377). Several: interleaved 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473), for which ``microbatches`` is a multiple of ``size``.
    """
    assert chunks == 1 or microbatches % size == 0
    total = chunks * microbatches
    ahead = size - rank - 1 if chunks == 1 else 2 * (size - rank - 1) + (chunks - 1) * size
    ahead = min(total, ahead)

    def action(forward: bool, k: int) -> Action:
        if chunks == 1:
            return forward, 0, k
        chunk = k // size % chunks
        return forward, chunk if forward else chunks - 1 - chunk, k // (size * chunks) * size + k % size

    done = [action(True, k) for k in range(ahead)]
    for k in range(total - ahead):
        done += [action(True, ahead + k), action(False, k)]
    return done + [action(False, k) for k in range(total - ahead, total)]


def split_units(units: int, stages: int) -> list[range]:
    """The units of each stage: as equal in number as can be, the first stages with one more."""
    short, longer = divmod(units, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + short + (stage < longer))
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]

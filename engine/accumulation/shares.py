"""What the ranks tell each other before a global batch: how many microbatches and items each of them has."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from engine import runtime
from engine.torch_compat import all_gather_flat

_MAX_TERMS = 16  # room for this many loss terms in the one collective that agrees on the counts


class _Share(NamedTuple):
    """A rank's share of the global batch, as integers, so that one tensor of one size carries it to the others."""

    failed: int  # whether ``counts`` raised
    microbatches: int
    has_empty: int
    terms: int  # a hash of their names
    unsure: int
    items: tuple[int, ...]  # of each term


class GlobalBatch(NamedTuple):
    """What the ranks have agreed on.

    most, fewest: microbatches of a rank. unsure: whether any rank is. totals: {term: number of items, at least 1}.
    """

    most: int
    fewest: int
    unsure: bool
    totals: dict[str, int]


def agree_on_counts(
    microbatches: list[Any],
    counts: Callable[[Any], Mapping[str, int]],
    empty: Callable[[], Any] | None,
    unsure: bool,
) -> GlobalBatch:
    """Add up the shares of all ranks, with one collective.

    Args:
        unsure: whether this rank cannot rule out that a microbatch leaves a parameter unused.
    """
    if runtime.world_size() == 1:
        own = _count(microbatches, counts, empty)
        if not microbatches:
            raise ValueError("accumulate was given no microbatches")
        return GlobalBatch(len(microbatches), len(microbatches), False, _totals(own))
    own, failure = {}, None
    try:
        own = _count(microbatches, counts, empty)
    except Exception as error:  # told to the other ranks below, then raised
        failure = error
    terms = sorted(own)
    names, items = zlib.crc32("\n".join(terms).encode()), tuple(own[term] for term in terms)
    shares = _gather(_Share(failure is not None, len(microbatches), empty is not None, names, unsure, items))
    if failure is not None:
        raise failure
    _check_shares(shares, terms)
    together, pipes = runtime.model_ranks(), len(shares) // runtime.current().pp_size
    sums = {term: sum(share.items[i] for share in shares[:pipes:together]) for i, term in enumerate(terms)}
    numbers = [share.microbatches for share in shares]
    return GlobalBatch(max(numbers), min(numbers), any(share.unsure for share in shares), _totals(sums))


def _count(
    microbatches: list[Any], counts: Callable[[Any], Mapping[str, int]], empty: Callable[[], Any] | None
) -> dict[str, int]:
    """{term: items in this rank's microbatches}; where it has none, the terms are those of an empty one."""
    own: dict[str, int] = {}
    for microbatch in microbatches:
        for term, n in _checked(counts(microbatch)).items():
            own[term] = own.get(term, 0) + int(n)
    if not microbatches and empty is not None:
        own = {term: 0 for term in _checked(counts(empty()))}
    if len(own) > _MAX_TERMS:
        raise ValueError(f"counts returned {len(own)} loss terms, expected at most {_MAX_TERMS}")
    return own


def _gather(share: _Share) -> list[_Share]:
    """The shares of all ranks. Collective."""
    *facts, items = share
    row = [*map(int, facts), *items, *[0] * (_MAX_TERMS - len(items))]
    table = torch.empty(runtime.world_size(), len(row), dtype=torch.int64, device=runtime.message_device())
    all_gather_flat(table, torch.tensor(row, dtype=torch.int64, device=table.device))
    return [_Share._make([*row[: len(facts)], tuple(row[len(facts) :])]) for row in table.tolist()]


def _check_shares(shares: Sequence[_Share], terms: Sequence[str]) -> None:
    """Raise an error if the shares do not make one global batch. terms: this rank's."""
    if failed := [rank for rank, share in enumerate(shares) if share.failed]:
        raise RuntimeError(f"counts raised an error on rank {failed[0]}: see the error of that rank")
    numbers = [share.microbatches for share in shares]
    most = max(numbers)
    if most == 0:
        raise ValueError("accumulate was given no microbatches on any rank")
    if short := [rank for rank, share in enumerate(shares) if share.microbatches < most and not share.has_empty]:
        raise ValueError(
            f"rank {short[0]} has {numbers[short[0]]} microbatches but rank {numbers.index(most)} has {most}: pass "
            "empty= so that ranks with fewer can take part"
        )
    if different := [rank for rank, share in enumerate(shares) if share.terms != shares[0].terms]:
        raise ValueError(f"ranks count different loss terms: rank {different[0]} and rank 0. This rank has {terms}")
    together, pipes = runtime.model_ranks(), len(shares) // runtime.current().pp_size
    for rank, share in enumerate(shares):
        first = rank % pipes // together * together
        if share._replace(unsure=0) != shares[first]._replace(unsure=0):
            raise ValueError(
                f"ranks {first} and {rank} compute one batch together (pp_size, tp_size, cp_size) but were given "
                "different microbatches: split the data by engine.data_rank() and engine.data_size()"
            )


def _totals(items: Mapping[str, int]) -> dict[str, int]:
    """The divisors of the loss terms: 1 for a term without items, whose sum is 0."""
    return _Totals({term: max(1, n) for term, n in sorted(items.items())})


class _Totals(dict[str, int]):
    def __missing__(self, term: str) -> int:
        raise ValueError(f"forward divides by totals[{term!r}], but counts returned {', '.join(self) or 'no term'}")


def _checked(found: Any) -> Mapping[str, int]:
    """What ``counts`` returned, if it is valid."""
    if not isinstance(found, Mapping):
        raise ValueError(f"counts returned {found!r}, expected {{term: number of items}}")
    for term, n in found.items():
        is_number = isinstance(n, Real) or (isinstance(n, torch.Tensor) and n.numel() == 1)
        if not (is_number and 0 <= n < math.inf and n == int(n)):
            raise ValueError(f"counts returned {n!r} for {term!r}, expected a whole number of items, at least 0")
    return found
